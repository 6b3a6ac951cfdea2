"""The inspector's report as one HTML page that needs no other file and asks no network."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from maskfleet import __version__
from maskfleet.data.checks.problems import Problem
from maskfleet.data.inspect.draw import data_uri, draw_problem_sample, draw_sample
from maskfleet.data.inspect.report import Report, SplitReport, kind_counts
from maskfleet.data.inspect.selection import Sample
from maskfleet.data.inspect.statistics import ClassCount, Histogram
from maskfleet.data.store.annotations import AnnotationStore
from maskfleet.errors import DataError
from maskfleet.html.bar_charts import Band, bar, bubbles, canvas_outline, histogram, shares
from maskfleet.system.files import write_atomically

GENERATOR = '<meta name="generator" content="maskfleet data inspect'
MAX_ROWS_A_KIND = 200  # of the table of problems; --json lists all
SIZE_BORDERS_PX = (("small", 0.0, 32.0), ("medium", 32.0, 96.0), ("large", 96.0, float("inf")))

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Figure:
    """A sample as the page shows it; `source` is None where there is no picture."""

    source: str | None
    file: str
    image_id: int
    size: str
    why: str
    legend: str
    problems: tuple[tuple[Problem, int], ...]  # and how often each is there, ids apart


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table of problems."""

    split: str
    file: str
    problem: Problem


@dataclass(frozen=True, slots=True)
class SplitView:
    """What the template needs of one split."""

    report: SplitReport
    classes: tuple[tuple[ClassCount, Markup], ...]
    num_unused_classes: int
    shares: Markup
    charts: tuple[tuple[str, str, Markup], ...]  # title, remark, chart
    canvas_outlines: tuple[tuple[Markup | None, ...], ...]
    figures: tuple[Figure, ...]


