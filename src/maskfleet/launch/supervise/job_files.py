"""The files through which the supervisors of a job, and commands that ask about it, communicate.

RUN_DIR/launch/job.json         what to run and where; written once, and when a new host takes the place of a lost one
RUN_DIR/launch/endpoint.json    generation number, its leader, the hosts that take part, where their ranks meet
RUN_DIR/launch/outcome.json     how the run ended; the first host that knows writes it, once
RUN_DIR/launch/cancel           a stop request
RUN_DIR/launch/host-0/          of the first host: heartbeat (beat.json), events.jsonl, output.log, the ranks' logs, and
                                persist.json if the run continues after a reboot

All hosts share one run directory, which a run needs for its checkpoints anyway. It also decides which hosts continue
when the network is partitioned: a host that cannot write here counts as lost.

A file that is damaged, cut short by a power failure or holds values of the wrong type, counts as absent; fields that
this version does not know are ignored. A file that cannot be read for a while (EIO, ESTALE, EACCES) keeps its last
known content.
"""

from __future__ import annotations

import functools
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from pydantic import TypeAdapter

from maskfleet.errors import LaunchError
from maskfleet.launch.job import LostTime
from maskfleet.system.files import write_atomically, write_once

LAUNCH = "launch"
JOIN_S = 600.0
REPLACE_S = 3600.0  # where lost hosts are replaced by new ones, which AWS may take long to provide
T = TypeVar("T")
_HOST = re.compile(r"host-(\d{1,4})")
_CHECKPOINT = re.compile(r"step-(\d+)\.json")


@dataclass(frozen=True, slots=True)
class Host:
    """A machine of a job and the ranks it runs."""

    address: str
    slots: int


@dataclass(frozen=True, slots=True)
class Scheduler:
    """What starts the supervisors, and others in place of lost ones, where SSH does not: a Job of Kubernetes."""

    uid: str
    wait_s: int  # how long the hosts wait for enough others


@dataclass(frozen=True, slots=True)
class Job:
    """The job that the supervisors run: the content of job.json."""

    name: str
    starter: str  # supervisor or mpirun
    hosts: tuple[Host, ...]
    min_nodes: int
    max_restarts: int
    port: int  # of rank 0; 0 takes a free one
    cwd: str  # a leading ~ is the home directory
    env: Mapping[str, str] = field(default_factory=dict)
    hosts_command: str = ""  # program that prints the hosts there are now; a new one takes the place of a lost one
    scheduler: Scheduler | None = None

    @property
    def join_s(self) -> float:
        """How long the remaining hosts wait for enough others."""
        if self.scheduler is not None:
            return self.scheduler.wait_s
        return REPLACE_S if self.hosts_command else JOIN_S

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The content of beat.json: a supervisor writes it every few seconds."""

    count: int
    pid: int
    state: str  # starting, running, waiting; done, failed, cancelled, left in the last one
    generation: int
    restarts: int
    time: float
    address: str  # as the other hosts reach it
    lost: list[int]  # hosts that this one considers lost
    silent_s: dict[int, float] = field(default_factory=dict)  # since it last heard each other host
    step: int | None = None  # last step in metrics.jsonl
    step_age_s: float | None = None  # since that step appeared
    machine: str = ""  # system.machine.machine_id of the supervisor
    uptime_s: float = 0.0  # boot clock there when this was written
    started: int = 0  # start of the process there, in ticks since boot

    @property
    def is_last(self) -> bool:
        """Whether the supervisor has ended and said so."""
        return self.is_outcome or self.state == "left"

    @property
    def is_outcome(self) -> bool:
        """Whether the supervisor took part until the run was over."""
        return self.state in ("done", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The leader of a generation, the hosts that take part in it, and where their ranks meet."""

    generation: int
    host: int
    address: str  # for the other hosts; the launching machine may use another one
    port: int = 0  # of rank 0; unused if all ranks share a host
    members: list[int] = field(default_factory=list)  # hosts in the order of their ranks; empty until the leader chose


@dataclass(frozen=True, slots=True)
class Outcome:
    """The content of outcome.json."""

    state: Literal["done", "failed", "cancelled"]
    exit_code: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class JobEvent:
    """A line of events.jsonl."""

    time: str
    what: str
    failure: LostTime | None = None  # in the event that says how long a failure took


@dataclass(frozen=True, slots=True)
class Persisted:
    """The content of persist.json: what continues a host of the run after a reboot."""

    kind: Literal["systemd", "cron"]
    note: str = ""  # what the user should know about it

    def __str__(self) -> str:
        what = {"systemd": "a systemd user unit", "cron": "an @reboot line of the crontab"}[self.kind]
        return f"{what} ({self.note})" if self.note else what


@dataclass(frozen=True, slots=True)
class _Record:
    """What is read of a line of metrics.jsonl."""

    step: int


_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)


def parsed(kind: type[T], data: bytes) -> T | None:
    """The JSON in `data` as a `kind`; None if it is damaged."""
    try:
        return cast(T, _adapter(kind).validate_json(data))
    except ValueError:
        return None


