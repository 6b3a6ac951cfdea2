"""Hypothesis strategies for legal values of config fields, read off their types."""

from __future__ import annotations

import types
import typing
from typing import Any

from hypothesis import strategies as st
from pydantic import ValidationError

from maskfleet.config.base import Config, replaced
from maskfleet.config.fields import walk_fields
from maskfleet.config.run import RunConfig

LEAVES = [field.path for field in walk_fields(RunConfig) if not field.is_section and field.path != "recipe"]


def values(path: str) -> st.SearchStrategy[Any]:
    """Values that the field at `path` takes, taken by itself."""
    section: type[Config] = RunConfig
    *parents, leaf = path.split(".")
    for name in parents:
        section = section.model_fields[name].annotation  # type: ignore[assignment]
    info = section.model_fields[leaf]
    return _strategy(info.annotation, info.metadata)


def run_configs() -> st.SearchStrategy[RunConfig]:
    """Whole configurations that differ from the default in up to eight fields."""
    change = st.sampled_from(LEAVES).flatmap(lambda path: st.tuples(st.just(path), values(path)))
    return st.lists(change, max_size=8, unique_by=lambda pair: pair[0]).map(dict).map(_built).filter(bool)  # type: ignore[arg-type]


def _built(changes: dict[str, Any]) -> RunConfig | None:
    try:
        return replaced(RunConfig(), changes)
    except ValidationError:  # fields that are legal alone and not together
        return None


def _strategy(annotation: Any, metadata: typing.Iterable[Any] = ()) -> st.SearchStrategy[Any]:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        extra = [part for item in arguments[1:] for part in getattr(item, "metadata", [item])]
        return _strategy(arguments[0], extra)
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([_strategy(part, metadata) for part in arguments])
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(_strategy(arguments[0]), min_size=1, max_size=4).map(tuple)
    if origin is tuple:
        return st.tuples(*[_strategy(part) for part in arguments])
    if annotation is type(None):
        return st.none()
    if annotation is bool:
        return st.booleans()
    if annotation is str:
        return st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=20)
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return st.builds(annotation, **{name: _strategy(f.annotation) for name, f in annotation.model_fields.items()})
    return _numbers(annotation, metadata)


def _numbers(kind: type, metadata: typing.Iterable[Any]) -> st.SearchStrategy[Any]:
    limits = {
        key: getattr(part, key)
        for part in metadata
        for key in ("gt", "ge", "lt", "le", "multiple_of")
        if hasattr(part, key)
    }
    if kind is int:
        step = limits.get("multiple_of", 1)
        low = limits.get("ge", limits.get("gt", -1) + 1)
        high = limits.get("le", 1_000_000)
        return st.integers(-(-low // step), high // step).map(lambda count: count * step)
    low = limits.get("ge", limits.get("gt", -1e6))
    high = limits.get("le", limits.get("lt", 1e6))
    return st.floats(low, high, exclude_min="gt" in limits, exclude_max="lt" in limits, allow_nan=False)
