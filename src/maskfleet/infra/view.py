"""What the flows of this room show, and to whom they talk; the command line draws it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from maskfleet.infra.terraform.events import Event
from maskfleet.infra.terraform.progress import Progress


class View(Protocol):
    """Somebody who watches."""

    def say(self, text: str) -> None:
        """One thing worth knowing."""

    def watching(self, title: str, progress: Progress) -> AbstractContextManager[None]:
        """Terraform runs while this is open."""

    def event(self, event: Event, progress: Progress) -> None:
        """One more event, already taken into `progress`."""

    def tick(self, progress: Progress) -> None:
        """Time passes."""

    def stopping(self, times: int) -> None:
        """The user asked to stop, for the `times`-th time."""

    def confirm(self, question: str) -> bool:
        """Whether the user agrees."""

    def confirm_name(self, question: str, name: str) -> bool:
        """Whether the user typed `name`."""
