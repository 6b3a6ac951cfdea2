"""What Terraform prints with `-json`: one event per line, and the progress that the events add up to."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from maskfleet.infra.view import ResourceProgress

# Terraform's actions on a resource that we show under another name.
ACTIONS = {"update": "change", "delete": "destroy", "remove": "forget", "noop": "none"}
WORK = ("create", "change", "replace", "destroy", "import", "forget")
# Printed for every plan with -target; our targets are computed from the state and checked before they are applied.
EXPECTED_WARNINGS = ("Resource targeting is in effect", "Applied changes may be incomplete")


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """An error or a warning from Terraform."""

    severity: str = "error"
    summary: str = ""
    detail: str = ""
    address: str = ""

    @property
    def text(self) -> str:
        return f"{self.summary}\n{self.detail}".strip()


@dataclass(frozen=True, slots=True)
class Event:
    """One line: `kind` is Terraform's message type, or `text` for a line that is not JSON.

    A `planned_change` is what a plan does to one resource, a `resource_drift` what was changed outside of Terraform.
    """

    kind: str
    message: str = ""
    address: str = ""
    type: str = ""
    action: str = ""
    reason: str = ""
    elapsed_s: float | None = None
    diagnostic: Diagnostic | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    """How many resources a plan or an apply handles: `add`, `change` and `remove`."""
    outputs: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class TerraformProgress:
    """Everything that one run of Terraform has reported."""

    rows: dict[str, ResourceProgress] = field(default_factory=dict)
    changes: list[Event] = field(default_factory=list)
    drift: list[Event] = field(default_factory=list)
    diagnostics: list[Diagnostic] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    text: list[str] = field(default_factory=list)
    read: int = 0
    completed: int = 0

    def add(self, event: Event, now: float) -> None:
        """Add one event, which arrived at `now` seconds of a monotonic clock."""
        match event.kind:
            case "planned_change":
                self.changes.append(event)
                if event.action in WORK:
                    self.rows.setdefault(event.address, ResourceProgress(event.address, event.action, "planned"))
            case "resource_drift":
                self.drift.append(event)
            case "refresh_start" | "apply_start":
                self.rows[event.address] = ResourceProgress(event.address, event.action or "read", "running", now)
            case "refresh_complete" | "apply_complete" if event.action in ("", "read"):
                self.read += 1
                self.rows.pop(event.address, None)
            case "apply_complete":
                self.completed += 1
                self._ended(event, now, "done")
            case "apply_errored":
                self._ended(event, now, "failed")
            case "outputs":
                self.outputs = event.outputs
            case "change_summary":
                self.summary = event.summary
            case "diagnostic" if event.diagnostic is not None:
                if event.diagnostic.summary not in EXPECTED_WARNINGS:
                    self.diagnostics.append(event.diagnostic)
            case "text":
                self.text.append(event.message)

    @property
    def errors(self) -> list[Diagnostic]:
        return [diagnostic for diagnostic in self.diagnostics if diagnostic.severity == "error"]

    @property
    def warnings(self) -> list[Diagnostic]:
        return [diagnostic for diagnostic in self.diagnostics if diagnostic.severity == "warning"]

    @property
    def work(self) -> list[Event]:
        """The planned changes that do something."""
        return [change for change in self.changes if change.action in WORK]

    @property
    def changed_outputs(self) -> list[str]:
        """Outputs that a plan changes; it may change nothing else."""
        return [name for name, one in self.outputs.items() if one.get("action") not in (None, "noop")]

    @property
    def has_changes(self) -> bool:
        return bool(self.work or self.changed_outputs)

    @property
    def steps(self) -> int:
        """Number of operations of the plan: a replacement is two, destroy and create."""
        return sum(2 if change.action == "replace" else 1 for change in self.work)

    def in_state(self, state: str) -> list[ResourceProgress]:
        return [row for row in self.rows.values() if row.state == state]

    def _ended(self, event: Event, now: float, state: str) -> None:
        row = self.rows.setdefault(event.address, ResourceProgress(event.address, event.action, "running", now))
        row.elapsed_s = row.seconds(now) if event.elapsed_s is None else event.elapsed_s
        row.state = state


def parse_event(line: str) -> Event:
    """The event of one line; a line that is not Terraform's JSON becomes a text event."""
    try:
        data = json.loads(line)
    except ValueError:
        return Event("text", line.rstrip())
    if not isinstance(data, dict) or not isinstance(data.get("type"), str):
        return Event("text", line.rstrip())
    change = _mapping(data.get("change")) or _mapping(data.get("hook"))
    resource = _mapping(change.get("resource"))
    action = str(change.get("action", ""))
    names = ("severity", "summary", "detail", "address")
    diagnostic = {name: text for name, text in _mapping(data.get("diagnostic")).items() if name in names}
    return Event(
        kind=data["type"],
        message=str(data.get("@message", "")),
        address=str(resource.get("addr", "")),
        type=str(resource.get("resource_type", "")),
        action=ACTIONS.get(action, action),
        reason=str(change.get("reason", "")),
        elapsed_s=change.get("elapsed_seconds"),
        diagnostic=Diagnostic(**diagnostic) if diagnostic else None,
        summary=_mapping(data.get("changes")),
        outputs=_mapping(data.get("outputs")),
    )


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
