"""The files through which the supervisors of a job, and commands that ask about it, communicate.

RUN_DIR/launch/job.json         what to run and where; written once
RUN_DIR/launch/endpoint.json    which host serves the rendezvous, and its generation number
RUN_DIR/launch/outcome.json     how the run ended; the first host that knows writes it, once
RUN_DIR/launch/cancel           a stop request
RUN_DIR/launch/host-0/          heartbeat (beat.json), events.jsonl, output.log and the ranks' logs of the first host

All hosts share one run directory, which a run needs for its checkpoints anyway. It also decides which hosts continue
when the network is partitioned: a host that cannot write here counts as lost.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from maskfleet.errors import LaunchError
from maskfleet.system.files import read_json, write_atomically, write_once

LAUNCH = "launch"


@dataclass(frozen=True, slots=True)
class Host:
    """A machine of a job and the ranks it runs."""

    address: str
    slots: int


@dataclass(frozen=True, slots=True)
class Job:
    """The job that the supervisors run: the content of job.json."""

    name: str
    starter: str  # torchrun or mpirun
    hosts: tuple[Host, ...]
    min_nodes: int
    max_restarts: int
    port: int
    cwd: str  # a leading ~ is the home directory
    env: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Job:
        data = json.loads(text)
        return cls(**{**data, "hosts": tuple(Host(**host) for host in data["hosts"])})


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The content of beat.json: a supervisor writes it every few seconds."""

    count: int
    pid: int
    state: str  # starting, running, waiting, done, failed, cancelled
    generation: int
    restarts: int
    time: float
    address: str  # as the other hosts reach it
    lost: list[int]  # hosts that this one considers lost


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the ranks rendezvous."""

    generation: int
    host: int
    address: str  # for the other hosts; the launching machine may use another one


class JobFolder:
    """RUN_DIR/launch; files are written atomically."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.path = run_dir / LAUNCH

    def host(self, index: int) -> Path:
        return self.path / f"host-{index}"

    def job(self) -> Job:
        """What to run; a folder without a job is an error."""
        try:
            return Job.from_json((self.path / "job.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError) as error:
            raise LaunchError(
                f"there is no job in {self.run_dir}: {error}", remedy="check the handle; `maskfleet launch` prints it"
            ) from error

    def heartbeat(self, index: int) -> Heartbeat | None:
        data = read_json(self.host(index) / "beat.json")
        return Heartbeat(**data) if data else None

    def write_heartbeat(self, index: int, heartbeat: Heartbeat) -> None:
        # Not synced: a busy disk may take longer to sync than the other hosts wait for a heartbeat.
        write_atomically(self.host(index) / "beat.json", json.dumps(asdict(heartbeat)), durable=False)

    def outcome(self) -> dict[str, Any] | None:
        """`state`, `exit_code` and `why` of a run that has ended; None before that."""
        return read_json(self.path / "outcome.json") or None

    def write_outcome(self, state: str, exit_code: int, why: str = "") -> None:
        """Write how the run ended, unless another host has done so."""
        outcome = {"state": state, "exit_code": exit_code, "why": why, "time": time.time()}
        write_once(self.path / "outcome.json", json.dumps(outcome))

    def endpoint(self) -> Endpoint | None:
        data = read_json(self.path / "endpoint.json")
        return Endpoint(**data) if data else None

    def write_endpoint(self, endpoint: Endpoint) -> None:
        write_atomically(self.path / "endpoint.json", json.dumps(asdict(endpoint)))

    def cancel_requested(self) -> bool:
        return (self.path / "cancel").exists()

    def request_cancel(self) -> None:
        (self.path / "cancel").touch()

    def add_event(self, index: int, what: str) -> None:
        line = json.dumps({"time": stamp(), "what": what}, ensure_ascii=False)
        with (self.host(index) / "events.jsonl").open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    def events(self) -> list[str]:
        """What happened to the job, oldest first."""
        lines = []
        for file in self.path.glob("host-*/events.jsonl"):
            for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
                if not line.endswith("\n"):
                    continue  # it is still being written
                event = json.loads(line)
                lines.append(f"{event['time']} {event['what']}")
        return sorted(lines)

    def newest_checkpoint(self) -> int:
        """Step of the newest finished checkpoint; 0 for none."""
        steps = [int(path.stem.split("-")[1]) for path in (self.run_dir / "checkpoints").glob("step-*.json")]
        return max(steps, default=0)

    def last_step(self) -> int | None:
        """The last step in metrics.jsonl."""
        try:
            with (self.run_dir / "metrics.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
                lines = file.read().splitlines()
        except FileNotFoundError:
            return None
        for line in reversed(lines):
            try:
                return int(json.loads(line)["step"])
            except (ValueError, KeyError, TypeError):
                continue  # cut short by a kill, or by the seek above
        return None


def stamp() -> str:
    """The current time, with which every log line begins: sorting merges the lines of all hosts."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