def write_page(report: Report, path: Path, *, progress: Progress | None = None) -> None:
    """Write the page to `path`; a file there is replaced only if it is such a page.

    `progress` is told (pictures drawn, pictures in all).
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
    """DataError if `path` is something that must not be overwritten, or lies in no folder."""
    if not path.parent.is_dir():
        raise DataError(f"there is no folder {path.parent} for the page", remedy="make it, or choose another --out")
    if not path.exists():
        return
    head = b""
    if path.is_file():
        with path.open("rb") as file:
            head = file.read(2048)
    if GENERATOR.encode() not in head:
        raise DataError(f"{path} is there already and is no page of this command", remedy="choose another --out")


def render_page(report: Report, *, progress: Progress | None = None) -> str:
    """The page as text."""
    total = sum(len(split.samples) + len(split.problem_samples) for split in report.splits)
    drawn = 0

    def figures(split: SplitReport, store: AnnotationStore, samples: Sequence[Sample], bad: bool) -> list[Figure]:
        nonlocal drawn
        made = []
        for sample in samples:
            made.append(_figure(split, store, sample, bad))
            drawn += 1
            if progress is not None:
                progress(drawn, total)
        return made

    pairs = list(zip(report.splits, report.stores, strict=True))
    bad = [figure for split, store in pairs for figure in figures(split, store, split.problem_samples, True)]
    views = [_split_view(split, figures(split, store, split.samples, False)) for split, store in pairs]
    rows = _rows(report)
    return (
        _environment()
        .get_template("inspect.html.j2")
        .render(
            report=report,
            version=__version__,
            generator=Markup(GENERATOR),  # noqa: S704 - a constant of this file
            splits=views,
            kinds=kind_counts(report.problems),
            rows=rows,
            num_rows_left_out=len(report.problems) - len(rows),
            problem_figures=bad,
        )
    )


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("maskfleet.data.inspect"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["comma"] = lambda number: f"{number:,}"
    environment.filters["percent"] = _percent
    return environment


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if 0 < share < 0.1 else f"{100 * share:.0f} %"


def _rows(report: Report) -> list[Row]:
    """Problems, errors first, at most MAX_ROWS_A_KIND of a kind."""
    seen: Counter[str] = Counter()
    rows = []
    for split in report.splits:
        for problem in split.problems:
            seen[problem.kind] += 1
            if seen[problem.kind] <= MAX_ROWS_A_KIND:
                rows.append(Row(split.split.name, _file_of(split, problem), problem))
    return sorted(rows, key=lambda row: (row.problem.severity, row.problem.kind))


def _file_of(split: SplitReport, problem: Problem) -> str:
    """File of a problem, as short as it is clear."""
    if problem.path is None:
        return ""
    return _relative(problem.path, split.split.images)


def _relative(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else path.name


def _figure(split: SplitReport, store: AnnotationStore, sample: Sample, bad: bool) -> Figure:
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
        legend=", ".join(f"{count} {name}" for name, count in counts.most_common()) or "no annotations",
        problems=_counted(problems),
    )


def _counted(problems: Sequence[Problem]) -> tuple[tuple[Problem, int], ...]:
    """Problems that say the same counted together, in the order of their first."""
    counts = Counter((problem.kind, problem.what) for problem in problems)
    first = {(problem.kind, problem.what): problem for problem in reversed(problems)}
    return tuple((first[said], count) for said, count in counts.items())


def _split_view(split: SplitReport, figures: Sequence[Figure]) -> SplitView:
    classes = sorted(split.classes, key=lambda found: (-found.objects, found.name))
    most = max((found.objects for found in classes), default=0)
    sizes = (("small", split.shares.small), ("medium", split.shares.medium), ("large", split.shares.large))
    canvases = [canvas for use in split.buckets for canvas in use.canvases]
    longest = max((max(canvas.height or 0, canvas.width or 0) for canvas in canvases), default=0)
    outlines = tuple(
        tuple(
            canvas_outline(canvas.height, canvas.width, longest=longest) if canvas.height and canvas.width else None
            for canvas in use.canvases
        )
        for use in split.buckets
    )
    return SplitView(
        report=split,
        classes=tuple((found, bar(found.objects, most, label=f"{found.objects} objects")) for found in classes),
        num_unused_classes=sum(found.objects == 0 for found in classes),
        shares=shares(sizes, title="Objects by COCO's ranges of area"),
        charts=tuple(_charts(split)),
        canvas_outlines=outlines,
        figures=tuple(figures),
    )


def _charts(split: SplitReport) -> list[tuple[str, str, Markup]]:
    return [
        ("Box size", _median(split.box_size, "{:.0f} px"), _box_size_chart(split.box_size)),
        ("Image sizes", _sizes_remark(split), _image_size_chart(split)),
        ("Box aspect", _median(split.aspect, "{:.2f}"), _aspect_chart(split.aspect)),
        ("Objects per image", _median(split.objects_per_image, "{:g}"), _per_image_chart(split.objects_per_image)),
    ]


def _median(found: Histogram, form: str) -> str:
    return "" if found.median is None else f"median {form.format(found.median)}"


def _box_size_chart(found: Histogram) -> Markup:
    first, last = found.edges[0], found.edges[-1]
    bands = []
    for name, low, high in SIZE_BORDERS_PX:
        if max(low, first) < min(high, last):
            bands.append(Band(_place(found, max(low, first)), _place(found, min(high, last)), name))
    return histogram(
        found.counts,
        title="Histogram of box sizes",
        x_label="√(width × height) of the box, px (log scale)",
        y_label="objects",
        bin_names=[f"{low:.3g} to {high:.3g} px" for low, high in pairwise(found.edges)],
        ticks=[(_place(found, value), f"{value:g}") for value in _octaves(found)],
        bands=bands,
    )


def _aspect_chart(found: Histogram) -> Markup:
    return histogram(
        found.counts,
        title="Histogram of box aspect ratios",
        x_label="width ÷ height of the box (log scale): tall ← 1 → wide",
        y_label="objects",
        bin_names=[f"{low:.3g} to {high:.3g}" for low, high in pairwise(found.edges)],
        ticks=[(_place(found, value), _ratio(value)) for value in _octaves(found)],
    )


def _per_image_chart(found: Histogram) -> Markup:
    edges = [int(edge) for edge in found.edges]
    step = edges[1] - edges[0]
    every = -(-len(found.counts) // 12)
    places = range(0, len(found.counts), every)
    return histogram(
        found.counts,
        title="Histogram of objects per image",
        x_label="objects in an image",
        y_label="images",
        bin_names=[str(low) if step == 1 else f"{low} to {high - 1}" for low, high in pairwise(edges)],
        ticks=[(place + (0.5 if step == 1 else 0), str(edges[place])) for place in places],
    )


def _image_size_chart(split: SplitReport) -> Markup:
    points = [(size.width, size.height, size.images) for size in split.sizes.sizes]
    return bubbles(points, title="Image widths and heights", step_px=split.sizes.step_px)


def _sizes_remark(split: SplitReport) -> str:
    number = split.sizes.distinct
    return f"{number:,} distinct size{'' if number == 1 else 's'}"


def _octaves(found: Histogram) -> list[float]:
    """Powers of two among the edges, not more than nine, 1 among them if it is there."""
    low, high = math.ceil(math.log2(found.edges[0]) - 1e-6), math.floor(math.log2(found.edges[-1]) + 1e-6)
    every = -(-(high - low + 1) // 9)
    return [2.0**power for power in range(low, high + 1) if power % every == 0]


def _place(found: Histogram, value: float) -> float:
    """Where `value` is among the bins, which are of equal ratio."""
    ratio = math.log2(found.edges[-1] / found.edges[0]) / len(found.counts)
    return math.log2(value / found.edges[0]) / ratio


def _ratio(value: float) -> str:
    return f"{value:g}" if value >= 1 else f"1/{1 / value:g}"
