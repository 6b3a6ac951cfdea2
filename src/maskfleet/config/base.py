"""Config: the base class of everything that users configure."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

C = TypeVar("C", bound="Config")


class Config(BaseModel):
    """A frozen, typed section; unknown keys are errors, and the docstring under a field is its help text."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )


def replaced(config: C, changes: dict[str, Any]) -> C:
    """`config` with dotted `changes` applied and validated again, unlike with `model_copy`."""
    data = config.model_dump(mode="python")
    for path, value in changes.items():
        *parents, leaf = path.split(".")
        node = data
        for name in parents:
            node = node[name]
        node[leaf] = value
    return type(config).model_validate(data)
