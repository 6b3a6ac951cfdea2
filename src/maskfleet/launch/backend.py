"""The Backend protocol, and which backend a launch means."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from maskfleet.config.launch import EksLaunch, LocalLaunch, SageMakerLaunch, SshLaunch
from maskfleet.errors import LaunchError
from maskfleet.launch.job import AnyLaunch, JobHandle, JobSpec, JobStatus, Rendered
from maskfleet.system.process import run_command


class Backend(Protocol):
    """A place that can run a JobSpec."""

    def render(self, job: JobSpec) -> Rendered:
        """What would be sent. Pure: no network, no clock, no randomness."""

    def submit(self, rendered: Rendered) -> JobHandle:
        """Send it. Submitting a name that is running is an error."""

    def status(self, handle: JobHandle) -> JobStatus:
        """State now; never blocks on the job."""

    def logs(self, handle: JobHandle, *, follow: bool = False, rank: int | None = None) -> Iterator[str]:
        """Lines of the run, oldest first; of one rank where it is named."""

    def cancel(self, handle: JobHandle) -> None:
        """Stop it. Cancelling a finished or unknown job does nothing."""

    def explain(self, handle: JobHandle) -> str:
        """Why it failed or waits, in plain words with a next step; every backend keeps its logs elsewhere."""


def backend_for(launch: AnyLaunch) -> Backend:
    """The backend that `launch` means."""
    match launch:
        case LocalLaunch():
            from maskfleet.launch.local.backend import LocalBackend

            return LocalBackend(launch, run=run_command)
        case SshLaunch():
            from maskfleet.launch.ssh.backend import SshBackend

            return SshBackend(launch)
        case EksLaunch():
            from maskfleet.launch.eks.backend import EksBackend

            return EksBackend(launch, run=run_command)
        case SageMakerLaunch():
            raise LaunchError(
                f"launching on {launch.on} is not built yet", remedy="launch --on local, --on ssh or --on eks"
            )


def backend_of(handle: JobHandle) -> Backend:
    """The backend that knows `handle`."""
    match handle.on:
        case "local":
            return backend_for(LocalLaunch())
        case "ssh":
            return backend_for(SshLaunch(hosts=tuple(handle.place.split(","))))
        case "sagemaker":
            return backend_for(SageMakerLaunch())
        case _:
            from maskfleet.launch.eks.backend import launch_of

            return backend_for(launch_of(handle))
