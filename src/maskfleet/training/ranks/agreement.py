"""Checks between ranks before the first step: what must be equal on all of them, and what should be."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from maskfleet import __version__
from maskfleet.config.base import Config
from maskfleet.config.run import RunConfig
from maskfleet.data.store.annotations import AnnotationStore
from maskfleet.errors import TrainingError
from maskfleet.log import logger
from maskfleet.training.distributed import Ranks
from maskfleet.training.ranks.joining import ranks_by_host

# Paths and processes of a host, which do not change what a run computes.
HOST_FIELDS = ("data.root", "data.cache_dir", "data.cache_gb", "data.num_workers")
MAX_SHOWN = 5
_GIB = 2**30
_SAME_DATA = "copy the same data set to all hosts, or use a file system that they share"


def expect_same_software(ranks: Ranks, config: RunConfig) -> None:
    """Raise on all ranks if the versions or the configuration of one differ from rank 0's."""
    facts = {"maskfleet": __version__, "torch": torch.__version__} | config_facts(config)
    expect_same(ranks, facts, remedy="install the same versions and give the same run file and options on all hosts")


def expect_same_data(ranks: Ranks, stores: Sequence[AnnotationStore]) -> None:
    """Raise on all ranks if the annotations of one differ from rank 0's."""
    facts = {}
    for number, store in enumerate(stores, 1):  # files of several sets may have one name; folders differ between hosts
        name = f"the SHA-256 of {store.split.annotations.name}, data set {number} of {len(stores)},"
        facts[name] = f"{store.source_sha256} ({len(store)} images)"
    expect_same(ranks, facts, remedy=_SAME_DATA)


def expect_same_canvases(ranks: Ranks, canvases: Sequence[tuple[int, int] | None]) -> None:
    """Raise on all ranks if the canvases of one differ from rank 0's: each would compile other steps."""
    shapes = ", ".join("any" if canvas is None else f"{canvas[0]} x {canvas[1]}" for canvas in canvases)
    expect_same(ranks, {"the list of canvases": f"{len(canvases)}: {shapes}"}, remedy=_SAME_DATA)


def expect_same(ranks: Ranks, facts: Mapping[str, str], *, remedy: str) -> None:
    """Raise a TrainingError on every rank if a fact of any rank, by name, differs from rank 0's."""
    if ranks.worker.world_size == 1:
        return
    of_chief: dict[str, str] = ranks.broadcast(dict(facts))
    names = sorted({*facts, *of_chief}, key=[*of_chief, *facts].index)
    own = [[name, facts.get(name, "none"), of_chief.get(name, "none")] for name in names]
    gathered = ranks.gather([fact for fact in own if fact[1] != fact[2]][:MAX_SHOWN])
    problem = ranks.broadcast(_problem(ranks, gathered) if gathered is not None else None)
    if problem:
        raise TrainingError(problem, remedy=remedy)


def warn_if_gpus_differ(ranks: Ranks, device: torch.device) -> None:
    """Log one warning on rank 0 if the ranks have GPUs of several kinds."""
    kind = "CPU"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        kind = f"{properties.name} with {properties.total_memory / _GIB:.0f} GiB"
    kinds = ranks.gather(kind)
    if kinds is not None and len(set(kinds)) > 1:
        logger.warning("the ranks have different devices, and the slowest sets the pace: %s", kinds_text(ranks, kinds))


def kinds_text(ranks: Ranks, kinds: Sequence[str]) -> str:
    """Which ranks have which kind of device; `kinds` are by rank."""
    members = {kind: [rank for rank, own in enumerate(kinds) if own == kind] for kind in dict.fromkeys(kinds)}
    return "; ".join(f"{kind}: {ranks_by_host(of_kind, ranks.hosts)}" for kind, of_kind in members.items())


def config_facts(config: Config) -> dict[str, str]:
    """Every field of `config` that must be equal on all ranks, by dotted path, as JSON."""
    facts = _flattened(config.model_dump(mode="json"))
    return {path: value for path, value in facts.items() if path not in HOST_FIELDS}


def _flattened(node: Any, prefix: str = "") -> dict[str, str]:
    if not isinstance(node, dict):
        return {prefix.removesuffix("."): json.dumps(node)}
    return {path: text for name, value in node.items() for path, text in _flattened(value, f"{prefix}{name}.").items()}


def _problem(ranks: Ranks, gathered: Sequence[Sequence[Sequence[str]]]) -> str:
    """What to tell the user about the differences that each rank found; empty if there are none."""
    by_difference: dict[tuple[str, ...], list[int]] = {}
    for rank, differences in enumerate(gathered):
        for name, own, of_chief in differences:
            by_difference.setdefault((name, own, of_chief), []).append(rank)
    lines = [
        f"{name} is {own} for {ranks_by_host(members, ranks.hosts)}, but {of_chief} for rank 0 on {ranks.hosts[0]}"
        for (name, own, of_chief), members in by_difference.items()
    ]
    more = [f"and {len(lines) - MAX_SHOWN} more differences"] if len(lines) > MAX_SHOWN else []
    return "\n  ".join(["the ranks differ:", *lines[:MAX_SHOWN], *more]) if lines else ""
