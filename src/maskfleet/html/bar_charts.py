"""Small charts as inline SVG. Colours are classes that the page's style sheet fills in, for light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 460, 230
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 20, 40


@dataclass(frozen=True, slots=True)
class Band:
    """A named stretch of the x axis, in bins, that is set off by its colour."""

    start: float
    stop: float
    name: str


def histogram(
    counts: Sequence[int],
    *,
    title: str,
    x_label: str,
    y_label: str,
    bin_names: Sequence[str],
    ticks: Sequence[tuple[float, str]],
    bands: Sequence[Band] = (),
) -> Markup:
    """Upright bars side by side; `ticks` are (place in bins, text), `bin_names` what a bar says when pointed at."""
    plot_width, plot_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    steps = nice_steps(max(counts, default=0))
    top = steps[-1] or 1
    step = plot_width / max(len(counts), 1)
    parts = [_band(band, step, plot_height) for band in bands]
    for value in steps:
        y = TOP + plot_height * (1 - value / top)
        parts.append(
            Markup('<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(LEFT, WIDTH - RIGHT, y, y)
        )
        parts.append(_text(LEFT - 6, y + 3.5, short_number(value), "end"))
    for index, (count, name) in enumerate(zip(counts, bin_names, strict=True)):
        bar = plot_height * count / top
        bar = max(bar, 1.0) if count else 0.0
        shape = Markup('<rect class="bar" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" rx="1.5"/>').format(
            LEFT + index * step + min(1.0, step * 0.08), TOP + plot_height - bar, step - 2 * min(1.0, step * 0.08), bar
        )
        # the whole column answers to the pointer, so that small bars can be read
        column = Markup('<rect class="hit" x="{:.1f}" y="{}" width="{:.1f}" height="{}"/>').format(
            LEFT + index * step, TOP, step, plot_height
        )
        parts.append(Markup("<g><title>{}: {:,}</title>{}{}</g>").format(name, count, column, shape))
    for place, text in ticks:
        parts.append(_text(LEFT + place * step, TOP + plot_height + 15, text, "middle"))
    parts.append(_axis_names(x_label, y_label))
    return _svg(WIDTH, HEIGHT, title, parts)


def bubbles(points: Sequence[tuple[int, int, int]], *, title: str, step_px: int) -> Markup:
    """Sizes (width, height, images) as discs whose area grows with the number of images; a line marks squares."""
    width, height = WIDTH, 300
    plot_width, plot_height = width - LEFT - RIGHT, height - TOP - BOTTOM
    x_steps = nice_steps(max((w for w, _, _ in points), default=1) * 1.04)
    y_steps = nice_steps(max((h for _, h, _ in points), default=1) * 1.04)
    # one scale for both sides, so that shapes look as they are
    scale = min(plot_width / (x_steps[-1] or 1), plot_height / (y_steps[-1] or 1))
    left = LEFT + (plot_width - x_steps[-1] * scale) / 2
    parts = []

    def x_of(value: float) -> float:
        return left + value * scale

    def y_of(value: float) -> float:
        return TOP + plot_height - value * scale

    for value in x_steps:
        parts.append(
            Markup('<line class="grid" x1="{0:.1f}" x2="{0:.1f}" y1="{1:.1f}" y2="{2}"/>').format(
                x_of(value), y_of(y_steps[-1]), TOP + plot_height
            )
        )
        parts.append(_text(x_of(value), TOP + plot_height + 15, f"{value:g}", "middle"))
    for value in y_steps:
        parts.append(
            Markup('<line class="grid" x1="{0:.1f}" x2="{1:.1f}" y1="{2:.1f}" y2="{2:.1f}"/>').format(
                x_of(0), x_of(x_steps[-1]), y_of(value)
            )
        )
        parts.append(_text(left - 6, y_of(value) + 3.5, f"{value:g}", "end"))
    square = min(x_steps[-1], y_steps[-1])
    parts.append(
        Markup('<line class="mark" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>').format(
            x_of(0), y_of(0), x_of(square), y_of(square)
        )
    )
    most = max((count for _, _, count in points), default=1)
    about = "about " if step_px > 1 else ""
    for w, h, count in sorted(points, key=lambda point: -point[2]):
        parts.append(
            Markup('<circle class="bubble" cx="{:.1f}" cy="{:.1f}" r="{:.1f}"><title>{}</title></circle>').format(
                x_of(w), y_of(h), 2.5 + 11 * math.sqrt(count / most), f"{about}{w} × {h} px: {count:,} images"
            )
        )
    parts.append(_axis_names("width, px", "height, px", height, left - LEFT))
    return _svg(width, height, title, parts)


def bar(value: float, largest: float, *, label: str) -> Markup:
    """One lying bar that fills its box when `value` is `largest`."""
    share = 100 * value / largest if largest else 0.0
    return Markup(
        '<svg class="rowbar" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label="{}">'
        '<rect class="track" width="100" height="10"/><rect class="bar" width="{:.2f}" height="10"/></svg>'
    ).format(label, max(share, 0.6) if value else 0)


def shares(parts: Sequence[tuple[str, int]], *, title: str) -> Markup:
    """One lying bar cut into named parts; their numbers are written beside it by the page."""
    total = sum(count for _, count in parts) or 1
    shapes, left = [], 0.0
    for number, (name, count) in enumerate(parts):
        width = 100 * count / total
        shapes.append(
            Markup('<rect class="part{}" x="{:.2f}" width="{:.2f}" height="10"><title>{}: {:,}</title></rect>').format(
                number, left, width, name, count
            )
        )
        left += width
    return Markup(
        '<svg class="shares" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>'
    ).format(title, Markup("").join(shapes))


def canvas_outline(height: int, width: int, *, longest: int, side_px: int = 40) -> Markup:
    """A canvas as a small rectangle; canvases drawn with the same `longest` are to one scale."""
    scale = side_px / longest
    return Markup(
        '<svg class="canvas" width="{0}" height="{0}" viewBox="0 0 {0} {0}" role="img" aria-label="{1} by {2} pixels">'
        '<rect x="{3:.1f}" y="{4:.1f}" width="{5:.1f}" height="{6:.1f}" rx="2"/></svg>'
    ).format(
        side_px + 2,
        width,
        height,
        1 + (side_px - width * scale) / 2,
        1 + (side_px - height * scale) / 2,
        width * scale,
        height * scale,
    )


def nice_steps(largest: float, *, about: int = 4) -> list[float]:
    """Round numbers from 0 to at least `largest`, about so many of them."""
    if largest <= 0:
        return [0, 1]
    rough = largest / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    if largest >= 1:
        step = max(step, 1.0)
        step = step if step == int(step) else math.ceil(step)
    return [step * index for index in range(math.ceil(largest / step - 1e-9) + 1)]


def short_number(value: float) -> str:
    """1500 as 1.5k, 2000000 as 2M."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:g}"


def _band(band: Band, step: float, plot_height: float) -> Markup:
    start, width = LEFT + band.start * step, (band.stop - band.start) * step
    shape = Markup('<rect class="band {}" x="{:.1f}" y="{}" width="{:.1f}" height="{}"/>').format(
        band.name, start, TOP, width, plot_height
    )
    name = _text(start + width / 2, TOP - 6, band.name, "middle") if width > 34 else Markup("")
    return Markup("{}{}").format(shape, name)


def _axis_names(x_label: str, y_label: str, height: int = HEIGHT, inset: float = 0.0) -> Markup:
    across = _text(LEFT + (WIDTH - LEFT - RIGHT) / 2, height - 6, x_label, "middle", "axis")
    middle = TOP + (height - TOP - BOTTOM) / 2
    up = Markup(
        '<text class="axis" transform="rotate(-90)" x="{:.1f}" y="{:.1f}" text-anchor="middle">{}</text>'
    ).format(-middle, 11 + inset, y_label)
    return Markup("{}{}").format(across, up)


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(kind, x, y, anchor, text)


def _svg(width: int, height: int, title: str, parts: Sequence[Markup]) -> Markup:
    return Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        width, height, escape(title), Markup("").join(parts)
    )
