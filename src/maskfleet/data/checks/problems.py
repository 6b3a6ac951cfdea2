"""The problems of a data set, their summary, and whether training may start."""

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
    """One problem. An error makes its image unusable for training; a warning says how training handles it."""

    kind: str  # such as "image-missing"; a key of checks.annotations.KINDS
    severity: Severity
    image_id: int | None  # None: a problem of the whole split
    annotation_id: int | None
    path: Path | None
    what: str
    remedy: str


def bad_images(problems: Iterable[Problem]) -> set[int]:
    """Ids of the images that `data.on_bad: skip` leaves out: those with an error."""
    return {problem.image_id for problem in problems if problem.severity == "error" and problem.image_id is not None}


def raise_for(problems: Sequence[Problem], on_bad: Literal["error", "skip"]) -> None:
    """Raise one DataError that lists every error; with `skip`, only errors of the whole split count."""
    errors = [problem for problem in problems if problem.severity == "error"]
    if on_bad == "skip":
        errors = [problem for problem in errors if problem.image_id is None]
    if not errors:
        return
    remedies = list(dict.fromkeys(problem.remedy for problem in errors))
    remedy = "; ".join(remedies[:3])
    if on_bad == "error" and any(problem.image_id is not None for problem in errors):
        remedy += "; or skip those images with data.on_bad=skip"
    raise DataError(summarise(errors), remedy=remedy)


def summarise(problems: Sequence[Problem], *, limit: int = 5) -> str:
    """Counts by kind, errors first, with at most `limit` examples of each."""
    if not problems:
        return "no problems found"
    counts = Counter((problem.severity, problem.kind) for problem in problems)
    num_errors = sum(count for (severity, _), count in counts.items() if severity == "error")
    lines = [f"{_number(num_errors, 'error')} and {_number(len(problems) - num_errors, 'warning')} in the data"]
    for (severity, kind), count in sorted(counts.items(), key=lambda item: (item[0][0], -item[1], item[0][1])):
        lines.append(f"{severity}: {kind}, {count} found")
        of_kind = [problem for problem in problems if (problem.severity, problem.kind) == (severity, kind)]
        lines += [f"    {_location(problem)}{problem.what}" for problem in of_kind[:limit]]
        if count > limit:
            lines.append(f"    and {count - limit} more")
    return "\n".join(lines)


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _location(problem: Problem) -> str:
    parts = []
    if problem.image_id is not None:
        parts.append(f"image {problem.image_id}")
    if problem.annotation_id is not None:
        parts.append(f"annotation {problem.annotation_id}")
    return f"{', '.join(parts)}: " if parts else ""
