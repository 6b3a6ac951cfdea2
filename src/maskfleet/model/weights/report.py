"""Report about every entry of a weights file and every tensor of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from maskfleet.model.weights.shapes import Shape


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Where each tensor went; names are ours, but for `unexpected` and `ignored`, which are the file's."""

    file: str
    kind: str  # in words: "TensorPack npz", ...
    matched: tuple[str, ...]
    missing: tuple[str, ...] = ()  # in the model but not in the file
    unexpected: tuple[str, ...] = ()  # in the file, of unknown use
    ignored: Mapping[str, str] = field(default_factory=dict)  # in the file, and left out for this reason
    other_shape: Mapping[str, tuple[Shape, Shape]] = field(default_factory=dict)  # (in the file, in the model)
    converted: Mapping[str, str] = field(default_factory=dict)  # matched, but stored as this type instead of float32
    notes: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every tensor of the model was filled from the file."""
        return not self.missing and not self.other_shape

    def render(self, *, limit: int = 8) -> str:
        """The report as text, at most `limit` names per section; the counts are complete."""
        lines = [f"{self.file} ({self.kind})"]
        lines += _section("matched", [], len(self.matched), limit)
        lines += _section("missing", list(self.missing), len(self.missing), limit)
        shapes = [
            f"{name}: {_dims(theirs)} in the file, {_dims(ours)} in the model"
            for name, (theirs, ours) in self.other_shape.items()
        ]
        lines += _section("other shape", shapes, len(shapes), limit)
        lines += _section("unexpected", list(self.unexpected), len(self.unexpected), limit)
        lines += _section("ignored", _by_reason(self.ignored), len(self.ignored), limit)
        if self.converted:
            lines += _section("made float32", _by_reason(self.converted), len(self.converted), limit)
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def _section(title: str, entries: list[str], count: int, limit: int) -> list[str]:
    lines = [f"  {title:<14}{count:>5}"]
    lines += [f"      {entry}" for entry in entries[:limit]]
    if len(entries) > limit:
        lines.append(f"      … and {len(entries) - limit} more")
    return lines


def _by_reason(entries: Mapping[str, str]) -> list[str]:
    """One line per reason: how many, an example, and why."""
    groups: dict[str, list[str]] = {}
    for name, reason in entries.items():
        groups.setdefault(reason, []).append(name)
    return [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {reason}"
        for reason, names in groups.items()
    ]


def _dims(shape: Shape) -> str:
    return "×".join(str(size) for size in shape) or "a single number"
