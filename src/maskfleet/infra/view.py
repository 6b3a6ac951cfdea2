"""What the infra commands show and ask; the command line implements it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class ResourceProgress:
    """One resource as the live table shows it."""

    address: str
    action: str
    state: str
    started_at: float | None = None
    elapsed_s: float | None = None

    def seconds(self, now: float) -> float | None:
        """How long the tool has worked on it so far, or did in total."""
        if self.elapsed_s is not None or self.started_at is None:
            return self.elapsed_s
        return max(0.0, now - self.started_at)


class InfraProgress(Protocol):
    """What a tool has reported so far."""

    @property
    def read(self) -> int:
        """Resources that were only read."""

    @property
    def completed(self) -> int:
        """Operations that have ended well."""

    @property
    def steps(self) -> int:
        """All operations; 0 if they are not known."""

    def in_state(self, state: str) -> Sequence[ResourceProgress]:
        """The resources that are failed, running, done or planned."""


class ProgressEvent(Protocol):
    """One thing that a tool reports about one resource."""

    @property
    def kind(self) -> str:
        """apply_start, apply_progress, apply_complete, apply_errored, planned_change, or something not shown."""

    @property
    def address(self) -> str:
        """Name of the resource."""

    @property
    def action(self) -> str:
        """create, change, replace, destroy, read."""

    @property
    def elapsed_s(self) -> float | None:
        """How long it has taken."""


class InfraView(Protocol):
    """The user of an infra command."""

    def say(self, text: str) -> None:
        """Show one message."""

    def watching(self, title: str, progress: InfraProgress) -> AbstractContextManager[None]:
        """The tool works while this context is open."""

    def event(self, event: ProgressEvent, progress: InfraProgress) -> None:
        """Show one more event, which `progress` already contains."""

    def tick(self, progress: InfraProgress) -> None:
        """Refresh what depends on the time; called several times per second."""

    def stopping(self, times: int) -> None:
        """The user has asked to stop `times` times."""

    def confirm(self, question: str) -> bool:
        """Whether the user agrees."""

    def confirm_name(self, question: str, name: str) -> bool:
        """Whether the user typed `name`."""
