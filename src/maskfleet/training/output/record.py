"""Reads the record of a run from its directory, for its report."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from maskfleet.config.base import replaced
from maskfleet.config.load import CHECKPOINTS, RUN_FILE
from maskfleet.config.load import load as load_run_file
from maskfleet.config.run import RunConfig
from maskfleet.data.store.annotations import AnnotationStore
from maskfleet.data.store.dataset import open_stores
from maskfleet.errors import DataError, MaskfleetError
from maskfleet.evaluation.analysis.analyze import analyze
from maskfleet.evaluation.coco_eval import CocoScores, Kind
from maskfleet.evaluation.detections_file import FILE as DETECTIONS_FILE
from maskfleet.evaluation.detections_file import StoredDetections, read_detections
from maskfleet.evaluation.evaluate import annotations_of, evaluate, keep_detections
from maskfleet.evaluation.report.pictures import example_pictures
from maskfleet.evaluation.report.record import KINDS, ReportedRun
from maskfleet.inference.load import load
from maskfleet.model.weights.checkpoint import CheckpointFolder
from maskfleet.system.files import write_atomically
from maskfleet.training.output.metrics import read_metrics

ENVIRONMENT_FILE = "environment.json"
Progress = Callable[[str, int, int | None], None]  # what is being done, how much of it, and of how much


def record_of(
    run_dir: Path,
    *,
    config: RunConfig | None = None,
    data: str | None = None,
    device: str | None = None,
    store: AnnotationStore | None = None,
    may_detect: bool = True,
    examples: tuple[int, int] = (6, 12),
    progress: Progress = lambda what, done, total: None,
) -> ReportedRun:
    """The record of the run in `run_dir`, with the analysis of its detections.

    `config` is that of run.yaml, if the caller has it, `data` the folder of its data set, if that has moved, and
    `store` the open validation set, if there is one. If there is a checkpoint but no detections, and `may_detect`, the
    model detects in its validation set on `device`, and the result is kept. `examples` are the numbers of best and
    worst images to draw.
    """
    config = config or checked_run(run_dir)
    if data is not None:
        config = replaced(config, {"data.root": data})
    record = ReportedRun(run_dir.resolve().name, config, read_metrics(run_dir), read_environment(run_dir))
    notes: list[str] = []
    stored = read_detections(run_dir)
    if stored is None and may_detect:
        stored = _detected(run_dir, config, data, device, progress, notes)
    if stored is None:
        return replace(record, notes=notes)
    record = replace(record, scores=stored.scores, origin=stored.origin)
    store = store or _opened(config, stored, notes)
    if store is None or _has_changed(store, stored, run_dir, notes):
        return replace(record, notes=notes)
    kinds: list[Kind] = [kind for kind in KINDS if kind in stored.scores]
    analysis = analyze(
        annotations_of(store, set(stored.image_ids)),
        stored.results,
        kinds=kinds,
        progress=lambda stage: progress(stage, 0, None),
    )
    progress("drawing examples", 0, None)
    best, worst, missing = example_pictures(store, stored, analysis, best=examples[0], worst=examples[1])
    scores: dict[str, CocoScores] = {kind: one.scores for kind, one in analysis.by_kind.items()}
    return replace(record, scores=scores, analysis=analysis, best=best, worst=worst, notes=[*notes, *missing])


def checked_run(run_dir: Path) -> RunConfig:
    """The configuration of the run in `run_dir`; an error if it is no run, or has no results yet."""
    if not run_dir.is_dir():
        raise DataError(f"there is no folder {run_dir}", remedy="give a run directory")
    if not (run_dir / RUN_FILE).is_file():
        raise DataError(
            f"{run_dir} is not a run: it has no {RUN_FILE}", remedy="give a folder made by `maskfleet train`"
        )
    has_checkpoint = bool(CheckpointFolder(run_dir / CHECKPOINTS).steps())
    if not has_checkpoint and not read_metrics(run_dir) and not (run_dir / DETECTIONS_FILE).exists():
        raise DataError(
            f"{run_dir} has no results yet: no metrics and no checkpoint",
            remedy="wait until it has logged its first steps, or start it with `maskfleet train`",
        )
    return load_run_file(run_dir / RUN_FILE)


def with_distinct_names(records: Sequence[ReportedRun], run_dirs: Sequence[Path]) -> list[ReportedRun]:
    """`records`, where runs of the same name are called by as much of their paths as tells them apart."""
    parts = [run_dir.resolve().parts for run_dir in run_dirs]
    names = [record.name for record in records]
    for length in range(2, max(map(len, parts)) + 1):
        if len(set(names)) == len(names):
            break
        longer = ["/".join(part[-length:]) for part in parts]
        names = [longer[index] if names.count(name) > 1 else name for index, name in enumerate(names)]
    return [replace(record, name=name) for record, name in zip(records, names, strict=True)]


def write_environment(run_dir: Path, facts: Mapping[str, str]) -> None:
    """Write RUN_DIR/environment.json: the machine and versions of the newest process of a run."""
    write_atomically(run_dir / ENVIRONMENT_FILE, json.dumps(dict(facts), indent=2) + "\n")


def read_environment(run_dir: Path) -> dict[str, str]:
    """What `write_environment` wrote; empty without the file."""
    path = run_dir / ENVIRONMENT_FILE
    try:
        facts: Any = json.loads(path.read_bytes()) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}", remedy="delete the file; it is only shown") from error
    return {str(name): str(value) for name, value in facts.items()} if isinstance(facts, dict) else {}


def _detected(
    run_dir: Path, config: RunConfig, data: str | None, device: str | None, progress: Progress, notes: list[str]
) -> StoredDetections | None:
    """Detections of the best checkpoint, which are kept; None if that is not possible, with a note why."""
    if not CheckpointFolder(run_dir / CHECKPOINTS).steps():
        notes.append("The run has no checkpoint yet, so there are no detections to look at.")
        return None
    if not config.data.val:
        notes.append("The run has no validation set, so there are no detections to look at.")
        return None
    progress("loading the model", 0, None)
    try:
        evaluation = evaluate(
            load(run_dir, device),
            data=data,
            progress=lambda done, total: progress("detecting", done, total),
        )
    except DataError as error:
        notes.append(f"There are no detections to look at: {error.what}. Remedy: {error.remedy}.")
        return None
    keep_detections(run_dir, evaluation.detections)
    return evaluation.detections


def _opened(config: RunConfig, stored: StoredDetections, notes: list[str]) -> AnnotationStore | None:
    """The validation set of the detections; None if it is missing."""
    try:
        return open_stores(config.data, config.data.val[:1])[0] if config.data.val else None
    except MaskfleetError as error:
        notes.append(
            f"The validation set {stored.origin.split} is missing ({error.what}): there are no curves, errors and "
            "pictures. If it has moved, name its folder with --data."
        )
        return None


def _has_changed(store: AnnotationStore, stored: StoredDetections, run_dir: Path, notes: list[str]) -> bool:
    if store.source_sha256 == stored.origin.annotations_sha256:
        return False
    notes.append(
        f"{store.split.annotations} is not the annotation file that the run was evaluated with: there are no curves, "
        f"errors and pictures. `maskfleet eval {run_dir}` evaluates it again."
    )
    return True
