"""Charts as inline SVG: histogram, bubbles, bars and lines.

A chart is complete without a script; `shell.js` adds tooltips and a clickable legend to line charts. Colours are the
classes and variables of `shell.css`, which has a light and a dark set.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from markupsafe import Markup

WIDTH, HEIGHT = 460, 230  # of a drawing, in SVG units; on a page it is as wide as its card
LEFT, RIGHT, TOP, BOTTOM = 48, 448, 20, 190  # the plot area inside it
MAX_POINTS = 600  # per line; more would not be visible
MAX_DOTS = 40  # lines of at most this many points get a dot at each
NUM_COLORS = 8  # --line-1 ... --line-8

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Band:
    """A named range of a histogram's x axis, in bins, with a background colour."""

    start: float
    stop: float
    name: str


@dataclass(frozen=True, slots=True)
class Series:
    """One line: points by ascending x. `faint` lines, such as raw values behind smoothed ones, have no legend entry."""

    name: str
    points: Sequence[Point]
    color: int = 1  # 1, 2, ...
    faint: bool = False


@dataclass(frozen=True, slots=True)
class _Plot:
    """The plot area of a drawing and the values at its edges."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    left: float = LEFT
    right: float = RIGHT
    top: float = TOP
    bottom: float = BOTTOM

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.left + (self.right - self.left) * (value - low) / (high - low)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.bottom - (self.bottom - self.top) * (value - low) / (high - low)


def histogram(
    counts: Sequence[int] | Mapping[str, Sequence[int]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    bin_names: Sequence[str],
    x_ticks: Sequence[tuple[float, str]],
    bands: Sequence[Band] = (),
) -> Markup:
    """Vertical bars side by side; counts by name are stacked, the first at the bottom, in the colours of the parts.

    `x_ticks` are (position in bins, text); a bar's tooltip is its bin name and its counts.
    """
    parts_of = counts if isinstance(counts, Mapping) else {"": counts}
    stacks = list(zip(*parts_of.values(), strict=True))
    y_values = axis_from_zero(max(map(sum, stacks), default=0))
    plot = _Plot((0, max(len(stacks), 1)), (0, y_values[-1]))
    gap = min(1.0, (plot.x(1) - plot.x(0)) * 0.08)
    parts = [_band(plot, band) for band in bands]
    parts += _y_axis(plot, y_values)
    for index, (stack, name) in enumerate(zip(stacks, bin_names, strict=True)):
        bars, bottom, total = [], plot.bottom, 0
        for number, count in enumerate(stack):
            total += count
            top = min(plot.y(total), bottom - 1) if count else bottom  # a count of one stays visible
            kind = "bar" if len(stack) == 1 else f"part{number}"
            bars.append(_rect(kind, plot.x(index) + gap, top, plot.x(index + 1) - gap, bottom))
            bottom = top
        # the whole column shows the tooltip, so that small bars can be pointed at
        column = _rect("hit", plot.x(index), plot.top, plot.x(index + 1), plot.bottom)
        told = ", ".join(f"{count:,} {part}".strip() for part, count in zip(parts_of, stack, strict=True))
        parts.append(Markup("<g><title>{}: {}</title>{}{}</g>").format(name, told, column, Markup("").join(bars)))
    parts += _x_axis(plot, x_ticks)
    parts += _axis_labels(plot, HEIGHT, x_label, y_label)
    return _svg(HEIGHT, title, parts)


def bubbles(points: Sequence[tuple[int, int, int]], *, title: str, step_px: int) -> Markup:
    """Sizes (width, height, images) as discs whose area grows with the number of images; a diagonal marks squares."""
    height = 300
    bottom = height - HEIGHT + BOTTOM
    x_values = axis_from_zero(max((w for w, _, _ in points), default=1) * 1.04)
    y_values = axis_from_zero(max((h for _, h, _ in points), default=1) * 1.04)
    x_max, y_max = x_values[-1], y_values[-1]
    scale = min((RIGHT - LEFT) / x_max, (bottom - TOP) / y_max)  # the same for both axes: squares look square
    left = LEFT + (RIGHT - LEFT - x_max * scale) / 2
    plot = _Plot((0, x_max), (0, y_max), left, left + x_max * scale, bottom - y_max * scale, bottom)
    parts = [_line("grid", plot.x(value), plot.top, plot.x(value), plot.bottom) for value in x_values]
    parts += _x_axis(plot, [(value, f"{value:g}") for value in x_values])
    parts += _y_axis(plot, y_values, lambda value: f"{value:g}")
    square = min(x_max, y_max)
    parts.append(_line("mark", plot.x(0), plot.y(0), plot.x(square), plot.y(square)))
    most = max((count for _, _, count in points), default=1)
    about = "about " if step_px > 1 else ""
    for w, h, count in sorted(points, key=lambda point: -point[2]):
        parts.append(
            Markup('<circle class="bubble" cx="{:.1f}" cy="{:.1f}" r="{:.1f}"><title>{}</title></circle>').format(
                plot.x(w), plot.y(h), 2.5 + 11 * math.sqrt(count / most), f"{about}{w} × {h} px: {count:,} images"
            )
        )
    parts += _axis_labels(plot, height, "width, px", "height, px")
    return _svg(height, title, parts)


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str = "step",
    y_text: Callable[[float], str] | None = None,
) -> Markup:
    """A figure of all `series` on shared axes, with a legend for two lines or more; empty if there are no points."""
    series = with_points(series)
    if not series:
        return Markup("")
    plot = _plot_of(series)
    text = y_text or tick_text
    parts = line_parts(series, x_label=x_label, y_text=text)
    parts.append(Markup('<line class="cursor" x1="0" x2="0" y1="{}" y2="{}" visibility="hidden"/>').format(TOP, BOTTOM))
    return Markup(
        '<figure class="line-chart" data-chart="{}"><figcaption>{}</figcaption>{}'
        '<div class="plot">{}<div class="tip" hidden></div></div></figure>'
    ).format(_tooltip_data(plot, series, x_label, text), title, _legend(series), _svg(HEIGHT, title, parts))


def with_points(series: Sequence[Series]) -> list[Series]:
    """The lines that have finite points, each with no more points than are visible."""
    finite = [[point for point in one.points if math.isfinite(point[1])] for one in series]
    return [replace(one, points=thinned(points)) for one, points in zip(series, finite, strict=True) if points]


def line_parts(series: Sequence[Series], *, x_label: str, y_text: Callable[[float], str]) -> list[Markup]:
    """SVG elements of the axes and of all lines, in a drawing of WIDTH x HEIGHT."""
    plot = _plot_of(series)
    parts = _y_axis(plot, ticks(*plot.y_range), y_text)
    x_values = ticks(*plot.x_range, count=6)
    parts += [_line("axis", plot.x(value), plot.bottom, plot.x(value), plot.bottom + 4) for value in x_values]
    parts += _x_axis(plot, [(value, tick_text(value)) for value in x_values])
    parts.append(_line("axis", plot.left, plot.bottom, plot.right, plot.bottom))
    parts += _axis_labels(plot, HEIGHT, x_label)
    return parts + [_polyline(plot, index, one) for index, one in enumerate(series)]


def bar(value: float, largest: float, *, label: str) -> Markup:
    """One horizontal bar, as long as `value` is of `largest`."""
    share = 100 * value / largest if largest else 0.0
    return Markup(
        '<svg class="rowbar" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label="{}">'
        '<rect class="track" width="100" height="10"/><rect class="bar" width="{:.2f}" height="10"/></svg>'
    ).format(label, max(share, 0.6) if value else 0)


def stacked_bar(
    parts: Sequence[tuple[str, float]], *, title: str, text: Callable[[float], str] = "{:,}".format
) -> Markup:
    """One horizontal bar divided into named parts; the page writes their numbers beside it."""
    total = sum(count for _, count in parts) or 1
    shapes, left = [], 0.0
    for number, (name, count) in enumerate(parts):
        width = 100 * count / total
        shapes.append(
            Markup('<rect class="part{}" x="{:.2f}" width="{:.2f}" height="10"><title>{}: {}</title></rect>').format(
                number, left, width, name, text(count)
            )
        )
        left += width
    return Markup(
        '<svg class="stacked-bar" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>'
    ).format(title, Markup("").join(shapes))


def canvas_outline(height: int, width: int, *, longest: int, side_px: int = 40) -> Markup:
    """A canvas as a small rectangle; canvases drawn with the same `longest` have the same scale."""
    scale = side_px / longest
    left, top = 1 + (side_px - width * scale) / 2, 1 + (side_px - height * scale) / 2
    return Markup(
        '<svg class="canvas" width="{0}" height="{0}" viewBox="0 0 {0} {0}" role="img" aria-label="{1} by {2} pixels">'
        "{3}</svg>"
    ).format(side_px + 2, width, height, _rect("outline", left, top, left + width * scale, top + height * scale))


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Each finite point as the mean of its neighbours, up to 1/50 of all points on either side.

    Near the start the window shrinks on both sides, so that the line does not flatten the steep fall there.
    """
    known = [point for point in points if math.isfinite(point[1])]
    sums = [0.0, *accumulate(y for _, y in known)]
    reach = len(known) // 50 + 1
    result = []
    for index, (x, _) in enumerate(known):
        before = min(reach, index)
        after = min(before, len(known) - 1 - index)
        result.append((x, (sums[index + after + 1] - sums[index - before]) / (before + 1 + after)))
    return result


