"""What a running Terraform has said so far: resources, their state, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from maskfleet.infra.terraform.events import Diagnostic, Event, Summary

WORK = ("create", "change", "replace", "destroy", "import", "forget")
# Said of every plan with -target; ours are computed from the state and checked before they are applied.
EXPECTED_WARNINGS = ("Resource targeting is in effect", "Applied changes may be incomplete")


@dataclass(frozen=True, slots=True)
class Change:
    """What a plan means to do to one resource."""

    address: str
    type: str
    action: str
    reason: str = ""


@dataclass(slots=True)
class Row:
    """One resource as the live table shows it."""

    address: str
    action: str
    state: str
    started_at: float | None = None
    elapsed_s: float | None = None

    def seconds(self, now: float) -> float | None:
        """How long it has been worked on, or was."""
        if self.elapsed_s is not None or self.started_at is None:
            return self.elapsed_s
        return max(0.0, now - self.started_at)


@dataclass(slots=True)
class Progress:
    """Everything that one run of Terraform said."""

    rows: dict[str, Row] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    drift: list[Change] = field(default_factory=list)
    diagnostics: list[Diagnostic] = field(default_factory=list)
    summary: Summary | None = None
    outputs: dict[str, Any] = field(default_factory=dict)
    text: list[str] = field(default_factory=list)
    read: int = 0
    completed: int = 0

    def add(self, event: Event, now: float) -> None:
        """Take in one event that came at `now` seconds of any steady clock."""
        match event.kind:
            case "planned_change":
                self._planned(event)
            case "resource_drift":
                self.drift.append(Change(event.address, event.type, event.action, event.reason))
            case "refresh_start" | "apply_start" if event.action in ("", "read"):
                self.rows[event.address] = Row(event.address, "read", "running", now)
            case "refresh_complete" | "apply_complete" if event.action in ("", "read"):
                self.read += 1
                self.rows.pop(event.address, None)
            case "apply_start":
                self.rows[event.address] = Row(event.address, event.action, "running", now)
            case "apply_progress":
                self._row(event, now).state = "running"
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
    def work(self) -> list[Change]:
        """The planned changes that do something."""
        return [change for change in self.changes if change.action in WORK]

    @property
    def changed_outputs(self) -> list[str]:
        """Outputs that a plan means to change; a plan may change nothing else."""
        return [name for name, one in self.outputs.items() if one.get("action") not in (None, "noop")]

    @property
    def has_changes(self) -> bool:
        return bool(self.work or self.changed_outputs)

    @property
    def steps(self) -> int:
        """Operations of the plan: replacing is destroying and creating."""
        return sum(2 if change.action == "replace" else 1 for change in self.work)

    def running(self) -> list[Row]:
        return [row for row in self.rows.values() if row.state == "running"]

    def failed(self) -> list[Row]:
        return [row for row in self.rows.values() if row.state == "failed"]

    def _planned(self, event: Event) -> None:
        self.changes.append(Change(event.address, event.type, event.action, event.reason))
        if event.action in WORK:
            self.rows.setdefault(event.address, Row(event.address, event.action, "planned"))

    def _row(self, event: Event, now: float) -> Row:
        return self.rows.setdefault(event.address, Row(event.address, event.action, "running", now))

    def _ended(self, event: Event, now: float, state: str) -> None:
        row = self._row(event, now)
        row.elapsed_s = row.seconds(now) if event.elapsed_s is None else event.elapsed_s
        row.state = state
