"""The Backend protocol, and BACKENDS: which class launches on which target.

Adding a target takes its folder with a backend.py, a class in config/launch.py and a line in BACKENDS.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, cast
from urllib.parse import unquote

from maskfleet.config.launch import LAUNCH_CLASSES, AnyLaunch
from maskfleet.config.run import RunConfig
from maskfleet.errors import ConfigError, LaunchError
from maskfleet.launch.files.transfer import Report, RunFiles, ignore
from maskfleet.launch.findings import Finding
from maskfleet.launch.instances import INSTANCES, Instance
from maskfleet.launch.job import JobHandle, JobSpec, JobStatus, Rendered

# Names, not classes: a target's libraries (asyncssh, kr8s, boto3) are imported only when it is used.
BACKENDS = {
    "local": "maskfleet.launch.local.backend:LocalBackend",
    "ssh": "maskfleet.launch.ssh.backend:SshBackend",
    "eks": "maskfleet.launch.eks.backend:EksBackend",
    "sagemaker": "maskfleet.launch.sagemaker.backend:SageMakerBackend",
}

_HANDLE = re.compile(r"(?P<on>[a-z]+)://(?P<location>[^/]*)(?P<path>/.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class NotebookOptions:
    """What `maskfleet notebook` was asked for, and how it shows the result."""

    port: int
    image: str | None
    instance: str | None
    new_password: bool
    password_stdin: bool
    show: Callable[[str, str], None]  # prints the addresses of JupyterLab and TensorBoard
    say: Callable[[str], None]  # prints a line to standard error


class Backend(Protocol):
    """One launch target. A backend subclasses it; the methods below `explain` are optional."""

    slots: tuple[int, ...]  # ranks on each machine
    cancels_on_interrupt: ClassVar[bool] = False  # whether Ctrl-C while following a run cancels it

    def __init__(self, launch: Any, *, nodes: int | None = None, known: Mapping[str, Instance] = INSTANCES) -> None:
        """Resolve what `launch` leaves open; `nodes` is the command line's, `known` the facts of instance types."""

    @classmethod
    def for_handle(cls, handle: JobHandle) -> Self:
        """The backend that knows the job `handle`, from the handle alone."""

    def job(self, run: RunConfig, *, name: str | None = None) -> JobSpec:
        """The job that runs `run` on the machines of this launch."""

    def render(self, job: JobSpec) -> Rendered:
        """What would be sent. Pure: no network, no clock, no randomness."""

    def submit(self, rendered: Rendered) -> JobHandle:
        """Send it. Submitting a name that is running is an error."""

    def status(self, handle: JobHandle) -> JobStatus:
        """State now; never blocks on the job."""

    def logs(self, handle: JobHandle, *, follow: bool = False, rank: int | None = None) -> Iterator[str]:
        """Lines of the run, oldest first; only those of `rank` if it is given."""

    def cancel(self, handle: JobHandle) -> None:
        """Stop it. Cancelling a finished or unknown job does nothing."""

    def explain(self, handle: JobHandle) -> str:
        """Why it failed or is waiting, in plain words with a next step."""

    @classmethod
    def handle_path(cls, path: str) -> str:
        """The path of a handle, from that of its URL."""
        return path

    def doctor(self, *, folder: Path, data: str | None) -> list[Finding]:
        """Check the machines; `folder` is on this one, `data` the data folder on the others."""
        raise no_doctor(_target_of(type(self)))

    def fabric(self, say: Callable[[str], None]) -> list[Finding]:
        """Measure how fast the machines of this launch exchange data; `say` prints a line while it runs."""
        raise LaunchError(
            f"--fabric measures on eks only, not on {_target_of(type(self))}",
            remedy="use --on eks, or start the ranks yourself with mpirun: each is `python -m maskfleet.bench.fabric`",
        )

    def files(
        self, handle: JobHandle, *, writable: bool = False, is_file: bool = False, report: Report = ignore
    ) -> AbstractContextManager[RunFiles]:
        """The files that `handle`, with or without a path after the job's name, refers to."""
        raise LaunchError(f"files of {handle.on} jobs cannot be copied", remedy="copy them with the target's own tools")

    def notebook(self, handle: JobHandle, options: NotebookOptions) -> None:
        """Serve JupyterLab and TensorBoard of the run until Ctrl-C."""
        raise LaunchError(
            f"there are no notebooks for runs on {handle.on}",
            remedy="copy the run's folder here, then `maskfleet notebook FOLDER`",
        )

    def stop_notebook(self, handle: JobHandle) -> str:
        """Remove the notebook of the run; returns what to tell the user."""
        raise LaunchError(f"there are no notebooks for runs on {handle.on}", remedy="there is nothing to stop")


def backend_class(on: str) -> type[Backend]:
    """The class that launches on the target `on`."""
    if on not in BACKENDS:
        options = _either([f"--on {name}" for name in BACKENDS])
        raise LaunchError(f"launching on {on} is not built yet", remedy=f"launch {options}")
    return cast(type[Backend], pkgutil.resolve_name(BACKENDS[on]))


def backend_for(launch: AnyLaunch, *, nodes: int | None = None, known: Mapping[str, Instance] = INSTANCES) -> Backend:
    """The backend for a launch section."""
    return backend_class(launch.on)(launch, nodes=nodes, known=known)


def backend_of(handle: JobHandle) -> Backend:
    """The backend that knows `handle`."""
    return backend_class(handle.on).for_handle(handle)


def parse_handle(text: str) -> JobHandle:
    """The handle that `str(handle)` gave."""
    match = _HANDLE.fullmatch(text)
    location, path = (unquote(match["location"]), unquote(match["path"])) if match else ("", "")
    if match is None or match["on"] not in LAUNCH_CLASSES or not path.strip("/") or not _is_writable(location + path):
        raise LaunchError(
            f"{text!r} is not a job's handle",
            remedy="use what `maskfleet launch` printed, such as local:///home/me/runs/r50, ssh://host1/fleet/runs/r50,"
            " eks://kubeflow/r50 or sagemaker://us-west-2/r50",
        )
    return JobHandle(match["on"], location, backend_class(match["on"]).handle_path(path))


def no_doctor(on: str) -> ConfigError:
    """The error for a target without a doctor."""
    return ConfigError(f"there is no doctor for {on!r}", remedy=f"use {_either([f'--on {name}' for name in BACKENDS])}")


def _is_writable(text: str) -> bool:
    """Whether `text` can be part of a file's name on any of our targets: UTF-8 without NUL."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def _target_of(kind: type[Backend]) -> str:
    return next(on for on, path in BACKENDS.items() if path.endswith(f":{kind.__name__}"))


def _either(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
