"""What one run has done so far, read from the files that it writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from maskfleet.config.load import METRICS_FILE, RUN_FILE
from maskfleet.config.yaml import parse_value
from maskfleet.errors import ConfigError
from maskfleet.launch.job import JobState

WEIGHTS_FILE, LOG_FILE = "model.safetensors", "log.txt"
FILES = (RUN_FILE, METRICS_FILE, LOG_FILE, WEIGHTS_FILE)  # of a run directory, that a summary is made from
UNFINISHED = "unfinished"
SPEEDS = 20  # the speed is the median of the last so many log lines
_AP = "mAP({})/IoU=0.5:0.95"
_TOTAL = re.compile(r"step: \d+/(\d+)|; (\d+) steps of \d+ images")
_RECIPE = re.compile(r"^recipe:[ \t]*(.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The content of a run's files as far as it is needed, and when each file changed, in seconds since 1970."""

    name: str  # where the run is
    run_yaml: str
    metrics: bytes
    log: str  # its beginning and its end
    changed_at: dict[str, float]  # by file name; only of files that exist


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One line of `maskfleet runs`."""

    run: str
    recipe: str | None
    step: int
    total_steps: int | None
    box_ap: float | None  # the best so far, 0..1
    mask_ap: float | None
    images_per_s: float | None
    state: str
    age_s: float | None  # since the run last wrote a metric, its log or its weights

    @property
    def ap(self) -> float | None:
        """Mask AP, or box AP of a model without masks."""
        return self.box_ap if self.mask_ap is None else self.mask_ap


def summary_of(files: RunRecord, *, now: float, job: JobState | None = None, is_locked: bool = False) -> RunSummary:
    """What `files` say at the moment `now`; `job` is the state of a launched run, `is_locked` that one trains here."""
    records = list(_records(files.metrics))
    step = max((record["step"] for record in records), default=0)
    totals = [int(match[1] or match[2]) for match in _TOTAL.finditer(files.log)]
    total = totals[-1] if totals else None
    speeds = [record["images_per_s"] for record in records if _is_number(record.get("images_per_s"))][-SPEEDS:]
    changed = [at for name, at in files.changed_at.items() if name != RUN_FILE] or list(files.changed_at.values())
    return RunSummary(
        files.name,
        _recipe(files.run_yaml),
        step,
        total,
        _best(records, "bbox"),
        _best(records, "segm"),
        round(median(speeds), 2) if speeds else None,
        _state(files, job, is_locked=is_locked, is_at_end=total is not None and step >= total),
        round(max(0.0, now - max(changed)), 1) if changed else None,
    )


def _state(files: RunRecord, job: JobState | None, *, is_locked: bool, is_at_end: bool) -> str:
    if job is not None and job is not JobState.UNKNOWN:
        return str(job)
    if is_locked:
        return str(JobState.RUNNING)
    weights, metrics = (files.changed_at.get(name) for name in (WEIGHTS_FILE, METRICS_FILE))
    # A run that was extended has the weights of its first end, and newer metrics.
    if weights is not None and (is_at_end or metrics is None or weights >= metrics):
        return str(JobState.DONE)
    return UNFINISHED


def _records(metrics: bytes) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl; one that a kill left incomplete is skipped."""
    for line in metrics.splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            yield record


def _best(records: list[dict[str, Any]], kind: str) -> float | None:
    name = _AP.format(kind)
    return max((record[name] for record in records if _is_number(record.get(name)) and record[name] >= 0), default=None)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _recipe(run_yaml: str) -> str | None:
    """The recipe, without reading the rest: a run of another version of maskfleet may have other fields."""
    found = _RECIPE.search(run_yaml)
    if found is None:
        return None
    try:
        return str(parse_value(found[1], where=RUN_FILE))
    except ConfigError:
        return None
