"""Checks before the first step: the data, and the weights to start from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from maskfleet.config.run import RunConfig
from maskfleet.data.checks.problems import bad_images, raise_for, summarise
from maskfleet.data.checks.together import check_data
from maskfleet.data.files.root import open_root
from maskfleet.data.store.annotations import AnnotationStore
from maskfleet.data.store.dataset import open_stores
from maskfleet.errors import ConfigError, MaskfleetError, WeightsError
from maskfleet.log import count_text, logger
from maskfleet.model.weights.zoo.cache import cached, fetch
from maskfleet.model.weights.zoo.catalogue import zoo_file
from maskfleet.training.distributed import Ranks
from maskfleet.training.ranks.agreement import expect_same_data
from maskfleet.training.ranks.per_host import first_on_host

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
    expect_same_data(ranks, [*train, *val])
    skip = _broken_images(config, [*train, *val], ranks)
    categories: list[dict[str, object]] = [{"id": one.id, "name": one.name} for one in train[0].categories]
    return RunData(train, val, skip[: len(train)], skip[len(train) :], categories)


def _open_stores(config: RunConfig, ranks: Ranks) -> tuple[list[AnnotationStore], list[AnnotationStore]]:
    """Training and validation stores; rank 0 builds them, then the first rank of a host that does not share its files.

    The other ranks open them.
    """

    def opened() -> tuple[list[AnnotationStore], list[AnnotationStore]]:
        return open_stores(config.data, config.data.train), open_stores(config.data, config.data.val)

    if ranks.worker.is_chief:
        opened()
    ranks.barrier()
    with first_on_host(ranks):
        return opened()


def _broken_images(config: RunConfig, stores: Sequence[AnnotationStore], ranks: Ranks) -> list[set[int]]:
    """Ids of images to leave out, by store: an error, unless `data.on_bad` is skip; then all problems are logged."""
    broken: list[list[int]] = []
    if ranks.worker.is_chief:
        problems = check_data(stores, workers=lambda _: CHECK_THREADS, listed=True)
        all_problems = [problem for of_store in problems for problem in of_store]
        raise_for(all_problems, config.data.on_bad)
        if any(problem.severity == "error" for problem in all_problems):
            logger.warning("%s", summarise(all_problems))
        elif all_problems:
            num_warnings = count_text(len(all_problems), "warning")
            logger.info("%s about the data; `maskfleet data inspect` gives details", num_warnings)
        broken = [sorted(bad_images(of_store)) for of_store in problems]
    return [set(ids) for ids in ranks.broadcast(broken)]


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


def fetch_weights(config: RunConfig, ranks: Ranks) -> None:
    """Fetch the weights that a new run starts from to the cache, if they are published ones and not here.

    One rank per host fetches; its error is that of all ranks there.
    """
    name = config.train.weights or config.model.backbone.weights
    of_host, failure = ranks.of_host(), None
    if name is not None and of_host.worker.is_chief:
        try:
            _fetch_missing(name, config)
        except MaskfleetError as error:
            failure = [error.what, error.remedy]
    failure = of_host.broadcast(failure)
    if failure is not None:
        raise WeightsError(failure[0], remedy=failure[1])


def _fetch_missing(name: str, config: RunConfig) -> None:
    published = zoo_file(name)
    if published is not None and _local_weights(name, config) is None and cached(published) is None:
        logger.info("%s is not here: fetching it from %s", name, published.urls(None)[-1])
        logger.info("the weights are in %s; later runs use them from there", fetch(published))


def found_weights(name: str, config: RunConfig) -> Path:
    """The weights file `name`, relative to the working directory or to `data.root`, or published ones in the cache."""
    path, published = _local_weights(name, config), zoo_file(name)
    if path is None and published is not None:
        path = cached(published)
    if path is None:
        raise WeightsError(
            f"there are no weights at {name} or under {config.data.root}",
            remedy="put the file there, give its path or a name that `maskfleet weights list` shows, or train from "
            "random weights with --recipe scratch",
        )
    return path


def _local_weights(name: str, config: RunConfig) -> Path | None:
    here = Path(name).expanduser()
    if (here / "model.safetensors").exists():  # the directory of a finished run
        return here / "model.safetensors"
    if here.is_file():
        return here
    root = open_root(config.data.root, config.data)
    return root.file(f"{name}/model.safetensors") or root.file(name)
