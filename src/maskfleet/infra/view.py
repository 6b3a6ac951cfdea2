"""What the infra commands show and ask; the command line implements it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from maskfleet.infra.terraform.progress import Event, TerraformProgress


class InfraView(Protocol):
    """The user of an infra command."""

    def say(self, text: str) -> None:
        """Show one message."""

    def watching(self, title: str, progress: TerraformProgress) -> AbstractContextManager[None]:
        """Terraform runs while this context is open."""

    def event(self, event: Event, progress: TerraformProgress) -> None:
        """Show one more event, which `progress` already contains."""

    def tick(self, progress: TerraformProgress) -> None:
        """Refresh what depends on the time; called several times per second."""

    def stopping(self, times: int) -> None:
        """The user has asked to stop `times` times."""

    def confirm(self, question: str) -> bool:
        """Whether the user agrees."""

    def confirm_name(self, question: str, name: str) -> bool:
        """Whether the user typed `name`."""
