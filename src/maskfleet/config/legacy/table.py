"""Translation of old names and their values to our fields.

Values are parsed as literals, never evaluated. A name without a meaning here is an error that says why.
"""

from __future__ import annotations

import difflib
from operator import attrgetter
from typing import Any

from pydantic import ValidationError

from maskfleet.config.fields import nearest, walk_fields
from maskfleet.config.legacy.names import TABLE
from maskfleet.config.legacy.row import Alias, Mapped, Nested, Removed, Row
from maskfleet.config.literal import parsed, unquoted
from maskfleet.config.run import ALTERNATIVES, RunConfig
from maskfleet.errors import ConfigError

PREFIXES = ("config:", "maskrcnn.", "global.")

_ROWS: dict[str, Row] = {row.name: row for rows in TABLE.values() for row in rows}
_FAMILIES = tuple(name[:-1] for name in _ROWS if name.endswith("*"))


def is_legacy(name: str) -> bool:
    """Whether `name` is an old name, or has the form of one, so that `translate` should handle it."""
    bare = _bare(name)
    first = bare.split(".")[0]
    return bare != name or bare in _ROWS or (first.isupper() and first.isascii())


def translate(name: str, value: str) -> dict[str, Any]:
    """Our dotted fields and their values for an old `name` and its `value` as typed; empty if nothing changes.

    Each value is valid for its field; whether the fields fit together is checked with the whole configuration.
    """
    row = row_of(name)
    if isinstance(row, Nested):
        return _translated_inner(row, name, value)
    if isinstance(row, Removed):
        if any(_same(value, default) for default in row.accepts):
            return {}
        raise ConfigError(f"{_typed(name, value)} has no meaning here: {row.why}", remedy=row.remedy)
    assert isinstance(row, Mapped)
    return _translated(row, name, value)


def row_of(name: str) -> Mapped | Removed | Nested:
    """The row of an old `name`; aliases are resolved."""
    bare = _bare(name)
    row = _ROWS.get(bare)
    if row is None:
        family = next((prefix for prefix in _FAMILIES if bare.startswith(prefix)), None)
        if family is None:
            raise _unknown(name, bare)
        row = _ROWS[family + "*"]
    return row_of(row.of) if isinstance(row, Alias) else row


def _bare(name: str) -> str:
    """`name` without the prefix that SageMaker or a chart adds."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _translated(row: Mapped, name: str, value: str) -> dict[str, Any]:
    try:
        ours = row.kind.read(value)
        for path in row.paths:
            _check_field(path, ours)
    except ValueError as error:
        what = f"{_typed(name, value)} (here {_and(row.paths)}) is not valid: {error}"
        raise ConfigError(what, remedy=_example(row, name)) from error
    cleared = [ALTERNATIVES[path] for path in row.paths if path in ALTERNATIVES]
    return dict.fromkeys(row.paths, ours) | dict.fromkeys(cleared)


def _translated_inner(row: Nested, name: str, value: str) -> dict[str, Any]:
    inner, equals, inner_value = unquoted(value).partition("=")
    if not inner:
        return {}
    if not equals or _bare(inner.strip()) == row.name:
        raise ConfigError(
            f"{_typed(name, value)} is not OLD_NAME=VALUE", remedy=f"for example {row.name}=TRAIN.GRADIENT_CLIP=0.36"
        )
    return translate(inner.strip(), inner_value)


def _check_field(path: str, value: Any) -> None:
    """Raise ValueError if `value` is invalid for our field with any values of the other fields."""
    *parents, leaf = path.split(".")
    section: Any = RunConfig
    for parent in parents:
        section = section.model_fields[parent].annotation
    try:
        section.model_validate({leaf: value})
    except ValidationError as error:
        # errors without a location are about several fields, and the others may still change
        problems = [problem for problem in error.errors() if problem["loc"]]
        # A number that is out of range is not `auto` either, which says nothing.
        problems = [problem for problem in problems if problem["type"] != "literal_error"] or problems
        if problems:
            entries = [f"entry {part + 1}: " for part in problems[0]["loc"] if isinstance(part, int)]
            message = problems[0]["msg"]
            raise ValueError("".join(entries) + message[:1].lower() + message[1:]) from error


def _example(row: Mapped, name: str) -> str:
    """What to write instead: the kind of value, and the default of our field in the old spelling."""
    default = attrgetter(row.paths[0])(RunConfig())
    text = row.kind.spell(default)
    shown = f", for example {name}={text}" if text and _reads_as(row, text, default) else ""
    return f"write {row.kind.description}{shown}"


def _reads_as(row: Mapped, text: str, value: Any) -> bool:
    try:
        return bool(row.kind.read(text) == value)
    except ValueError:
        return False


def _same(text: str, default: str) -> bool:
    """Whether two spellings are the same value; text that cannot be parsed is not."""
    try:
        return parsed(unquoted(text)) == parsed(default)
    except ValueError:
        return False


def _unknown(name: str, bare: str) -> ConfigError:
    upper = bare.split(".")[0].isupper()
    near = difflib.get_close_matches(bare.upper() if upper else bare, list(_ROWS), n=3)
    ours = nearest(bare.lower(), (field.path for field in walk_fields(RunConfig) if not field.is_section))
    hints = []
    if near:
        hints.append(
            f"the nearest old names are {_and(near)}" if len(near) > 1 else f"the nearest old name is {near[0]}"
        )
    if ours:
        hints.append(f"our nearest field is {ours}")
    return ConfigError(
        f"{_printable(name[:80])} is not a name of TensorPack, AWS Samples or their charts",
        remedy="; ".join(hints) or "`maskfleet config show` lists our fields, docs/reference/legacy-names.md old names",
    )


def _and(names: tuple[str, ...] | list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _typed(name: str, value: str) -> str:
    """What the user wrote, short and safe to print."""
    return _printable(f"{name[:80]}={value if len(value) <= 60 else value[:60] + '…'}")


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)[1:-1]
