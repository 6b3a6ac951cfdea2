"""How this machine reaches hosts without a public address: through the head node, or by Session Manager."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SSM_DOCUMENT = "AWS-StartSSHSession"


@dataclass(frozen=True, slots=True)
class Way:
    """How one instance is reached."""

    instance: str  # its id, by which its key is known: private addresses are used again by other instances
    connect_to: str | None = None  # its public address; None for the private one


@dataclass(frozen=True, slots=True)
class Routes:
    """The ways to the hosts of a cluster, by their private addresses; a host that is not listed is reached directly."""

    ways: Mapping[str, Way] = field(default_factory=dict)
    jump: str | None = None  # private address of the head node, through which hosts without a public one are reached
    session_region: str | None = None  # region of Session Manager, if all hosts are reached by it

    def options(self, host: str) -> dict[str, Any]:
        """Arguments for asyncssh, without the connection to the jump host."""
        way = self.ways.get(host)
        if way is None:
            return {}
        found: dict[str, Any] = {"host_key_alias": way.instance}
        if self.session_region is not None:
            found["proxy_command"] = session_command(way.instance, self.session_region)
        return found

    def target(self, host: str) -> str:
        """Where the connection to `host` leads to."""
        way = self.ways.get(host)
        return way.connect_to if way is not None and way.connect_to is not None else host

    def jump_for(self, host: str) -> str | None:
        """The host through which `host` is reached; None for none."""
        way = self.ways.get(host)
        needs_jump = way is not None and way.connect_to is None and self.session_region is None
        return self.jump if needs_jump and self.jump != host else None


DIRECT = Routes()


def session_command(instance: str, region: str) -> list[str]:
    """The command whose input and output are an SSH connection to `instance`; AWS's command line and plugin run it."""
    argv = ["aws", "ssm", "start-session", "--target", instance, "--document-name", SSM_DOCUMENT]
    return [*argv, "--parameters", "portNumber=22", "--region", region]
