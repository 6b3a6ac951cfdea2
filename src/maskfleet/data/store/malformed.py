"""Entries of an annotation file that lack a key or have a value of the wrong type, all of them at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

MAX_LISTED = 100
MAX_VALUE_CHARACTERS = 40

# list of the file: {key: type}
KEYS: dict[str, dict[str, str]] = {
    "images": {"id": "an integer", "file_name": "a string", "width": "an integer", "height": "an integer"},
    "annotations": {"id": "an integer", "image_id": "an integer", "category_id": "an integer"},
    "categories": {"id": "an integer", "name": "a string"},
}


def integer(value: Any) -> int | None:
    """`value` as an int that fits int64, else None. Some tools write floats: 3.0 is accepted."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63:
        return value
    return None


def malformed_entries(tree: dict[str, list[Any]], stored: dict[str, object]) -> str:
    """A line for each malformed entry of the three lists, with key and value; empty if there are none.

    `stored` has, for each list, the object that replaces its valid entries. After MAX_LISTED lines the rest is counted.
    """
    lines = [line for name in KEYS for line in _lines(name, tree[name], stored)]
    more = f"\n    and {len(lines) - MAX_LISTED} more" if len(lines) > MAX_LISTED else ""
    return "".join(f"\n    {line}" for line in lines[:MAX_LISTED]) + more


def _lines(name: str, entries: list[Any], stored: dict[str, object]) -> Iterator[str]:
    own = stored.get(name)
    kinds = {id(marker): of_list for of_list, marker in stored.items()}
    for index, entry in enumerate(entries):
        if own is not None and entry is own:
            continue
        where = f"entry {index} of {name!r}"
        if id(entry) in kinds:
            yield f"{where} belongs in {kinds[id(entry)]!r}"
        elif not isinstance(entry, dict):
            yield f"{where} is {_text(entry)}, not an object"
        else:
            of = f" (id {_text(entry['id'])})" if integer(entry.get("id")) is not None else ""
            for fault in _faults(KEYS[name], entry):
                yield f"{where}{of} {fault}"


def _faults(keys: dict[str, str], entry: dict[str, Any]) -> Iterator[str]:
    for key, kind in keys.items():
        if key not in entry:
            yield f"has no key {key!r}"
        elif not (isinstance(entry[key], str) if kind == "a string" else integer(entry[key]) is not None):
            yield f"has {key!r}: {_text(entry[key])}, not {kind}"


def _text(value: Any) -> str:
    try:
        text = json.dumps(value, default=lambda _: "…", ensure_ascii=False)
    except RecursionError:
        return "a deeply nested value"
    text = text.encode("utf-8", "backslashreplace").decode()  # half of a surrogate pair cannot be printed
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[:MAX_VALUE_CHARACTERS]}…"
