"""A square table of counts as coloured cells, inline SVG."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

CELL = 12  # SVG units
LABEL = 96  # units for the names at the left and at the top
MIN_SHARE = 0.005  # cells with less of their row are left out
MAX_NAME = 18  # characters of a name that fit


def heat_map(counts: Sequence[Sequence[int]], *, names: Sequence[str], title: str, last_column: str) -> Markup:
    """Rows and columns of `names`; the darker a cell, the larger its share of its row.

    Cells on the diagonal are right. There may be one more column than rows, called `last_column`. A cell's tooltip has
    the names, the count and the share.
    """
    columns = [*names, last_column]
    width, height = LABEL + CELL * len(columns) + 4, LABEL + CELL * len(names) + 4
    parts = [
        Markup('<rect class="frame" x="{0}" y="{0}" width="{1}" height="{2}"/>').format(
            LABEL, CELL * len(columns), CELL * len(names)
        )
    ]
    for row, (name, values) in enumerate(zip(names, counts, strict=True)):
        top, total = LABEL + CELL * row, sum(values) or 1
        parts.append(_label(LABEL - 4, top + CELL * 0.75, name))
        for column, count in enumerate(values):
            share = count / total
            if share < MIN_SHARE:
                continue
            parts.append(
                Markup(
                    '<rect class="{}" x="{}" y="{}" width="{}" height="{}" opacity="{:.2f}"><title>{}</title></rect>'
                ).format(
                    "right" if column == row else "wrong",
                    LABEL + CELL * column,
                    top,
                    CELL,
                    CELL,
                    0.15 + 0.85 * share,
                    f"{name} → {columns[column]}: {count:,} ({100 * share:.1f} %)",
                )
            )
    for column, name in enumerate(columns):
        x, y = LABEL + CELL * (column + 0.75), LABEL - 4
        parts.append(
            Markup('<g transform="translate({},{}) rotate(-90)">{}</g>').format(x, y, _label(0, 0, name, "start"))
        )
    # at least as large as on paper, at most twice: a matrix of two classes need not fill the page
    return Markup(
        '<svg class="heat" style="max-width:{}px" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>'
    ).format(2 * width, width, height, title, Markup("").join(parts))


def _label(x: float, y: float, name: str, anchor: str = "end") -> Markup:
    text = name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…"
    return Markup('<text x="{}" y="{}" font-size="9" text-anchor="{}">{}</text>').format(x, y, anchor, text)
