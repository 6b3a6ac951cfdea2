"""Causes of failed or waiting runs, read from a TOML file: causes.toml here, and eks/causes.toml."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class LinePatterns:
    """Regular expressions that match within one line, searched in time linear in the text.

    A line such as "error: image image …" makes the engine of `re` try every way to divide it between the parts of
    `error: .*image.*missing`, in quadratic time. The first match of a part leaves most of the line to the next one, so
    searching the parts between the `.*` one after the other finds the same lines.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = [
            [re.compile(part, re.MULTILINE) for part in pattern.split(".*") if part] for pattern in patterns
        ]

    def search(self, text: str) -> tuple[int, int] | None:
        """(start, end) of the first match of any pattern."""
        return min((span for parts in self._patterns if (span := _span(parts, text)) is not None), default=None)


def _span(parts: Sequence[re.Pattern[str]], text: str) -> tuple[int, int] | None:
    position = 0
    while position <= len(text):
        first = parts[0].search(text, position)
        if first is None:
            return None
        newline = text.find("\n", first.end())
        line_end = newline if newline >= 0 else len(text)
        match: re.Match[str] | None = first
        for part in parts[1:]:
            assert match is not None
            match = part.search(text, match.end(), line_end)
            if match is None:
                break
        if match is not None:
            return first.start(), match.end()
        position = line_end + 1  # no later match of the first part in this line leaves more to the others
    return None


NO_PATTERN = LinePatterns(())


@dataclass(frozen=True, slots=True)
class Cause:
    """One reason why runs fail or wait."""

    name: str
    meaning: str
    next_step: str
    pattern: LinePatterns = NO_PATTERN  # for a cause that code finds


def read_tables(file: Path) -> dict[str, Any]:
    """The tables of a TOML file by name, in their order."""
    return tomllib.loads(file.read_text(encoding="utf-8"))


def causes_in(tables: Mapping[str, Any]) -> tuple[Cause, ...]:
    """The causes of `tables`, in their order."""
    return tuple(
        Cause(name, row["meaning"], row["next_step"], LinePatterns(row["patterns"])) for name, row in tables.items()
    )


CAUSES = causes_in(read_tables(Path(__file__).with_name("causes.toml")))
