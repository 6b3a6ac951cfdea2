"""The HTML page of `maskfleet bench --scaling --html FILE`: one self-contained file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from maskfleet.bench.scaling.predict import Prediction, Scaling, Setting
from maskfleet.bench.scaling.table import MODEL_NOTE, SGD_NOTE, all_parameters
from maskfleet.bench.scaling.topology import NODES
from maskfleet.errors import ConfigError
from maskfleet.html.charts import Series, line_chart
from maskfleet.html.page import render
from maskfleet.system.files import write_atomically

MADE_BY = "bench"
TEMPLATE = Path(__file__).with_name("page.html.jinja")


def write_page(predictions: Sequence[Prediction], setting: Setting, path: Path) -> None:
    """Write the page to `path`."""
    try:
        write_atomically(path, render_page(predictions, setting))
    except OSError as error:
        raise ConfigError(
            f"the page {path} cannot be written: {error.strerror}", remedy="choose another file with --html"
        ) from error


def render_page(predictions: Sequence[Prediction], setting: Setting) -> str:
    """Charts of efficiency by the number of GPUs, the table, and the origin of each number."""
    instances = list(dict.fromkeys(one.instance for one in predictions))
    return render(
        TEMPLATE,
        made_by=MADE_BY,
        notes=(MODEL_NOTE, SGD_NOTE),
        setting=setting,
        charts=[_chart(predictions, "weak"), _chart(predictions, "strong")],
        predictions=predictions,
        parameters=all_parameters([NODES[name] for name in instances]),
    )


def _chart(predictions: Sequence[Prediction], scaling: Scaling) -> Markup:
    """Lines of step efficiency; strong scaling is weak scaling as long as the images per step allow it."""
    instances = list(dict.fromkeys(one.instance for one in predictions))
    series = []
    for color, name in enumerate(instances, 1):
        by_gpus: dict[int, float] = {}
        for one in predictions:  # the strong prediction for a number of GPUs follows the weak one
            if one.instance == name and one.scaling in ("weak", scaling):
                by_gpus[one.gpus] = one.efficiency
        points = [(math.log2(gpus), 100 * share) for gpus, share in sorted(by_gpus.items())]
        series.append(Series(name, points, color))
    title = f"Efficiency of a step, {scaling} scaling, %"
    return line_chart(series, title=title, x_label="log2 of the number of GPUs")
