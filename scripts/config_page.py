"""Write docs/reference/config.md from the configuration's own fields: python scripts/config_page.py"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from maskfleet.config.base import Config
from maskfleet.config.fields import ConfigField, walk_fields
from maskfleet.config.launch import EksLaunch, LocalLaunch, SageMakerChannel, SageMakerLaunch, SshLaunch
from maskfleet.config.legacy.row import Alias, Mapped
from maskfleet.config.legacy.table import TABLE, row_of
from maskfleet.config.recipes import FASTER, RECIPES
from maskfleet.config.run import RunConfig, SplitConfig

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "config.md"

OPENING = """\
# Configuration reference

A run is described by the fields below and by nothing else. A recipe gives all of them a value, a file given with
`--config` changes some, and `--set` changes single ones; later beats earlier. What came out is written to
`RUN_DIR/run.yaml`, which is such a file itself.

```
maskfleet config show --recipe r50_fpn_1x --set train.base_lr=0.02   # every value, and where it came from
maskfleet config explain train.base_lr                               # one field, as in the tables below
maskfleet config schema > run.schema.json                            # for editors that complete and check YAML
```

A name that does not exist is an error that suggests the nearest one. Old names of TensorPack and AWS Samples work
wherever a field's name does; [legacy-names.md](legacy-names.md) has all of them, with the ones that mean nothing here.

The defaults below are those of the fields; a recipe sets its own where it differs. Where a description says None, write
`null`.

This page is generated; `python scripts/config_page.py` writes it again.
"""

RECIPES_CLOSING = """\
Each has a twin without masks, Faster R-CNN: `faster_r50_fpn_1x`, `faster_demo` and so on. Published AP is box;mask on
COCO val2017, in percent, as TensorPack and AWS Samples report it for their own code. It is what a recipe is meant to
reach, not a measurement of maskfleet.
"""

LAUNCH_OPENING = """\
## launch: where a run happens

A section `launch` in a run file; `launch.on` decides which fields there are. It is no part of `run.yaml`, and a
training process never reads it. That a field is listed here does not mean that launching there is built: the README
says what works.
"""


def page() -> str:
    """The whole page."""
    old = old_names()
    parts = [OPENING, _recipes()]
    fields = list(walk_fields(RunConfig))
    top = [field for field in fields if "." not in field.path and not field.is_section]
    parts.append(_table("run", "One training run.", top, old))
    for section in (field for field in fields if field.is_section):
        inside = [field for field in fields if _parent(field.path) == section.path and not field.is_section]
        parts.append(_table(section.path, section.help, inside, old))
        if section.path == "data":
            parts.append(_entry("data.train` and `data.val", "data.train[]", SplitConfig, old))
    parts.append(LAUNCH_OPENING)
    for kind in (LocalLaunch, SshLaunch, SageMakerLaunch, EksLaunch):
        inside = [field for field in walk_fields(kind, "launch.") if not field.is_section]
        on = kind.model_fields["on"].default
        parts.append(_table(f"launch, on: {on}", (kind.__doc__ or "").strip(), inside, old, level=3))
        if kind is SageMakerLaunch:
            parts.append(_entry("launch.channels", "launch.channels[]", SageMakerChannel, old))
    return "\n".join(parts)


def old_names() -> dict[str, list[str]]:
    """Old names of each of our fields, in the order of the table; names that only stood for another are included."""
    names: dict[str, list[str]] = {}
    for row in (row for rows in TABLE.values() for row in rows):
        meaning = row_of(row.of) if isinstance(row, Alias) else row
        if isinstance(meaning, Mapped):
            for path in meaning.paths:
                names.setdefault(path, []).append(row.name)
    return names


def _recipes() -> str:
    lines = ["## Recipes", "", "| `--recipe` | what it trains | published AP | as `faster_…` |", "|---|---|---|---|"]
    for name, recipe in RECIPES.items():
        if not name.startswith(FASTER):
            twin = RECIPES[FASTER + name].published_ap
            lines.append(f"| `{name}` | {(recipe.build.__doc__ or '').strip()} | {recipe.published_ap} | {twin} |")
    return "\n".join(lines) + "\n\n" + RECIPES_CLOSING


def _table(
    title: str, text: str, fields: Iterable[ConfigField], old: dict[str, list[str]], *, level: int | None = None
) -> str:
    level = level or 2 + title.count(".")
    lines = [f"{'#' * level} {title}", "", text, "", *_rows(fields, old)]
    return "\n".join(lines) + "\n"


def _entry(where: str, prefix: str, kind: type[Config], old: dict[str, list[str]]) -> str:
    """The table of a record that a list is made of; fields without a default must be given."""
    must = {f"{prefix}.{name}" for name, info in kind.model_fields.items() if info.is_required()}
    lines = [f"Each entry of `{where}` that is a record: {_small((kind.__doc__ or '').strip())}", ""]
    return "\n".join([*lines, *_rows(walk_fields(kind, f"{prefix}."), old, must)]) + "\n"


def _rows(fields: Iterable[ConfigField], old: dict[str, list[str]], must: Iterable[str] = ()) -> Iterator[str]:
    yield "| field | what it is | takes | default | old names |"
    yield "|---|---|---|---|---|"
    for field in fields:
        default = "must be given" if field.path in must else f"`{_cell(_spelled(field.default))}`"
        names = ", ".join(f"`{name}`" for name in old.get(field.path, []))
        yield f"| `{field.path}` | {_cell(field.help)} | {_cell(field.takes)} | {default} | {names} |"


def _spelled(value: Any) -> str:
    """`value` as one would write it after `--set NAME=`."""
    return value if isinstance(value, str) else json.dumps(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _small(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
