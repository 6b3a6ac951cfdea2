"""Line charts as inline SVG: complete by themselves; the report's script adds the values under the pointer.

Colours are the style sheet's `--line-1`, `--line-2`, ..., so that a page chooses them for light and dark.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, pairwise

Point = tuple[float, float]

WIDTH, HEIGHT = 640, 280  # of the drawing, in its own units; on a page it is as wide as there is room
LEFT, RIGHT, TOP, BOTTOM = 54, 626, 12, 240  # the sides of the plot inside the drawing
MAX_POINTS = 600  # of a line: more would not be seen
MAX_DOTS = 40  # of a line up to which every point is marked
NUM_COLORS = 8


@dataclass(frozen=True, slots=True)
class Series:
    """One line: points by rising x. `faint` lines, such as raw values behind smooth ones, have no legend entry."""

    name: str
    points: Sequence[Point]
    color: int = 1  # 1, 2, ...
    faint: bool = False


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where numbers lie in the drawing."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return LEFT + (RIGHT - LEFT) * (value - self.x_low) / (self.x_high - self.x_low)

    def y(self, value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (value - self.y_low) / (self.y_high - self.y_low)


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str = "step",
    y_text: Callable[[float], str] | None = None,
    y_from_zero: bool = True,
) -> str:
    """A figure of all `series` on common axes, as HTML; empty if there is nothing to draw."""
    series = [Series(one.name, _finite(one.points), one.color, one.faint) for one in series]
    series = [one for one in series if one.points]
    if not series:
        return ""
    frame = _frame(series, y_from_zero=y_from_zero)
    text = y_text or tick_text
    name = escape(title, quote=True)
    parts = [
        f'<figure class="chart" data-chart="{escape(_hover_data(series, frame, text), quote=True)}">',
        f"<figcaption>{name}</figcaption>",
        _legend(series),
        f'<div class="plot"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">',
        *_axes(frame, text, x_label),
        *(_line(place, one, frame) for place, one in enumerate(series)),
        f'<line class="cursor" x1="0" x2="0" y1="{TOP}" y2="{BOTTOM}" visibility="hidden"/>',
        '</svg><div class="tip" hidden></div></div></figure>',
    ]
    return "\n".join(part for part in parts if part)


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Each of `points` that is finite as the mean of its neighbours, up to a fiftieth of all on either side.

    Near the start the window shrinks, alike on both sides, so that the line does not flatten the steep fall there.
    """
    known = [point for point in points if math.isfinite(point[1])]
    sums = [0.0, *accumulate(y for _, y in known)]
    reach = len(known) // 50 + 1
    result = []
    for place, (x, _) in enumerate(known):
        before = min(reach, place)
        after = min(before, len(known) - 1 - place)
        result.append((x, (sums[place + after + 1] - sums[place - before]) / (before + 1 + after)))
    return result


def thinned(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most about `limit` of `points`, with the lowest and the highest of each stretch, so that no spike is lost."""
    if len(points) <= limit:
        return list(points)
    edges = [round(stretch * len(points) / (limit // 2)) for stretch in range(limit // 2 + 1)]
    kept = []
    for start, stop in pairwise(edges):
        stretch = points[start:stop]
        kept += sorted({min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])})
    return kept


def ticks(low: float, high: float, *, count: int = 5) -> list[float]:
    """Round numbers within `low` and `high`, about `count` of them: multiples of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [place * step for place in range(first, last + 1)]


def tick_text(value: float) -> str:
    """A number for an axis: `0`, `0.25`, `12k`, `1.5M`, `2e-05`."""
    size = abs(value)
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if size >= unit:
            return f"{value / unit:.4g}{letter}"
    return f"{value:.4g}"


def _finite(points: Sequence[Point]) -> list[Point]:
    return thinned([point for point in points if math.isfinite(point[1])])


def _frame(series: Sequence[Series], *, y_from_zero: bool) -> _Frame:
    xs = [x for one in series for x, _ in one.points]
    ys = sorted(y for one in series for _, y in one.points)
    low, high = ys[0], ys[-1]
    usual = ys[int(0.98 * (len(ys) - 1))]
    if high > 3 * usual > 0:  # a few huge values, as the first losses are, would press the rest flat
        high = 1.5 * usual
    if y_from_zero:
        low = min(low, 0.0)
    if high <= low:
        high = low + (abs(low) or 1.0)
    x_low, x_high = min(xs), max(xs)
    if 0 < x_low <= 0.1 * x_high:
        x_low = 0.0
    if x_high <= x_low:
        x_low, x_high = x_low - 0.5, x_high + 0.5
    return _Frame(x_low, x_high, low, high + 0.04 * (high - low))


def _axes(frame: _Frame, text: Callable[[float], str], x_label: str) -> list[str]:
    parts = []
    for value in ticks(frame.y_low, frame.y_high):
        y = f"{frame.y(value):.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y}" dy="4" text-anchor="end">{escape(text(value))}</text>')
    for value in ticks(frame.x_low, frame.x_high, count=6):
        x = f"{frame.x(value):.1f}"
        parts.append(f'<line class="axis" x1="{x}" x2="{x}" y1="{BOTTOM}" y2="{BOTTOM + 4}"/>')
        parts.append(f'<text class="tick" x="{x}" y="{BOTTOM + 18}" text-anchor="middle">{tick_text(value)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{RIGHT}" y1="{BOTTOM}" y2="{BOTTOM}"/>')
    middle = (LEFT + RIGHT) / 2
    parts.append(f'<text class="tick" x="{middle:.0f}" y="{BOTTOM + 34}" text-anchor="middle">{escape(x_label)}</text>')
    return parts


def _line(place: int, one: Series, frame: _Frame) -> str:
    spots = [(frame.x(x), max(frame.y(y), TOP)) for x, y in one.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
    style = f'style="--line:var(--line-{_color(one)})"'
    kind = "line faint" if one.faint else "line"
    dots = ""
    if len(spots) == 1 or (len(spots) <= MAX_DOTS and not one.faint):
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in spots)
    return f'<g class="{kind}" data-series="{place}" {style}><polyline points="{path}"/>{dots}</g>'


def _legend(series: Sequence[Series]) -> str:
    named = [(place, one) for place, one in enumerate(series) if not one.faint]
    if len(named) < 2:
        return ""
    entries = "".join(
        f'<button type="button" data-series="{place}" style="--line:var(--line-{_color(one)})">'
        f"{escape(one.name)}</button>"
        for place, one in named
    )
    return f'<div class="legend">{entries}</div>'


def _hover_data(series: Sequence[Series], frame: _Frame, text: Callable[[float], str]) -> str:
    """What the script needs to show values: for each named line its points in the drawing, and their texts."""
    lines = [
        {
            "series": place,
            "name": one.name,
            "color": _color(one),
            "x": [round(frame.x(x), 1) for x, _ in one.points],
            "at": [x for x, _ in one.points],
            "text": [text(y) if abs(y) >= 1000 else text(float(f"{y:.3g}")) for _, y in one.points],
        }
        for place, one in enumerate(series)
        if not one.faint
    ]
    return json.dumps({"width": WIDTH, "lines": lines}, separators=(",", ":"))


def _color(one: Series) -> int:
    return (one.color - 1) % NUM_COLORS + 1
