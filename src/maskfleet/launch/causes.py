"""Causes of failed or waiting runs, read from a TOML file: causes.toml here, and eks/causes.toml."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Cause:
    """One reason why runs fail or wait."""

    name: str
    meaning: str
    next_step: str
    pattern: re.Pattern[str] = re.compile(r"(?!)")  # matches nothing: a cause that code finds


def read_tables(file: Path) -> dict[str, Any]:
    """The tables of a TOML file by name, in their order."""
    return tomllib.loads(file.read_text(encoding="utf-8"))


def causes_in(tables: Mapping[str, Any]) -> tuple[Cause, ...]:
    """The causes of `tables`, in their order."""
    return tuple(
        Cause(name, row["meaning"], row["next_step"], re.compile("|".join(row["patterns"]), re.MULTILINE))
        for name, row in tables.items()
    )


CAUSES = causes_in(read_tables(Path(__file__).with_name("causes.toml")))