def thinned(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most about `limit` of `points`: the lowest and the highest of each interval, so that no spike is lost."""
    if len(points) <= limit:
        return list(points)
    edges = [round(number * len(points) / (limit // 2)) for number in range(limit // 2 + 1)]
    kept = []
    for start, stop in pairwise(edges):
        interval = points[start:stop]
        kept += sorted({min(interval, key=lambda point: point[1]), max(interval, key=lambda point: point[1])})
    return kept


def ticks(low: float, high: float, *, count: int = 5) -> list[float]:
    """About `count` round numbers within `low` and `high`: multiples of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    step = _round_step((high - low) / count, (1, 2, 5, 10))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def axis_from_zero(largest: float, *, count: int = 4) -> list[float]:
    """About `count` round numbers from 0 to at least `largest`; whole ones if that is 1 or more."""
    if largest <= 0:
        return [0, 1]
    step = _round_step(largest / count, (1, 2, 2.5, 5, 10))
    if largest >= 1:
        step = math.ceil(step)
    return [step * index for index in range(math.ceil(largest / step - 1e-9) + 1)]


def tick_text(value: float) -> str:
    """A number for an axis: `0`, `0.25`, `12k`, `1.5M`, `2e-05`."""
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.4g}{letter}"
    return f"{value:.4g}"


