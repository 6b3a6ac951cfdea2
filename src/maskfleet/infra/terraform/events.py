"""Terraform's machine-readable lines (`-json`), one event each."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

# Terraform's words for what it does to a resource -> ours.
ACTIONS = {
    "create": "create",
    "update": "change",
    "replace": "replace",
    "delete": "destroy",
    "remove": "forget",
    "forget": "forget",
    "import": "import",
    "move": "move",
    "read": "read",
    "noop": "none",
}


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """An error or a warning of Terraform."""

    severity: str
    summary: str
    detail: str = ""
    address: str = ""

    @property
    def text(self) -> str:
        return f"{self.summary}\n{self.detail}".strip()


@dataclass(frozen=True, slots=True)
class Summary:
    """How many resources a plan or an apply adds, changes and destroys."""

    operation: str
    add: int
    change: int
    remove: int


@dataclass(frozen=True, slots=True)
class Event:
    """One line: `kind` is Terraform's type of message, or `text` for a line that is no JSON."""

    kind: str
    message: str
    address: str = ""
    type: str = ""
    action: str = ""
    reason: str = ""
    elapsed_s: float | None = None
    diagnostic: Diagnostic | None = None
    summary: Summary | None = None
    outputs: dict[str, Any] = field(default_factory=dict)


def parse_event(line: str) -> Event:
    """The event of one line; whatever is not Terraform's own JSON is kept as text."""
    try:
        data = json.loads(line)
    except ValueError:
        return Event("text", line.rstrip())
    if not isinstance(data, dict) or not isinstance(data.get("type"), str):
        return Event("text", line.rstrip())
    change = _mapping(data.get("change")) or _mapping(data.get("hook"))
    resource = _mapping(change.get("resource"))
    return Event(
        kind=data["type"],
        message=str(data.get("@message", "")),
        address=str(resource.get("addr", "")),
        type=str(resource.get("resource_type", "")),
        action=ACTIONS.get(str(change.get("action", "")), str(change.get("action", ""))),
        reason=str(change.get("reason", "")),
        elapsed_s=_number(change.get("elapsed_seconds")),
        diagnostic=_diagnostic(_mapping(data.get("diagnostic"))),
        summary=_summary(_mapping(data.get("changes"))),
        outputs=_mapping(data.get("outputs")),
    )


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _diagnostic(data: dict[str, Any]) -> Diagnostic | None:
    if not data:
        return None
    return Diagnostic(
        severity=str(data.get("severity", "error")),
        summary=str(data.get("summary", "")),
        detail=str(data.get("detail", "")),
        address=str(data.get("address", "")),
    )


def _summary(data: dict[str, Any]) -> Summary | None:
    if not data:
        return None
    counts = [int(_number(data.get(name)) or 0) for name in ("add", "change", "remove")]
    return Summary(str(data.get("operation", "")), *counts)
