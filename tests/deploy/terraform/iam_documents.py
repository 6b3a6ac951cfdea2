"""Reads IAM documents: their statements, and whether one allows a request. Understands only what our documents use."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

Statement = dict[str, Any]


def statements(document: str) -> list[Statement]:
    parsed = json.loads(document)
    assert parsed["Version"] == "2012-10-17"
    listed = parsed["Statement"]
    assert isinstance(listed, list)
    return listed


def listed(value: Any) -> list[str]:
    return value if isinstance(value, list) else [value]


def allowed(document: str, action: str, resource: str, context: Mapping[str, str]) -> bool:
    """Whether a statement allows the request and none denies it."""
    effects = {one["Effect"] for one in statements(document) if _applies(one, action, resource, context)}
    return effects == {"Allow"}


def _applies(statement: Statement, action: str, resource: str, context: Mapping[str, str]) -> bool:
    actions = any(fnmatchcase(action.lower(), one.lower()) for one in listed(statement["Action"]))
    resources = any(fnmatchcase(resource, one) for one in listed(statement.get("Resource", "*")))
    return actions and resources and all(_holds(*one, context) for one in conditions(statement))


def conditions(statement: Statement) -> Iterator[tuple[str, str, list[str]]]:
    """(test, key, values) of a statement."""
    for test, keys in statement.get("Condition", {}).items():
        for key, values in keys.items():
            yield test, key, listed(values)


def _holds(test: str, key: str, values: list[str], context: Mapping[str, str]) -> bool:
    given = context.get(key)
    match test:
        case "StringEquals" | "ArnEquals" | "Bool":
            return given in values
        case "StringLike":
            return given is not None and any(fnmatchcase(given, one) for one in values)
        case "StringEqualsIfExists":
            return given is None or given in values
        case "ForAllValues:StringEquals":
            return given is None or set(given.split(",")) <= set(values)
    raise AssertionError(f"{test} is not understood")
