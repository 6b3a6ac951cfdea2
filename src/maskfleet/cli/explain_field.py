"""The help text of one field."""

from __future__ import annotations

import json
from typing import Any

from maskfleet.config.base import Config
from maskfleet.config.fields import ConfigField, nearest, walk_fields
from maskfleet.config.legacy.names import TABLE
from maskfleet.config.legacy.row import Mapped, Removed
from maskfleet.config.legacy.table import is_legacy, row_of
from maskfleet.config.run import RunConfig
from maskfleet.errors import ConfigError


def explanation(name: str) -> str:
    """The help text of `name`: a field, a section or an old name."""
    fields = {field.path: field for field in walk_fields(RunConfig)}
    if name in fields:
        return _section_text(fields[name], fields) if fields[name].is_section else _field_text(fields[name])
    if is_legacy(name):
        return _old_name_text(name, fields)
    near = nearest(name, fields)
    hint = f"did you mean {near}?" if near else "`maskfleet config show` lists every field"
    raise ConfigError(f"there is no field {name}", remedy=hint)


def _old_name_text(name: str, fields: dict[str, ConfigField]) -> str:
    row = row_of(name)
    if isinstance(row, Mapped):
        return "\n".join([f"{name} is an old name for", *(_field_text(fields[path]) for path in row.paths)])
    if isinstance(row, Removed):
        return f"{name} is an old name without a meaning here: {row.why}\n  → {row.remedy}\n"
    return f"{name}: {row.note}\n"


def _field_text(field: ConfigField) -> str:
    lines = [field.path, f"  {field.help}", f"  takes:   {field.takes}", f"  default: {_shown(field.default)}"]
    rows = [row for rows in TABLE.values() for row in rows if not isinstance(row, Removed)]
    meanings = {row.name: row_of(row.name) for row in rows}
    old = [name for name, row in meanings.items() if isinstance(row, Mapped) and field.path in row.paths]
    if old:
        lines.append(f"  old names: {', '.join(old)}")
    return "\n".join(lines) + "\n"


def _section_text(section: ConfigField, fields: dict[str, ConfigField]) -> str:
    inside = [field for path, field in fields.items() if path.startswith(f"{section.path}.")]
    width = max(len(field.path) for field in inside)
    lines = [f"{section.path}: {section.help}"]
    lines += [f"  {field.path:<{width}}  {field.help}" for field in inside if not field.is_section]
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    return json.dumps(value.model_dump(mode="json") if isinstance(value, Config) else value)
