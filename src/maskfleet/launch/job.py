"""What is launched, what would be sent, and what is known of it afterwards."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from maskfleet.config.base import replaced
from maskfleet.config.launch import EksLaunch, LocalLaunch, SageMakerLaunch, SshLaunch
from maskfleet.config.load import dump
from maskfleet.config.run import DataConfig, RunConfig
from maskfleet.errors import LaunchError

EKS_NAME = 40  # letters in the name of a release: Kubernetes appends to it, and ends names at 63
AnyLaunch = LocalLaunch | SshLaunch | SageMakerLaunch | EksLaunch

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_EKS_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")  # a Service, too, is named so


@dataclass(frozen=True, slots=True)
class JobSpec:
    """One run on some machines; ranks follow from the slots of each node."""

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
    blobs: Mapping[str, bytes] = field(default_factory=dict)  # files that are not text

    def text(self) -> str:
        """All of it, for people to read before it is sent: every byte of the files, and each command as a JSON list."""
        parts = [f"# file {json.dumps(name)}\n{content}" for name, content in self.files.items()]
        for name, blob in self.blobs.items():
            parts.append(f"# file {json.dumps(name)}\n# {len(blob)} bytes, sha256 {hashlib.sha256(blob).hexdigest()}\n")
        parts += [f"# command\n{json.dumps(list(command), ensure_ascii=False)}\n" for command in self.commands]
        return "\n".join(parts)


@dataclass(frozen=True, slots=True)
class JobHandle:
    """Names a job for good: `local:///runs/a`, `ssh://host1,host2/fleet/runs/a`; needs no local state."""

    on: str
    place: str  # hosts, region or namespace; empty for this machine
    path: str  # folder or name there

    def __str__(self) -> str:
        return f"{self.on}://{quote(self.place, safe='@,:[]')}/{quote(self.path.removeprefix('/'), safe='/')}"

    @classmethod
    def parse(cls, text: str) -> JobHandle:
        """The handle that `str` gave."""
        parts = urlsplit(text)
        if parts.scheme not in ("local", "ssh", "sagemaker", "eks") or not parts.path.strip("/"):
            raise LaunchError(
                f"{text!r} is not a job's handle",
                remedy="use what `maskfleet launch` printed, such as local:///home/me/runs/r50, ssh://host1/fleet/runs/r50"
                " or eks://kubeflow/r50",
            )
        path = unquote(parts.path)
        if parts.scheme not in ("local", "ssh"):
            root = "//" if path.endswith("//") else ""  # the root of the shared volume, for files
            path = f"{path.strip('/')}{root}"
        return cls(parts.scheme, unquote(parts.netloc), path)


class JobState(StrEnum):
    """Where a job stands."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"  # it was running, and nothing of it answers any more
    UNKNOWN = "unknown"  # nothing is known by this name

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
class JobStatus:
    """What is known of a job now."""

    state: JobState
    detail: str = ""
    step: int | None = None
    exit_code: int | None = None
    restarts: int = 0
    hosts: tuple[HostStatus, ...] = ()
    events: tuple[str, ...] = field(default=())

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> JobStatus:
        """The status that `as_json` gave."""
        hosts = tuple(HostStatus(**host) for host in data["hosts"])
        return cls(**{**data, "state": JobState(data["state"]), "hosts": hosts, "events": tuple(data["events"])})


def job_for(run: RunConfig, launch: AnyLaunch, *, slots: tuple[int, ...], name: str | None = None) -> JobSpec:
    """The job of `run` on nodes with so many `slots` each; a name that nobody gave is derived from the run itself."""
    longest, pattern = 63, _NAME
    if isinstance(launch, EksLaunch):
        run, longest, pattern = with_data_in_pods(run, launch), EKS_NAME, _EKS_NAME
    text = dump(run)
    if name is None:
        name = f"run-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    if not pattern.fullmatch(name) or len(name) > longest:
        raise LaunchError(
            f"{name!r} cannot name a job",
            remedy=f"use up to {longest} lower-case letters, digits and dashes, a letter first, such as --name r50-1x",
        )
    minimum, restarts = len(slots), 0
    match launch:
        case SshLaunch():
            minimum, restarts = launch.min_nodes or len(slots), launch.max_restarts
        case LocalLaunch():
            restarts = launch.max_restarts
        case EksLaunch():
            restarts = launch.retries
        case SageMakerLaunch():
            pass
    if minimum > len(slots):
        raise LaunchError(
            f"the run is to go on with at least {minimum} hosts, but it has only {len(slots)}",
            remedy="lower --min-nodes or name more hosts",
        )
    return JobSpec(name, text, slots, minimum, restarts)


def with_data_in_pods(run: RunConfig, launch: EksLaunch) -> RunConfig:
    """`run` with data.root where the pods see it: a relative one is on the data volume."""
    _refuse_file_of_this_machine("train.weights", run.train.weights, launch)
    _refuse_file_of_this_machine("model.backbone.weights", run.model.backbone.weights, launch)
    root = run.data.root
    if root.startswith(("/", "~")):
        if not _is_mounted(root, launch):
            raise LaunchError(
                f"data.root {root} is on no volume that the pods mount: they see {_mounts(launch)}",
                remedy=f"stage it there (docs/data/staging.md) and set data.root={launch.data_mount}/… or leave it out",
            )
        return run
    folder = launch.data_dir if root == DataConfig().root else posixpath.normpath(root)
    if folder == ".." or folder.startswith("../"):
        raise LaunchError(f"data.root {root} is outside of the data volume", remedy="name a folder on the volume")
    return replaced(run, {"data.root": posixpath.join(launch.data_mount, folder)})


def _refuse_file_of_this_machine(field: str, path: str | None, launch: EksLaunch) -> None:
    """Files of the image, and what is relative to data.root, are the pods' affair."""
    if path is None or not path.startswith(("/", "~")) or _is_mounted(path, launch):
        return
    if path.startswith("~") or Path(path).exists():
        raise LaunchError(
            f"{field} {path} is a file of this machine, and the pods see only {_mounts(launch)}",
            remedy=f"copy it there (docs/run-anywhere/eks/index.md, Files) and set {field}={launch.data_mount}/…",
        )


def _is_mounted(path: str, launch: EksLaunch) -> bool:
    whole = f"{posixpath.normpath(path)}/"
    return any(whole.startswith(f"{mount}/") for mount in (launch.shared_path, launch.data_mount))


def _mounts(launch: EksLaunch) -> str:
    return " and ".join(sorted({launch.shared_path, launch.data_mount}))