def _round_step(rough: float, factors: Sequence[float]) -> float:
    """The smallest of `factors` times a power of ten that is at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in factors if factor * power >= rough * 0.999)


def _plot_of(series: Sequence[Series]) -> _Plot:
    """Axes that hold all lines and zero, with 4 % of space above the highest."""
    xs = [x for one in series for x, _ in one.points]
    ys = sorted(y for one in series for _, y in one.points)
    low, high = min(ys[0], 0.0), ys[-1]
    usual = ys[math.ceil(0.98 * (len(ys) - 1))]
    if high > 3 * usual > 0:  # a few huge values, such as the first losses, would flatten all others
        high = 1.5 * usual
    if high <= low:
        high = low + (abs(low) or 1.0)
    x_low, x_high = min(xs), max(xs)
    if 0 < x_low <= 0.1 * x_high:
        x_low = 0.0
    if x_high <= x_low:
        x_low, x_high = x_low - 0.5, x_high + 0.5
    return _Plot((x_low, x_high), (low, high + 0.04 * (high - low)))


def _polyline(plot: _Plot, index: int, one: Series) -> Markup:
    positions = [(plot.x(x), max(plot.y(y), plot.top)) for x, y in one.points]
    dots: list[Markup] = []
    if len(positions) == 1 or (len(positions) <= MAX_DOTS and not one.faint):
        dots = [Markup('<circle cx="{:.1f}" cy="{:.1f}" r="2.2"/>').format(x, y) for x, y in positions]
    return Markup('<g class="{}" data-series="{}" style="--line:var(--line-{})"><polyline points="{}"/>{}</g>').format(
        "line faint" if one.faint else "line",
        index,
        _color(one),
        " ".join(f"{x:.1f},{y:.1f}" for x, y in positions),
        Markup("").join(dots),
    )


def _legend(series: Sequence[Series]) -> Markup:
    named = [(index, one) for index, one in enumerate(series) if not one.faint]
    if len(named) < 2:
        return Markup("")
    entry = Markup('<button type="button" data-series="{}" style="--line:var(--line-{})">{}</button>')
    entries = [entry.format(index, _color(one), one.name) for index, one in named]
    return Markup('<div class="legend">{}</div>').format(Markup("").join(entries))


def _tooltip_data(plot: _Plot, series: Sequence[Series], x_label: str, text: Callable[[float], str]) -> str:
    """JSON for `shell.js`: the positions and value texts of each named line."""
    lines = [
        {
            "series": index,
            "name": one.name,
            "color": _color(one),
            "x": [round(plot.x(x), 1) for x, _ in one.points],
            "at": [x for x, _ in one.points],
            "text": [text(y) if abs(y) >= 1000 else text(float(f"{y:.3g}")) for _, y in one.points],
        }
        for index, one in enumerate(series)
        if not one.faint
    ]
    return json.dumps({"width": WIDTH, "x_label": x_label, "lines": lines}, separators=(",", ":"))


def _color(one: Series) -> int:
    return (one.color - 1) % NUM_COLORS + 1


def _y_axis(plot: _Plot, values: Sequence[float], text: Callable[[float], str] = tick_text) -> list[Markup]:
    lines = [_line("grid", plot.left, plot.y(value), plot.right, plot.y(value)) for value in values]
    return lines + [_text("tick", plot.left - 6, plot.y(value) + 3.5, text(value), "end") for value in values]


def _x_axis(plot: _Plot, marks: Sequence[tuple[float, str]]) -> list[Markup]:
    return [_text("tick", plot.x(value), plot.bottom + 15, text) for value, text in marks]


def _axis_labels(plot: _Plot, height: float, x_label: str, y_label: str = "") -> list[Markup]:
    labels = [_text("label", (LEFT + RIGHT) / 2, height - 6, x_label)]
    if y_label:
        rotated = Markup('<g transform="rotate(-90)">{}</g>')
        labels.append(rotated.format(_text("label", -(TOP + height - HEIGHT + BOTTOM) / 2, plot.left - 37, y_label)))
    return labels


def _band(plot: _Plot, band: Band) -> Markup:
    start, stop = plot.x(band.start), plot.x(band.stop)
    name = _text("tick", (start + stop) / 2, plot.top - 6, band.name) if stop - start > 34 else Markup("")
    return _rect(f"band {band.name}", start, plot.top, stop, plot.bottom) + name


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> Markup:
    return Markup('<line class="{}" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>').format(kind, x1, y1, x2, y2)


def _rect(kind: str, x1: float, y1: float, x2: float, y2: float) -> Markup:
    return Markup('<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" rx="1.5"/>').format(
        kind, x1, y1, x2 - x1, y2 - y1
    )


def _text(kind: str, x: float, y: float, text: str, anchor: str = "middle") -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(kind, x, y, anchor, text)


def _svg(height: float, title: str, parts: Sequence[Markup]) -> Markup:
    return Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, height, title, Markup("").join(parts)
    )
