"""Several trainings side by side: a table of their results, and their curves as pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median

from markupsafe import Markup

from maskfleet.html.charts import Series, smoothed
from maskfleet.html.pictures import line_picture, svg_uri
from maskfleet.system.files import write_atomically

Record = Mapping[str, float]
LOSS, SPEED = "total_cost", "images_per_s"
# Title of a picture or column, and the metric that it shows.
SCORES = {
    "box AP": "mAP(bbox)/IoU=0.5:0.95",
    "mask AP": "mAP(segm)/IoU=0.5:0.95",
    "AP small": "mAP(bbox)/small",
    "AP medium": "mAP(bbox)/medium",
    "AP large": "mAP(bbox)/large",
}
CURVES = ("box AP", "mask AP")
SPEEDS = 20  # the speed is the median of the last so many log lines


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One row of the table; AP are the best values, 0 to 1, and None where a run has not been evaluated."""

    name: str
    steps: int
    box_ap: float | None
    mask_ap: float | None
    ap_small: float | None
    ap_medium: float | None
    ap_large: float | None
    loss: float | None  # the last one
    images_per_s: float | None


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """Runs by name with the lines of their metrics.jsonl. Notebooks show it as a table and pictures."""

    metrics: Mapping[str, Sequence[Record]]

    @property
    def rows(self) -> list[ComparedRun]:
        """One row for each run, in the given order."""
        return [_row(name, records) for name, records in self.metrics.items()]

    def pictures(self) -> dict[str, str]:
        """SVG files by title: the loss, and the box and mask AP, as far as the runs have them."""
        found = {"total loss": self._picture("total loss", LOSS, smooth=True)}
        found |= {title: self._picture(f"{title} [%]", SCORES[title], percent=True) for title in CURVES}
        return {title: svg for title, svg in found.items() if svg}

    def save(self, folder: str | Path) -> list[Path]:
        """Write the pictures into `folder`; returns their paths."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        paths = []
        for title, svg in self.pictures().items():
            paths.append(target / f"{title.replace(' ', '-')}.svg")
            write_atomically(paths[-1], svg.encode())
        return paths

    def __repr__(self) -> str:
        """The table as text."""
        rows = [_TITLES, *(_cells(row) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if number == 0 else cell.rjust(width)
                for number, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )

    def _repr_html_(self) -> str:
        """The table and the pictures, for Jupyter."""
        head = Markup("").join(Markup("<th>{}</th>").format(title) for title in _TITLES)
        body = Markup("").join(
            Markup("<tr>{}</tr>").format(Markup("").join(Markup("<td>{}</td>").format(cell) for cell in _cells(row)))
            for row in self.rows
        )
        pictures = Markup("").join(
            Markup('<img src="{}" alt="{}" width="460">').format(svg_uri(svg), title)
            for title, svg in self.pictures().items()
        )
        return str(Markup("<table><tr>{}</tr>{}</table><div>{}</div>").format(head, body, pictures))

    def _picture(self, title: str, metric: str, *, smooth: bool = False, percent: bool = False) -> str:
        series = []
        for color, (name, records) in enumerate(self.metrics.items(), start=1):
            points = [(record["step"], record[metric]) for record in records if metric in record]
            if smooth:
                series += [Series(name, points, color, faint=True), Series(name, smoothed(points), color)]
            else:
                series.append(Series(name, points, color))
        text: Callable[[float], str] | None = (lambda value: f"{100 * value:.3g}") if percent else None
        return line_picture(series, title=title, y_text=text)


_TITLES = ("run", "steps", *SCORES, "loss", "images/s")


def _row(name: str, records: Sequence[Record]) -> ComparedRun:
    losses, speeds = _values(records, LOSS), _values(records, SPEED)[-SPEEDS:]
    return ComparedRun(
        name=name,
        steps=int(max((record["step"] for record in records), default=0)),
        box_ap=_best(records, "box AP"),
        mask_ap=_best(records, "mask AP"),
        ap_small=_best(records, "AP small"),
        ap_medium=_best(records, "AP medium"),
        ap_large=_best(records, "AP large"),
        loss=losses[-1] if losses else None,
        images_per_s=round(median(speeds), 2) if speeds else None,
    )


def _values(records: Sequence[Record], metric: str) -> list[float]:
    return [record[metric] for record in records if metric in record and math.isfinite(record[metric])]


def _best(records: Sequence[Record], title: str) -> float | None:
    """The highest score; -1 means that there are no objects to find, such as large ones."""
    return max((value for value in _values(records, SCORES[title]) if value >= 0), default=None)


def _cells(row: ComparedRun) -> tuple[str, ...]:
    found = []
    for field in fields(row):
        value = getattr(row, field.name)
        if value is None:
            found.append("–")
        elif "ap" in field.name.split("_"):
            found.append(f"{100 * value:.1f}")
        else:
            found.append(str(value) if isinstance(value, str | int) else f"{value:.4g}")
    return tuple(found)
