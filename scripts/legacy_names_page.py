"""Write docs/reference/legacy-names.md from the table of old names: python scripts/legacy_names_page.py"""

from __future__ import annotations

from pathlib import Path

from maskfleet.config.legacy.names import TABLE
from maskfleet.config.legacy.row import Alias, Mapped, Nested, Removed, Row
from maskfleet.config.legacy.table import row_of

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "legacy-names.md"

OPENING = """\
# Old names

Every name of TensorPack's FasterRCNN example, of AWS Samples' mask-rcnn-tensorflow, of the SageMaker notebooks and of
the EKS charts is accepted wherever ours are: in `--set` and in a run file.

```
maskfleet config show --recipe optimized --set TRAIN.BASE_LR=0.01    # is train.base_lr=0.01
```

- `config:NAME` (SageMaker), `maskrcnn.NAME` and `global.NAME` (charts) are `NAME`.
- Values are parsed, never evaluated: write `0.0015625`, not `1.25e-2/8`.
- A name without a meaning here is an error that says why. With its old default as value it is accepted and has no
  effect.
- Learning rates keep the unit of their trainer, which is part of the recipe: start from `standard` for TensorPack's
  numbers (8 images per update) and from `optimized` for those of AWS Samples (1 image).

This page is generated from `config/legacy/` by `python scripts/legacy_names_page.py`.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([OPENING, *(_section(title, rows) for title, rows in TABLE.items())])


def _section(title: str, rows: tuple[Row, ...]) -> str:
    lines = [f"## {title}", "", "| old name | ours | |", "|---|---|---|"]
    lines += [f"| `{row.name}` | {_ours(row)} | {_remark(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _ours(row: Row) -> str:
    match row:
        case Mapped():
            return ", ".join(f"`{path}`" for path in row.paths)
        case Alias():
            return _ours(row_of(row.of))
        case Removed() | Nested():
            return "–"


def _remark(row: Row) -> str:
    match row:
        case Mapped():
            return f"{_sentence(row.kind.description)} {row.note}".strip()
        case Alias():
            return f"As `{row.of}`. {row.note}".strip()
        case Nested():
            return row.note
        case Removed():
            does_nothing = f" {_or(row.accepts)} is accepted without effect." if row.accepts else ""
            return f"{_sentence(row.why)} {_sentence(row.remedy)}{does_nothing}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _or(values: tuple[str, ...]) -> str:
    return " or ".join(f"`{value}`" for value in values)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
