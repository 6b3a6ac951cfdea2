"""Checks before the first step: the data, and the weights to start from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from maskfleet.config.run import RunConfig
from maskfleet.data.checks.annotations import check_split
from maskfleet.data.checks.problems import bad_images, raise_for, summarise
from maskfleet.data.store.annotations import AnnotationStore
from maskfleet.data.store.dataset import open_stores
from maskfleet.errors import ConfigError, DataError, WeightsError
from maskfleet.log import logger
from maskfleet.training.distributed import Ranks

CHECK_THREADS = 8


@dataclass(frozen=True, slots=True)
class RunData:
    """The data sets of a run."""

    train_stores: list[AnnotationStore]
    val_stores: list[AnnotationStore]
    train_skip: list[set[int]]  # ids of broken images, by store
    val_skip: list[set[int]]
    categories: list[dict[str, object]]


def open_data(config: RunConfig, ranks: Ranks) -> RunData:
    """Open and check the training and validation sets of `config`."""
    train, val = _open_stores(config, ranks)
    skip = _broken_images(config, [*train, *val], ranks)
    return RunData(train, val, skip[: len(train)], skip[len(train) :], _shared_categories([*train, *val]))


def _open_stores(config: RunConfig, ranks: Ranks) -> tuple[list[AnnotationStore], list[AnnotationStore]]:
    """Training and validation stores; rank 0 builds them, then the other ranks open them."""
    if not ranks.worker.is_chief:
        ranks.barrier()
    train, val = open_stores(config.data, config.data.train), open_stores(config.data, config.data.val)
    if ranks.worker.is_chief:
        ranks.barrier()
    return train, val


def _broken_images(config: RunConfig, stores: Sequence[AnnotationStore], ranks: Ranks) -> list[set[int]]:
    """Ids of images to leave out, by store; all problems are logged, and are errors unless `data.on_bad` is skip."""
    broken: list[set[int]] = []
    if ranks.worker.is_chief:
        problems = [check_split(store, workers=CHECK_THREADS) for store in stores]
        all_problems = [problem for of_store in problems for problem in of_store]
        if any(problem.severity == "error" for problem in all_problems):
            logger.warning("%s", summarise(all_problems))
        elif all_problems:
            logger.info("%d warnings about the data; `maskfleet data inspect` lists them", len(all_problems))
        raise_for(all_problems, config.data.on_bad)
        broken = [bad_images(of_store) for of_store in problems]
    shared: list[set[int]] = ranks.broadcast(broken)
    return shared


def _shared_categories(stores: Sequence[AnnotationStore]) -> list[dict[str, object]]:
    """Ids and names of the training categories; validation sets must have the same ids."""
    first = [(category.id, category.name) for category in stores[0].categories]
    for store in stores[1:]:
        ids = [category.id for category in store.categories]
        if ids != [identity for identity, _ in first]:
            raise DataError(
                f"{store.split.annotations} has other categories than {stores[0].split.annotations}",
                remedy="give all sets of a run the same list of categories",
            )
    return [{"id": identity, "name": name} for identity, name in first]


def check_backbone_weights(config: RunConfig) -> None:
    """Raise ConfigError if layers or statistics that were never trained would be frozen."""
    backbone = config.model.backbone
    has_weights = config.train.weights is not None or backbone.weights is not None
    if not has_weights and (backbone.freeze_at > 0 or backbone.norm == "FreezeBN"):
        raise ConfigError(
            f"the backbone starts from random weights, but model.backbone.freeze_at is {backbone.freeze_at} and "
            f"model.backbone.norm is {backbone.norm}, which need trained ones",
            remedy="give a detector (--set train.weights=FILE) or a backbone (--set model.backbone.weights=FILE), or "
            "train from random weights with --recipe scratch",
        )


def found_weights(name: str, config: RunConfig) -> Path:
    """The weights file `name`, relative to the working directory or to `data.root`."""
    for path in (Path(name).expanduser(), Path(config.data.root).expanduser() / name):
        if path.is_dir() and (path / "model.safetensors").exists():  # the directory of a finished run
            return path / "model.safetensors"
        if path.is_file():
            return path
    raise WeightsError(
        f"there are no weights at {name} or under {config.data.root}",
        remedy="put the file there, give its path, or train from random weights with --recipe scratch",
    )
