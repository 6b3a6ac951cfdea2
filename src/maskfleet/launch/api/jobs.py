"""Prepare a job, submit it, and follow it from Python: what `launch`, `status`, `logs`, `explain` and `fetch` do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from maskfleet.config.launch import DEFAULT_TARGET, LAUNCH_ADAPTER, AnyLaunch, launch_problems
from maskfleet.config.run import RunConfig
from maskfleet.errors import ConfigError, LaunchError
from maskfleet.launch.backend import Backend, backend_for, backend_of, parse_handle
from maskfleet.launch.job import JobHandle, JobState, JobStatus, Rendered


class LaunchedJob:
    """A launched run, known by its handle."""

    def __init__(self, handle: str | JobHandle) -> None:
        """`handle` is what `maskfleet launch` prints, such as sagemaker://us-west-2/r50."""
        self.handle = parse_handle(handle) if isinstance(handle, str) else handle
        self._backend = backend_of(self.handle)

    def __repr__(self) -> str:
        return f"LaunchedJob({str(self.handle)!r})"

    def status(self) -> JobStatus:
        """The state now."""
        return self._backend.status(self.handle)

    def logs(self, *, follow: bool = False, rank: int | None = None) -> Iterator[str]:
        """The lines of the log, oldest first; with `follow`, until the run ends."""
        return self._backend.logs(self.handle, follow=follow, rank=rank)

    def explain(self) -> str:
        """Why it failed or waits, and the next step."""
        return self._backend.explain(self.handle)

    def cancel(self) -> None:
        """Stop it after it has saved a checkpoint. Cancelling a finished job does nothing."""
        self._backend.cancel(self.handle)

    def wait(self, say: Callable[[str], None] | None = None) -> JobStatus:
        """Wait until the run is done, and pass each line of its log to `say`; raises if it failed or was cancelled."""
        for line in self.logs(follow=True):
            if say is not None:
                say(line)
        status = self.status()
        if status.state is JobState.DONE:
            return status
        reason = self.explain() if status.state is JobState.FAILED else status.detail
        raise LaunchError(
            f"{self.handle} is {status.state}{f': {reason}' if reason else ''}",
            remedy=f"see its log with `maskfleet logs {self.handle}`",
        )

    def fetch(self, folder: str | Path) -> Path:
        """Copy the files of the run into `folder`, which is then a run directory; returns it."""
        target = Path(folder)
        with self._backend.files(self.handle) as files:
            files.fetch(target)
        return target


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A job that is checked and complete, but not submitted."""

    backend: Backend
    rendered: Rendered

    def text(self) -> str:
        """Exactly what `submit` sends; the output of `maskfleet launch --dry-run`."""
        return self.rendered.text()

    def submit(self) -> LaunchedJob:
        """Send it. A name that is in use is an error."""
        return LaunchedJob(self.backend.submit(self.rendered))


def prepare_job(config: RunConfig, launch: Mapping[str, Any] | AnyLaunch, *, name: str | None = None) -> PreparedJob:
    """The job that runs `config` as `launch` says: the fields of a run file's launch section."""
    section = validated_launch({"on": DEFAULT_TARGET, **launch}) if isinstance(launch, Mapping) else launch
    backend = backend_for(section)
    return PreparedJob(backend, backend.render(backend.job(config, name=name)))


def validated_launch(fields: Mapping[str, Any]) -> AnyLaunch:
    """The launch section with these fields."""
    try:
        return LAUNCH_ADAPTER.validate_python(dict(fields))
    except ValidationError as error:
        raise ConfigError(
            f"launch on {fields['on']}: {'; '.join(launch_problems(error))}",
            remedy="`maskfleet launch --help` lists the options of each target, docs/reference/config.md the fields",
        ) from None
