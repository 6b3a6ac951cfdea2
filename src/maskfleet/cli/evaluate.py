"""`maskfleet eval`: AP of a trained model on a data set."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from maskfleet.cli.console import err, out, print_raw
from maskfleet.cli.options import JsonOption
from maskfleet.errors import DataError

if TYPE_CHECKING:
    from maskfleet.config.run import RunConfig, SplitConfig
    from maskfleet.data.store.annotations import AnnotationStore
    from maskfleet.evaluation.coco_eval import CocoScores


def evaluate(
    weights: Annotated[Path, typer.Argument(help="Run directory or weights file.", show_default=False)],
    data: Annotated[
        Path | None,
        typer.Option("--data", "-d", help="Folder of the data. Default: the run's own.", show_default=False),
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
        int | None, typer.Option(min=1, help="Only the first so many images.", show_default=False)
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images in one forward pass.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Print all twelve AP values for boxes and masks, and AP by class."""
    from maskfleet.data.store.dataset import open_stores
    from maskfleet.inference.load import trained_model
    from maskfleet.training.distributed import Worker
    from maskfleet.training.run import device_for

    device = device_for(Worker())
    trained = trained_model(weights, device)
    changes: dict[str, Any] = {"eval.max_images": max_images, "eval.images_per_gpu": batch}
    if data is not None:
        changes["data.root"] = str(data)
    config = _changed(trained.run, changes)
    [store] = open_stores(config.data, [_chosen(config, split, annotations, images)])
    if len(store.categories) != config.model.num_categories:
        raise DataError(
            f"the model tells {config.model.num_categories} categories apart, but {store.split.annotations} has "
            f"{len(store.categories)}",
            remedy="evaluate on data with the categories the model was trained on",
        )
    found = _predictions(trained.model, config, store, device)
    if results is not None:
        flat = [result for image_id in sorted(found) for result in found[image_id]]
        results.write_text(json.dumps(flat), encoding="utf-8")
    from maskfleet.inference.predict import score_results

    scores = score_results(store, found, masks=config.model.mask, max_detections=config.model.inference.max_detections)
    if as_json:
        print_raw(json.dumps({kind: dataclasses.asdict(values) for kind, values in scores.items()}, indent=2))
        return
    out.print(f"{trained.source} on {store.split.annotations}, {len(found)} images", markup=False)
    _print_tables(scores)


def _changed(run: RunConfig, changes: dict[str, Any]) -> RunConfig:
    from maskfleet.config.base import replaced

    return replaced(run, changes)


def _chosen(config: RunConfig, split: str | None, annotations: Path | None, images: Path | None) -> str | SplitConfig:
    from maskfleet.config.run import SplitConfig

    if (annotations is None) != (images is None):
        raise DataError("--annotations and --images belong together", remedy="give both, or neither")
    if annotations is not None and images is not None:
        return SplitConfig(annotations=str(annotations.resolve()), images=str(images.resolve()))
    if split is None and not config.data.val:
        raise DataError("the run has no validation set", remedy="name one with --split")
    return split or config.data.val[0]


def _predictions(model: Any, config: RunConfig, store: AnnotationStore, device: Any) -> dict[int, list[dict[str, Any]]]:
    from rich.progress import track

    from maskfleet.data.pipeline.build import build_eval_loader
    from maskfleet.inference.predict import predict_batches

    loader = build_eval_loader(config, store, device=device)
    try:
        return predict_batches(
            model,
            track(loader, "detecting", total=len(loader), console=err, transient=True),
            device=device,
            category_ids=[category.id for category in store.categories],
            accurate_paste=config.eval.accurate_paste,
        )
    finally:
        loader.close()


def _print_tables(scores: dict[str, CocoScores]) -> None:
    from rich.table import Table

    names = {"bbox": "box", "segm": "mask"}
    summary = Table("", *[names[kind] for kind in scores], box=None, pad_edge=False, header_style="bold")
    for field in dataclasses.fields(next(iter(scores.values()))):
        if field.name != "per_class":
            summary.add_row(field.name, *[f"{getattr(values, field.name):.4f}" for values in scores.values()])
    out.print(summary)
    header = [f"{names[kind]} {what}" for kind in scores for what in ("AP", "AP50")]
    classes = Table("class", "objects", *header, box=None, pad_edge=False, header_style="bold")
    for rows in zip(*[values.per_class for values in scores.values()], strict=True):
        cells = [f"{value:.4f}" for row in rows for value in (row.ap, row.ap50)]
        classes.add_row(rows[0].name, str(rows[0].num_objects), *cells)
    out.print()
    out.print(classes)
