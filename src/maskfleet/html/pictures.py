"""Line charts as SVG files that are complete by themselves, for notebooks and pages that are not ours."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from pathlib import Path

from markupsafe import Markup

from maskfleet.html.charts import HEIGHT, LEFT, NUM_COLORS, WIDTH, Series, line_parts, tick_text, with_points

HEAD_PX, LEGEND_PX = 26, 18  # height of the title, and of a line of the legend
_STYLE = Path(__file__).with_name("shell.css")


def line_picture(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str = "step",
    y_text: Callable[[float], str] | None = None,
) -> str:
    """All `series` on shared axes, with title and legend, as the text of an SVG file; empty if there are no points."""
    series = with_points(series)
    if not series:
        return ""
    named = [one for one in series if not one.faint]
    top = HEAD_PX + LEGEND_PX * len(named)
    parts = [
        Markup('<text x="{}" y="18" style="fill:var(--ink);font-size:14px;font-weight:600">{}</text>').format(14, title)
    ]
    entry = Markup(
        '<rect x="{}" y="{}" width="10" height="10" rx="2" style="fill:var(--line-{})"/>'
        '<text x="{}" y="{}" style="fill:var(--ink)">{}</text>'
    )
    for row, one in enumerate(named):
        y = HEAD_PX + LEGEND_PX * row
        parts.append(entry.format(LEFT, y + 2, (one.color - 1) % NUM_COLORS + 1, LEFT + 16, y + 11, one.name))
    lines = Markup("").join(line_parts(series, x_label=x_label, y_text=y_text or tick_text))
    parts.append(Markup('<g transform="translate(0 {})">{}</g>').format(top, lines))
    return str(
        Markup(
            '<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {} {}" width="{}" role="img" '
            'aria-label="{}"><style>{}\ntext {{ font-family: sans-serif; }}</style>'
            '<rect width="100%" height="100%" style="fill:var(--card)"/>{}</svg>'
        ).format(
            WIDTH,
            HEIGHT + top,
            WIDTH,
            title,
            Markup("<![CDATA[{}]]>").format(Markup(_STYLE.read_text(encoding="utf-8"))),  # noqa: S704 - our own file
            Markup("").join(parts),
        )
    )


def svg_uri(svg: str) -> str:
    """An SVG file as the address of an <img>."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
