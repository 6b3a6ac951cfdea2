"""A job: its spec, what a backend sends for it, its handle and its status."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import quote

from maskfleet.config.load import dump
from maskfleet.config.run import RunConfig
from maskfleet.errors import LaunchError


@dataclass(frozen=True, slots=True)
class NameRule:
    """What a job may be called."""

    longest: int = 63
    pattern: re.Pattern[str] = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class JobSpec:
    """One run on one or more nodes, with one rank per slot."""

    name: str
    run_yaml: str
    slots: tuple[int, ...]  # ranks on each node
    min_nodes: int
    max_restarts: int

    @property
    def nodes(self) -> int:
        return len(self.slots)

    @property
    def ranks(self) -> int:
        return sum(self.slots)


@dataclass(frozen=True, slots=True)
class Rendered:
    """What a backend would send: files by name, and the commands or requests in order."""

    name: str
    files: Mapping[str, str]
    commands: tuple[tuple[str, ...], ...]
    blobs: Mapping[str, bytes] = field(default_factory=dict)  # binary files

    def text(self) -> str:
        """The output of --dry-run: every byte of the files, and each command as a JSON list."""
        parts = [f"# file {json.dumps(name)}\n{content}" for name, content in self.files.items()]
        for name, blob in self.blobs.items():
            parts.append(f"# file {json.dumps(name)}\n# {len(blob)} bytes, sha256 {hashlib.sha256(blob).hexdigest()}\n")
        parts += [f"# command\n{json.dumps(list(command), ensure_ascii=False)}\n" for command in self.commands]
        return "\n".join(parts)


@dataclass(frozen=True, slots=True)
class JobHandle:
    """Identifies a job without any local state: `local:///runs/a`, `ssh://host1,host2/fleet/runs/a`."""

    on: str
    location: str  # hosts, region or namespace; empty for this machine
    path: str  # folder or name there

    def __str__(self) -> str:
        return f"{self.on}://{quote(self.location, safe='@,:[]=')}/{quote(self.path.removeprefix('/'), safe='/')}"


class JobState(StrEnum):
    """The state of a job."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"  # it was running, and no part of it responds any more
    UNKNOWN = "unknown"  # there is no job of this name

    @property
    def is_final(self) -> bool:
        return self not in (JobState.PENDING, JobState.RUNNING)


@dataclass(frozen=True, slots=True)
class HostStatus:
    """One machine of a job."""

    address: str
    state: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LostTime:
    """What interrupted a job, and what it cost."""

    what: str  # such as "host node2 lost"
    at_step: int | None  # last step before it
    resumed_from: int  # step of the checkpoint, 0 for the beginning
    lost_s: float  # from the last step before to the first one after

    def __str__(self) -> str:
        at = f" at step {self.at_step}" if self.at_step is not None else ""
        return f"{self.what}{at}, resumed from {self.resumed_from} after {self.lost_s:.0f} s"


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The status of a job at one moment."""

    state: JobState
    detail: str = ""
    step: int | None = None
    exit_code: int | None = None
    restarts: int = 0
    hosts: tuple[HostStatus, ...] = ()
    events: tuple[str, ...] = field(default=())
    step_age_s: float | None = None  # since that step; None if nobody alive knows
    min_nodes: int | None = None  # fewest hosts with which the job continues
    failures: tuple[LostTime, ...] = ()
    persist: str = ""  # what continues the job after a reboot of its hosts

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> JobStatus:
        """The status that `as_json` gave; fields of a newer version are ignored."""
        own = _known_fields(cls, data)
        hosts = tuple(HostStatus(**_known_fields(HostStatus, host)) for host in data["hosts"])
        failures = tuple(LostTime(**_known_fields(LostTime, one)) for one in data.get("failures", ()))
        read = {"state": JobState(data["state"]), "hosts": hosts, "events": tuple(data["events"]), "failures": failures}
        return cls(**{**own, **read})


def _known_fields(kind: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: data[field.name] for field in dataclasses.fields(kind) if field.name in data}


def job_for(
    run: RunConfig,
    *,
    slots: tuple[int, ...],
    name: str | None = None,
    min_nodes: int | None = None,
    max_restarts: int = 0,
    rule: NameRule = NameRule(),  # noqa: B008 - it is frozen
) -> JobSpec:
    """The job for `run` on machines with `slots` ranks each; without a name it gets one derived from the run."""
    text = dump(run)
    if name is None:
        name = f"run-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    if not rule.pattern.fullmatch(name) or len(name) > rule.longest:
        raise LaunchError(
            f"{name!r} cannot name a job",
            remedy=f"use up to {rule.longest} lower-case letters, digits and dashes, a letter first, "
            "such as --name r50-1x",
        )
    minimum = min_nodes or len(slots)
    if minimum > len(slots):
        raise LaunchError(
            f"the run needs at least {minimum} hosts, but it has only {len(slots)}",
            remedy="lower --min-nodes or name more hosts",
        )
    return JobSpec(name, text, slots, minimum, max_restarts)
