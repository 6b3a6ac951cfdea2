"""The configuration fields as data: for help, suggestions and the reference page."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from maskfleet.config.base import Config


@dataclass(frozen=True, slots=True)
class ConfigField:
    """One field: its dotted path, help text, accepted values and default."""

    path: str
    help: str
    takes: str
    default: Any
    is_section: bool


def walk_fields(section: type[Config], prefix: str = "") -> Iterator[ConfigField]:
    """Every field under `section`, parents before children, in the order of their definition."""
    for name, info in section.model_fields.items():
        path = f"{prefix}{name}"
        inner = _section_type(info.annotation)
        default = None if info.is_required() else info.get_default(call_default_factory=True, validated_data={})
        yield ConfigField(path, info.description or "", _takes(info), default, inner is not None)
        if inner is not None:
            yield from walk_fields(inner, f"{path}.")


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice most similar to `name`: by its whole path, or else by its last part."""
    choices = list(choices)
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.75)
    if close:
        return close[0]
    by_leaf: dict[str, str] = {}
    for choice in choices:
        by_leaf.setdefault(choice.rsplit(".", 1)[-1], choice)
    leaf = difflib.get_close_matches(name.rsplit(".", 1)[-1], by_leaf, n=1, cutoff=0.6)
    return by_leaf[leaf[0]] if leaf else None


def _section_type(annotation: Any) -> type[Config] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, Config) else None


def _takes(info: FieldInfo) -> str:
    """Type and limits of a field, in words."""
    text = _type_words(info.annotation)
    limits = _limits(info.metadata)
    return f"{text}, {limits}" if limits else text


def _type_words(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        limits = _limits([part for extra in arguments[1:] for part in getattr(extra, "metadata", [extra])])
        return _type_words(arguments[0]) + (f" {limits}" if limits else "")
    if origin is typing.Literal:
        return " | ".join(str(value) for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " | ".join("null" if part is type(None) else _type_words(part) for part in arguments)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"list of {_type_words(arguments[0])}"
        return "[" + ", ".join(_type_words(part) for part in arguments) + "]"
    names = {bool: "true | false", int: "integer", float: "number", str: "text"}
    if annotation in names:
        return names[annotation]
    section = _section_type(annotation)
    if section is None:
        return str(annotation)
    return "{" + ", ".join(section.model_fields) + "}"


def _limits(metadata: Iterable[Any]) -> str:
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most", "multiple_of": "a multiple of"}
    return ", ".join(
        f"{word} {getattr(part, key)}"
        for part in metadata
        for key, word in words.items()
        if getattr(part, key, None) is not None
    )
