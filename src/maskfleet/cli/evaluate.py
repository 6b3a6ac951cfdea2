"""`maskfleet eval`: AP of a trained model on a data set."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from maskfleet.cli.console import err, out, print_raw
from maskfleet.cli.options import DeviceOption, JsonOption
from maskfleet.errors import DataError

if TYPE_CHECKING:
    from maskfleet.evaluation.coco_eval import CocoScores


def evaluate(
    weights: Annotated[Path, typer.Argument(help="Run directory or weights file.", show_default=False)],
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            "-d",
            help="Folder of the data, or s3://bucket/prefix. Default: the run's own.",
            show_default=False,
        ),
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Split to evaluate. Default: the run's first validation set.", show_default=False)
    ] = None,
    annotations: Annotated[
        Path | None, typer.Option(help="Annotation file of your own set, with --images.", show_default=False)
    ] = None,
    images: Annotated[Path | None, typer.Option(help="Image folder of your own set.", show_default=False)] = None,
    results: Annotated[
        Path | None, typer.Option(help="Also write the detections to this COCO results file.", show_default=False)
    ] = None,
    max_images: Annotated[
        int | None, typer.Option(min=1, help="Evaluate only the first N images.", show_default=False)
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Images in one forward pass. Default: 1 on the CPU, up to 16 on a GPU.",
            show_default=False,
        ),
    ] = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print all twelve AP values for boxes and masks, and AP by class."""
    from rich.progress import Progress

    from maskfleet.evaluation.evaluate import evaluate as evaluate_model
    from maskfleet.evaluation.evaluate import keep_detections
    from maskfleet.inference.load import load

    with Progress(console=err, transient=True) as bar:
        task = bar.add_task("detecting", total=None)
        evaluation = evaluate_model(
            load(weights, device) if device is not None else weights,
            data=data,
            split=_chosen(split, annotations, images),
            max_images=max_images,
            batch_size=batch,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    is_of_run = weights.is_dir() and (data, split, annotations, images, max_images) == (None,) * 5
    if is_of_run:  # for `maskfleet report`
        keep_detections(weights, evaluation.detections)
    if results is not None:
        results.write_text(json.dumps(evaluation.results), encoding="utf-8")
    scores = {"bbox": evaluation.box} | ({"segm": evaluation.mask} if evaluation.mask is not None else {})
    if as_json:
        print_raw(json.dumps({kind: dataclasses.asdict(values) for kind, values in scores.items()}, indent=2))
        return
    out.print(f"{evaluation.source} on {evaluation.annotations}, {evaluation.num_images} images", markup=False)
    stages = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in evaluation.seconds.items())
    out.print(f"time: {stages}", markup=False)
    _print_tables(scores)


def _chosen(split: str | None, annotations: Path | None, images: Path | None) -> str | tuple[Path, Path] | None:
    if annotations is not None and images is not None:
        return annotations, images
    if annotations is not None or images is not None:
        raise DataError("--annotations and --images belong together", remedy="give both, or neither")
    return split


def _print_tables(scores: dict[str, CocoScores]) -> None:
    from rich.table import Table

    from maskfleet.evaluation.report.record import score_text

    names = {"bbox": "box", "segm": "mask"}
    summary = Table("", *[names[kind] for kind in scores], box=None, pad_edge=False, header_style="bold")
    for field in dataclasses.fields(next(iter(scores.values()))):
        if field.name != "per_class":
            summary.add_row(field.name, *[score_text(getattr(values, field.name)) for values in scores.values()])
    out.print(summary)
    header = [f"{names[kind]} {what}" for kind in scores for what in ("AP", "AP50")]
    classes = Table("class", "objects", *header, box=None, pad_edge=False, header_style="bold")
    for rows in zip(*[values.per_class for values in scores.values()], strict=True):
        cells = [score_text(value) for row in rows for value in (row.ap, row.ap50)]
        classes.add_row(rows[0].name, str(rows[0].num_objects), *cells)
    out.print()
    out.print(classes)
    out.print(
        "\nin percent; a dash: nothing to measure against. --json gives fractions in full precision", markup=False
    )
