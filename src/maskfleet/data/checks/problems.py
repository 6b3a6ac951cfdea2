"""What is wrong with a set: one record a fault, and what follows from all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from maskfleet.errors import DataError

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a set. An error makes its image unfit for training; a warning says what is done about it."""

    kind: str  # such as "image-missing"; one of checks.KINDS
    severity: Severity
    image_id: int | None  # None: the fault of the whole set
    annotation_id: int | None
    path: Path | None
    what: str
    remedy: str


def bad_images(problems: Iterable[Problem]) -> set[int]:
    """Ids of the images to leave out under `data.on_bad: skip`: those with an error of their own."""
    return {problem.image_id for problem in problems if problem.severity == "error" and problem.image_id is not None}


def raise_for(problems: Sequence[Problem], on_bad: Literal["error", "skip"]) -> None:
    """Raise one DataError that lists every error, unless those are of single images and to be skipped."""
    errors = [problem for problem in problems if problem.severity == "error"]
    if on_bad == "skip":
        errors = [problem for problem in errors if problem.image_id is None]
    if not errors:
        return
    remedies = list(dict.fromkeys(problem.remedy for problem in errors))
    remedy = "; ".join(remedies[:3])
    if on_bad == "error" and any(problem.image_id is not None for problem in errors):
        remedy += "; or leave those images out with data.on_bad=skip"
    raise DataError(summarise(errors), remedy=remedy)


def summarise(problems: Sequence[Problem], *, limit: int = 5) -> str:
    """Counts by kind, errors first, with at most `limit` examples of each."""
    if not problems:
        return "no problems found"
    counts = Counter((problem.severity, problem.kind) for problem in problems)
    num_errors = sum(count for (severity, _), count in counts.items() if severity == "error")
    lines = [f"{_number(num_errors, 'error')} and {_number(len(problems) - num_errors, 'warning')} in the data"]
    for (severity, kind), count in sorted(counts.items(), key=lambda item: (item[0][0], -item[1], item[0][1])):
        lines.append(f"{severity}: {kind}, {count} of them")
        of_kind = [problem for problem in problems if (problem.severity, problem.kind) == (severity, kind)]
        lines += [f"    {_place(problem)}{problem.what}" for problem in of_kind[:limit]]
        if count > limit:
            lines.append(f"    and {count - limit} more")
    return "\n".join(lines)


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _place(problem: Problem) -> str:
    parts = []
    if problem.image_id is not None:
        parts.append(f"image {problem.image_id}")
    if problem.annotation_id is not None:
        parts.append(f"annotation {problem.annotation_id}")
    return f"{', '.join(parts)}: " if parts else ""
