"""The HTML page of `maskfleet data inspect`: one self-contained file."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from markupsafe import Markup

from maskfleet.data.checks.problems import Problem, kind_counts
from maskfleet.data.files.stored import ImageFolder, ImagePath, StoredFile, StoredFolder
from maskfleet.data.inspect.draw import draw_problem_sample, draw_sample
from maskfleet.data.inspect.report import Report, SplitReport
from maskfleet.data.inspect.selection import SelectedImage
from maskfleet.data.inspect.statistics import Histogram
from maskfleet.data.store.annotations import AnnotationStore
from maskfleet.errors import DataError
from maskfleet.html.charts import Band, bar, bubbles, canvas_outline, histogram, stacked_bar
from maskfleet.html.images import data_uri
from maskfleet.html.page import generator_tag, render
from maskfleet.log import count_text
from maskfleet.system.files import write_atomically

MADE_BY = "data inspect"
TEMPLATE = Path(__file__).with_name("page.html.jinja")
MAX_ROWS_PER_KIND = 200  # in the table of problems; --json lists all
SIZE_BORDERS_PX = (("small", 0.0, 32.0), ("medium", 32.0, 96.0), ("large", 96.0, float("inf")))

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Figure:
    """An image as the page shows it; `source` is its data URI, or None if there is nothing to draw."""

    source: str | None
    file: str
    image_id: int
    size: str
    why: str
    legend: str
    problems: tuple[tuple[Problem, int], ...]  # and how many annotations have it


def write_page(report: Report, path: Path, *, progress: Progress | None = None) -> None:
    """Write the page to `path`; an existing file is replaced only if it is such a page.

    `progress` is called with (images drawn, images in total).
    """
    expect_replaceable(path)
    content = render_page(report, progress=progress).encode("utf-8", "replace")
    try:
        write_atomically(path, content)
    except OSError as error:
        raise DataError(
            f"the page {path} cannot be written: {error.strerror}", remedy="choose another file with --out"
        ) from error


def expect_replaceable(path: Path) -> None:
    """Raise DataError if `path` is a file that must not be overwritten, or its folder does not exist."""
    if not path.parent.is_dir():
        raise DataError(f"there is no folder {path.parent} for the page", remedy="create it, or choose another --out")
    if not path.exists():
        return
    head = b""
    if path.is_file():
        with path.open("rb") as file:
            head = file.read(2048)
    if generator_tag(MADE_BY).encode() not in head:
        raise DataError(f"{path} already exists and is not a page of this command", remedy="choose another --out")


def render_page(report: Report, *, progress: Progress | None = None) -> str:
    """The page as text."""
    total = sum(len(split.samples) + len(split.problem_samples) for split in report.splits)
    drawn = count(1)

    def figure(split: SplitReport, store: AnnotationStore, image: SelectedImage, bad: bool) -> Figure:
        made = _figure(split, store, image, bad)
        if progress is not None:
            progress(next(drawn), total)
        return made

    pairs = list(zip(report.splits, report.stores, strict=True))
    bad = [figure(split, store, image, True) for split, store in pairs for image in split.problem_samples]
    views = [
        _split_view(split, [figure(split, store, image, False) for image in split.samples]) for split, store in pairs
    ]
    rows = _rows(report)
    return render(
        TEMPLATE,
        made_by=MADE_BY,
        report=report,
        splits=views,
        kinds=kind_counts(report.problems),
        rows=rows,
        num_more_rows=len(report.problems) - len(rows),
        problem_figures=bad,
    )


def _rows(report: Report) -> list[tuple[str, str, Problem]]:
    """Problems with their splits and files, errors first, at most MAX_ROWS_PER_KIND of each kind."""
    seen: Counter[str] = Counter()
    rows = []
    for split in report.splits:
        for problem in split.problems:
            seen[problem.kind] += 1
            if seen[problem.kind] <= MAX_ROWS_PER_KIND:
                file = _relative(problem.path, split.split.images) if problem.path is not None else ""
                rows.append((split.split.name, file, problem))
    return sorted(rows, key=lambda row: (row[2].severity, row[2].kind))


def _relative(path: ImagePath, folder: ImageFolder) -> str:
    """The path of a file inside `folder`; only its name if it is elsewhere."""
    if isinstance(path, StoredFile) or isinstance(folder, StoredFolder):
        within = isinstance(path, StoredFile) and isinstance(folder, StoredFolder)
        return str(path).removeprefix(f"{folder}/") if within else path.name
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else path.name


def _figure(split: SplitReport, store: AnnotationStore, sample: SelectedImage, bad: bool) -> Figure:
    record = store.image(sample.index)
    problems = tuple(problem for problem in split.problems if problem.image_id == sample.image_id) if bad else ()
    image = draw_problem_sample(store, sample.index, problems) if bad else draw_sample(store, sample.index)
    instances = store.instances(sample.index)
    names = {category.label: category.name for category in store.categories}
    counts = Counter(names.get(label, "unknown class") for label in instances.labels.tolist())
    return Figure(
        source=None if image is None else data_uri(image),
        file=_relative(record.path, split.split.images),
        image_id=sample.image_id,
        size=f"{record.width} × {record.height}",
        why=sample.why,
        legend=", ".join(f"{number} {name}" for name, number in counts.most_common()) or "no annotations",
        problems=_counted(problems),
    )


def _counted(problems: Sequence[Problem]) -> tuple[tuple[Problem, int], ...]:
    """Problems with their counts; those of the same kind and text are counted together, in order of appearance."""
    counts = Counter((problem.kind, problem.what) for problem in problems)
    first = {(problem.kind, problem.what): problem for problem in reversed(problems)}
    return tuple((first[key], number) for key, number in counts.items())


def _split_view(split: SplitReport, figures: Sequence[Figure]) -> dict[str, Any]:
    """What the template needs of one split."""
    classes = sorted(split.classes, key=lambda one: (-one.objects, one.name))
    most = max((one.objects for one in classes), default=0)
    sizes = list(dataclasses.asdict(split.shares).items())
    canvases = [canvas for use in split.buckets for canvas in use.canvases]
    longest = max((max(canvas.height or 0, canvas.width or 0) for canvas in canvases), default=0)
    outlines = [
        [
            canvas_outline(canvas.height, canvas.width, longest=longest) if canvas.height and canvas.width else None
            for canvas in use.canvases
        ]
        for use in split.buckets
    ]
    return {
        "report": split,
        "classes": [(one, bar(one.objects, most, label=f"{one.objects} objects")) for one in classes],
        "num_unused_classes": sum(one.objects == 0 for one in classes),
        "size_bar": stacked_bar(sizes, title="Objects by COCO's area ranges"),
        "charts": _charts(split),
        "canvas_outlines": outlines,
        "figures": figures,
    }


def _charts(split: SplitReport) -> list[tuple[str, str, Markup]]:
    """Title, summary and drawing of each chart."""
    points = [(size.width, size.height, size.images) for size in split.sizes.sizes]
    size_chart = bubbles(points, title="Image widths and heights", step_px=split.sizes.step_px)
    num_sizes = split.sizes.distinct
    return [
        ("Box size", _median(split.box_size, "{:.0f} px"), _box_size_chart(split.box_size)),
        ("Image sizes", count_text(num_sizes, "distinct size"), size_chart),
        ("Box aspect", _median(split.aspect, "{:.2f}"), _aspect_chart(split.aspect)),
        ("Objects per image", _median(split.objects_per_image, "{:g}"), _per_image_chart(split.objects_per_image)),
    ]


def _median(values: Histogram, form: str) -> str:
    return "" if values.median is None else f"median {form.format(values.median)}"


def _box_size_chart(values: Histogram) -> Markup:
    first, last = values.edges[0], values.edges[-1]
    bands = []
    for name, low, high in SIZE_BORDERS_PX:
        if max(low, first) < min(high, last):
            bands.append(Band(_position(values, max(low, first)), _position(values, min(high, last)), name))
    return histogram(
        values.counts,
        title="Histogram of box sizes",
        x_label="√(width × height) of the box, px (log scale)",
        y_label="objects",
        bin_names=[f"{low:.3g} to {high:.3g} px" for low, high in pairwise(values.edges)],
        x_ticks=[(_position(values, value), f"{value:g}") for value in _octaves(values)],
        bands=bands,
    )


def _aspect_chart(values: Histogram) -> Markup:
    return histogram(
        values.counts,
        title="Histogram of box aspect ratios",
        x_label="width ÷ height of the box (log scale): tall ← 1 → wide",
        y_label="objects",
        bin_names=[f"{low:.3g} to {high:.3g}" for low, high in pairwise(values.edges)],
        x_ticks=[
            (_position(values, value), f"{value:g}" if value >= 1 else f"1/{1 / value:g}") for value in _octaves(values)
        ],
    )


def _per_image_chart(values: Histogram) -> Markup:
    edges = [int(edge) for edge in values.edges]
    step = edges[1] - edges[0]
    every = -(-len(values.counts) // 12)
    labelled = range(0, len(values.counts), every)
    return histogram(
        values.counts,
        title="Histogram of objects per image",
        x_label="objects in an image",
        y_label="images",
        bin_names=[str(low) if step == 1 else f"{low} to {high - 1}" for low, high in pairwise(edges)],
        x_ticks=[(index + (0.5 if step == 1 else 0), str(edges[index])) for index in labelled],
    )


def _octaves(values: Histogram) -> list[float]:
    """Powers of two within the edges, at most nine; 1 is among them if it is within."""
    low, high = math.ceil(math.log2(values.edges[0]) - 1e-6), math.floor(math.log2(values.edges[-1]) + 1e-6)
    every = -(-(high - low + 1) // 9)
    return [2.0**power for power in range(low, high + 1) if power % every == 0]


def _position(values: Histogram, value: float) -> float:
    """The position of `value` in bins, which have equal ratios."""
    ratio = math.log2(values.edges[-1] / values.edges[0]) / len(values.counts)
    return math.log2(value / values.edges[0]) / ratio
