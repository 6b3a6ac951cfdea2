"""HTML pages from Jinja templates that extend `shell.html.jinja`: one look, one file, no network requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from maskfleet import __version__
from maskfleet.log import count_text

FOLDER = Path(__file__).parent


def render(template: Path, *, made_by: str, **values: Any) -> str:
    """The page of `template`, which may include the files beside it; `made_by` names the command in head and title."""
    environment = Environment(
        loader=FileSystemLoader([template.parent, FOLDER]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"comma": "{:,}".format, "percent": _percent, "count": count_text}
    return environment.get_template(template.name).render(made_by=made_by, version=__version__, **values)


def generator_tag(made_by: str) -> str:
    """How the generator tag of a page of the command `made_by` begins; tells our pages from other files."""
    return f'<meta name="generator" content="maskfleet {made_by}'


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if 0 < share < 0.1 else f"{100 * share:.0f} %"
