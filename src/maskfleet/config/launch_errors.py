"""Error messages for an invalid launch section."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from maskfleet.config.fields import nearest
from maskfleet.config.launch import LAUNCH_CLASSES


def launch_problems(error: ValidationError) -> list[str]:
    """One line per problem in `error`."""
    return [_problem(one) for one in error.errors(include_url=False)]


def _problem(one: Any) -> str:
    place, *path = map(str, one["loc"] or ("",))
    field = ".".join(path)
    match one["type"]:
        case "extra_forbidden":
            near = nearest(field, LAUNCH_CLASSES[place].model_fields if place in LAUNCH_CLASSES else ())
            return f"{field} is no field of {place}{f'; did you mean {near}?' if near else ''}"
        case "union_tag_invalid":
            return f"there is no place {one['ctx']['tag']!r}: it is {', '.join(LAUNCH_CLASSES)}"
        case "value_error":
            return str(one["msg"]).removeprefix("Value error, ")
        case _:
            message = str(one["msg"]).replace("Input should", "it should").replace("String should", "it should")
            return f"{field or 'launch'} = {one['input']!r}: {message}"