class JobFolder:
    """RUN_DIR/launch; files are written atomically."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.path = run_dir / LAUNCH
        self._known: dict[Path, Any] = {}

    def host(self, index: int) -> Path:
        return self.path / f"host-{index}"

    def exists(self) -> bool:
        """Whether a job was ever launched here, even if its files are damaged."""
        try:
            return (self.path / "job.json").exists()
        except OSError as error:
            raise LaunchError(
                f"{self.run_dir} cannot be read: {error.strerror}",
                remedy="ask as the user who launched the run, and check the file system",
            ) from error

    def job(self) -> Job:
        """What to run; a folder without a job is an error."""
        job = self.known_job()
        if job is None:
            why = "its job.json is damaged" if self.exists() else "there is none"
            raise LaunchError(
                f"{self.run_dir} does not say what job to run: {why}",
                remedy="check the handle, which `maskfleet launch` prints, or launch the run again",
            )
        return job

    def known_job(self) -> Job | None:
        """What to run; None if there is no job, or job.json is damaged."""
        job = self.read(self.path / "job.json", Job)
        return job if job is not None and job.hosts else None

    def write_job(self, job: Job) -> None:
        write_atomically(self.path / "job.json", job.to_json())

    def host_names(self) -> list[str]:
        """Names for the hosts that have a folder here: all that is known of them without job.json."""
        found = [int(match[1]) for path in _listed(self.path, "host-*") if (match := _HOST.fullmatch(path.name))]
        return [f"host-{index}" for index in range(max(found, default=-1) + 1)]

    def heartbeat(self, index: int) -> Heartbeat | None:
        return self.read(self.host(index) / "beat.json", Heartbeat)

    def write_heartbeat(self, index: int, heartbeat: Heartbeat) -> None:
        # Not synced: a busy disk may take longer to sync than the other hosts wait for a heartbeat.
        write_atomically(self.host(index) / "beat.json", json.dumps(asdict(heartbeat)), durable=False)

    def outcome(self) -> Outcome | None:
        """How the run ended; None before that."""
        return self.read(self.path / "outcome.json", Outcome)

    def is_over(self) -> bool:
        """Whether the run has ended, or was asked to."""
        return self.cancel_requested() or self.outcome() is not None

    def write_outcome(self, state: str, exit_code: int, why: str = "") -> None:
        """Write how the run ended, unless another host has done so."""
        text = json.dumps({"state": state, "exit_code": exit_code, "why": why, "time": time.time()})
        path = self.path / "outcome.json"
        if not write_once(path, text) and self.outcome() is None:
            write_atomically(path, text)  # in place of a damaged one

    def endpoint(self) -> Endpoint | None:
        return self.read(self.path / "endpoint.json", Endpoint)

    def write_endpoint(self, endpoint: Endpoint) -> None:
        write_atomically(self.path / "endpoint.json", json.dumps(asdict(endpoint)))

    def cancel_requested(self) -> bool:
        try:
            return (self.path / "cancel").exists()
        except OSError:
            return False  # nobody knows now; it is read again

    def request_cancel(self) -> None:
        write_atomically(self.path / "cancel", "")

    def events(self) -> list[JobEvent]:
        """What happened to the job, oldest first."""
        found = [
            event
            for file in _listed(self.path, "host-*/events.jsonl")
            for line in _bytes_of(file).splitlines()  # the last one may be incomplete: it is still being written
            if (event := parsed(JobEvent, line)) is not None
        ]
        return sorted(found, key=lambda event: event.time)

    def persisted(self, index: int) -> Persisted | None:
        """What continues host `index` after a reboot; None if nothing does."""
        return self.read(self.host(index) / "persist.json", Persisted)

    def newest_checkpoint(self) -> int:
        """Step of the newest finished checkpoint; 0 for none."""
        found = _listed(self.run_dir / "checkpoints", "step-*.json")
        return max((int(match[1]) for path in found if (match := _CHECKPOINT.fullmatch(path.name))), default=0)

    def last_step(self) -> int | None:
        """The last step in metrics.jsonl."""
        for line in reversed(_bytes_of(self.run_dir / "metrics.jsonl", last=65536).splitlines()):
            record = parsed(_Record, line)  # None if it was cut short, by a kill or at the beginning of what was read
            if record is not None:
                return record.step
        return None

    def read(self, path: Path, kind: type[T]) -> T | None:
        """The JSON in `path` as a `kind`; None if there is none, or it is damaged."""
        try:
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:  # the shared folder may be back in a moment
            return cast(T | None, self._known.get(path))
        self._known[path] = value = parsed(kind, data)
        return value


def event_line(what: str, failure: LostTime | None = None) -> bytes:
    """`what` happened now, as a line of events.jsonl."""
    event = {"time": stamp(), "what": what} | ({"failure": asdict(failure)} if failure is not None else {})
    return json.dumps(event, ensure_ascii=False).encode() + b"\n"


def _listed(folder: Path, pattern: str) -> list[Path]:
    """The paths in `folder` that match; none if it cannot be read."""
    try:
        return list(folder.glob(pattern))
    except OSError:
        return []


def _bytes_of(path: Path, *, last: int | None = None) -> bytes:
    """The content of a file, or only its `last` bytes; nothing if it cannot be read."""
    try:
        with path.open("rb") as file:
            if last is not None:
                file.seek(max(0, file.seek(0, os.SEEK_END) - last))
            return file.read()
    except OSError:
        return b""


def stamp() -> str:
    """The current time, with which every log line begins: sorting merges the lines of all hosts."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
