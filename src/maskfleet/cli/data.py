"""`maskfleet data`: get, make, inspect, convert and stage data sets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from maskfleet.cli.console import err, out, print_raw
from maskfleet.cli.get import get
from maskfleet.cli.options import JsonOption
from maskfleet.cli.outputs import expect_writable
from maskfleet.cli.stage import preload, stage, status
from maskfleet.errors import DataError
from maskfleet.log import count_text

if TYPE_CHECKING:
    from maskfleet.data.inspect.report import Report, Resize, SplitReport

app = typer.Typer(help="Get, make, inspect, convert and stage data sets.", no_args_is_help=True)

MAX_IDS = 5  # of a kind of problem and split in the terminal; --json lists all

WorkersOption = Annotated[
    int | None, typer.Option(min=0, help="Parallel worker processes; 0 for none.", show_default=False)
]
PageOption = Annotated[
    Path | None, typer.Option("--out", "-o", help="HTML page to write.", show_default="inspect.html; none with --json")
]
OutsideOption = Annotated[
    bool, typer.Option("--allow-outside", help="Accept image names that lead out of the image folder.")
]


class Form(StrEnum):
    """The formats that `convert` reads."""

    YOLO = "yolo"
    VOC = "voc"
    LABELME = "labelme"


@app.command("make-shapes")
def make_shapes(
    folder: Annotated[Path, typer.Argument(help="New folder for the data set.")],
    train: Annotated[int, typer.Option(min=0, help="Training images.")] = 200,
    val: Annotated[int, typer.Option(min=0, help="Validation images.")] = 50,
    height: Annotated[str, typer.Option(help="Height in pixels, or a range.")] = "192-288",
    width: Annotated[str, typer.Option(help="Width in pixels, or a range.")] = "192-288",
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same bytes.")] = 0,
    classes: Annotated[int, typer.Option(help="Number of classes, 1 to 10.")] = 6,
    max_objects: Annotated[int, typer.Option(help="Maximum number of objects per image.")] = 8,
    crowds: Annotated[float, typer.Option(help="Fraction of images with a crowd region.")] = 0.05,
    workers: WorkersOption = 1,
    force: Annotated[
        bool, typer.Option(help="Replace shapes that were generated with other values; nothing else.")
    ] = False,
) -> None:
    """Generate a COCO-format data set of shapes for first runs, tests and benchmarks."""
    from contextlib import nullcontext

    from maskfleet.data.synthetic import dataset as synthetic

    sides = _pixel_range("--height", height), _pixel_range("--width", width)
    with synthetic.replacing_shapes(folder) if force else nullcontext(), _progress() as report_progress:
        synthetic.make_shapes(
            folder,
            num_train=train,
            num_val=val,
            height=sides[0],
            width=sides[1],
            seed=seed,
            num_categories=classes,
            max_objects=max_objects,
            crowd_fraction=crowds,
            workers=workers or 1,
            progress=lambda done, total: report_progress("drawing", done, total),
        )
    out.print(f"{folder}: {train} training and {val} validation images of shapes", markup=False)
    out.print(f"Inspect it with: maskfleet data inspect {folder}", markup=False)


@app.command()
def inspect(
    path: Annotated[
        str | None,
        typer.Argument(help="COCO folder, s3://bucket/prefix, or annotation file with --images.", show_default=False),
    ] = None,
    split: Annotated[
        list[str] | None, typer.Option(help="Split of the folder; repeatable; all by default.", show_default=False)
    ] = None,
    annotations: Annotated[Path | None, typer.Option(help="Annotation file.")] = None,
    images: Annotated[Path | None, typer.Option(help="Image folder of that annotation file.")] = None,
    page: PageOption = None,
    as_json: JsonOption = False,
    decode: Annotated[bool, typer.Option(help="Decode every image, or only read the headers.")] = True,
    samples: Annotated[int, typer.Option(min=0, help="Images per split on the page.")] = 24,
    short_edge: Annotated[int, typer.Option(min=1, help="Short side in training, for the shape buckets.")] = 800,
    max_size: Annotated[int, typer.Option(min=1, help="Maximum long side in training, for the shape buckets.")] = 1333,
    workers: WorkersOption = None,
    max_mpx: Annotated[float, typer.Option(min=0.001, help="Largest image in million pixels.")] = 179.0,
    allow_outside: OutsideOption = False,
) -> None:
    """Check a COCO-format data set and write an HTML page about it. Exit code 1: it has errors."""
    from maskfleet.data.inspect.page import expect_replaceable, write_page
    from maskfleet.data.inspect.report import failure_json, inspect_splits, located, report_json, splits_to_inspect
    from maskfleet.data.store.annotations import ImageRules

    page = page or (None if as_json else Path("inspect.html"))
    if page is not None:
        expect_replaceable(page)
        expect_writable(page, option="--out")
    try:
        found, missing = splits_to_inspect(located(path), split or [], annotations=annotations, images=images)
        with _progress() as report_progress:
            report = inspect_splits(
                found,
                resize=_resize(short_edge, max_size),
                decode=decode,
                workers=workers,
                rules=ImageRules(max_mpx, allow_outside),
                num_samples=samples,
                missing=missing,
                progress=lambda name, done, total: report_progress(f"checking {name}", done, total),
            )
            if page is not None:
                write_page(report, page, progress=lambda done, total: report_progress("drawing", done, total))
    except DataError as error:
        if as_json:
            print_raw(json.dumps(failure_json(error), indent=2))
        raise
    if as_json:
        print_raw(json.dumps(report_json(report), indent=2, allow_nan=False))
    else:
        _print_summary(report)
    if page is not None:
        err.print(f"Page written: {page}", markup=False)
    raise typer.Exit(1 if report.num_errors else 0)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Folder of the data set to convert.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="New folder for the COCO-format data set.")],
    form: Annotated[Form, typer.Option("--from", help="Format of IN.")],
    link: Annotated[bool, typer.Option(help="Symlink the images instead of copying them.")] = False,
    workers: WorkersOption = None,
    allow_outside: OutsideOption = False,
) -> None:
    """Convert YOLO, Pascal VOC or LabelMe to COCO, then check the result. Exit code 1: it has errors."""
    from maskfleet.data.convert.convert import convert as convert_set
    from maskfleet.data.inspect.report import inspect_splits, splits_to_inspect

    with _progress() as report_progress:
        converted = convert_set(
            source, target, form=form.value, link=link, allow_outside=allow_outside, progress=report_progress
        )
        found, _ = splits_to_inspect(target)
        report = inspect_splits(
            found,
            resize=_resize(800, 1333),
            workers=workers,
            num_samples=0,
            notes=converted.notes,
            progress=lambda name, done, total: report_progress(f"checking {name}", done, total),
        )
    _print_summary(report)
    out.print(f"Inspect it with: maskfleet data inspect {target}", markup=False)
    raise typer.Exit(1 if report.num_errors else 0)


app.command("get")(get)
app.command("stage")(stage)
app.command("status")(status)
app.command("preload")(preload)


def _print_summary(report: Report) -> None:
    from rich.markup import escape
    from rich.table import Table

    from maskfleet.data.checks.problems import KINDS, kind_counts

    titles = ("split", "images", "objects", "classes", "crowds", "no objects", "left out")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, justify="left" if title == "split" else "right")
    for split in report.splits:
        counts = [split.num_images, split.num_objects, len(split.classes), split.num_crowds]
        counts += [split.num_empty_images, split.num_left_out]
        table.add_row(escape(split.split.name), *(f"{count:,}" for count in counts))
    out.print(table)
    _print_padding(report)
    for one in report.missing:
        out.print(f"{'error' if one.is_error else 'note'}: {one}", markup=False)
    for note in report.notes:
        out.print(f"note: {note}", markup=False)
    kinds = kind_counts(report.problems)
    if not kinds and not report.num_errors:
        out.print("\n[green]no problems found[/]")
        return
    out.print(f"\n{count_text(report.num_errors, 'error')}, {count_text(report.num_warnings, 'warning')}")
    table = Table("", "kind", "count", "ids", "remedy", box=None, pad_edge=False, header_style="bold")
    for severity, kind, count in kinds:
        mark = "[bold red]error[/]" if severity == "error" else "[yellow]warning[/]"
        ids = "\n".join(_ids(split, kind) for split in report.splits if any(p.kind == kind for p in split.problems))
        table.add_row(mark, kind, f"{count:,}", escape(ids), escape(KINDS[kind][1]))
    out.print(table)
    for split in report.splits:
        for problem in split.problems:
            if problem.image_id is None:  # of the whole split: its text is all there is
                out.print(f"{problem.kind} in {split.split.name}: {problem.what}", markup=False)


def _print_padding(report: Report) -> None:
    """A table of the shapes and the padding that each setting of data.buckets has."""
    from rich.markup import escape
    from rich.table import Table

    if not any(split.buckets for split in report.splits):
        return
    side = f"short side {report.resize.short_edge_px} px, long side up to {report.resize.max_px} px"
    out.print(f"\nPadding by data.buckets, {side}:", markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("split", "data.buckets", "shapes", "padding", "fewer pixels"):
        table.add_column(title, justify="left" if title in ("split", "data.buckets") else "right")
    for split in report.splits:
        for use in split.buckets:
            shapes = "each batch's" if use.mode == "none" else str(len(use.canvases))
            saved = f"{100 * use.saved:.1f} %" if use.mode != "orientation" else "–"
            table.add_row(escape(split.split.name), use.mode, shapes, f"{100 * use.padding:.1f} %", saved)
    out.print(table)


def _ids(split: SplitReport, kind: str) -> str:
    """The split's first ids of a kind of problem: `val: annotations 3, 8, 9, …`."""
    found = [problem for problem in split.problems if problem.kind == kind]
    annotations = [problem.annotation_id for problem in found if problem.annotation_id is not None]
    ids = annotations or [problem.image_id for problem in found if problem.image_id is not None]
    what = "annotation" if annotations else "image"
    if not ids:
        return f"{split.split.name}: whole split"
    listed = ", ".join(map(str, ids[:MAX_IDS])) + (", …" if len(ids) > MAX_IDS else "")
    return f"{split.split.name}: {what}{'' if len(ids) == 1 else 's'} {listed}"


def _resize(short_edge_px: int, max_size_px: int) -> Resize:
    """How a model of the default architecture resizes images."""
    from maskfleet.config.model import ModelConfig
    from maskfleet.data.inspect.report import Resize

    model = ModelConfig(max_size_px=max_size_px)
    return Resize(short_edge_px, model.canvas_max_px, model.size_divisor)


def _pixel_range(option: str, text: str) -> tuple[int, int]:
    """`192-288` or `240` as (smallest, largest)."""
    from maskfleet.errors import ConfigError

    low, dash, high = text.partition("-")
    if not (low.isdecimal() and (high if dash else low).isdecimal()):
        raise ConfigError(
            f"{option} {text} is neither a number of pixels nor a range", remedy=f"write {option} 240 or 192-288"
        )
    return int(low), int(high or low)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr; yields a function to call with (current step, items done, items in total)."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bars:
        tasks = {}

        def report_progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield report_progress
