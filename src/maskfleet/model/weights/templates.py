"""Names of one network rewritten as those of another, by pairs of templates such as `fcn{n}` and `conv{n}`."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping

_FIELD = re.compile(r"{(\w+?)([+-]\d)?}")


def renamed(text: str, templates: Iterable[tuple[str, str]], **fields: str) -> str | None:
    """`text` rewritten by the first pair of templates whose left side matches all of it; None if there is none.

    {n} matches a number, and {n+1} the number after the {n} of the other side; {norm} matches bn or gn.
    """
    for left, right in templates:
        pattern, offsets = _pattern(left)
        match = pattern.fullmatch(text)
        if match is not None:
            return _filled(
                right, {name: int(digits) - offsets[name] for name, digits in match.groupdict().items()}, fields
            )
    return None


def _filled(template: str, numbers: Mapping[str, int], words: Mapping[str, str]) -> str:
    return _FIELD.sub(lambda field: words.get(field[1]) or str(numbers[field[1]] + int(field[2] or 0)), template)


@functools.cache
def _pattern(template: str) -> tuple[re.Pattern[str], dict[str, int]]:
    """A template as a regular expression, and what is added to each of its fields."""
    escaped = template.replace(".", r"\.").replace("{norm}", "[bg]n")
    pattern = _FIELD.sub(r"(?P<\1>\\d+)", escaped)
    return re.compile(pattern), {field[1]: int(field[2] or 0) for field in _FIELD.finditer(template)}
