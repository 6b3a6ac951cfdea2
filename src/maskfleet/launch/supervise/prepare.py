"""A job's files into its run directory, on the machine that runs it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from maskfleet.config.load import RUN_FILE, load, write_run_file
from maskfleet.errors import LaunchError
from maskfleet.launch.job import JobState
from maskfleet.launch.supervise.job_files import LAUNCH
from maskfleet.launch.supervise.status import await_close, status_of
from maskfleet.system.files import write_atomically

JOB_FILE = f"{LAUNCH}/job.json"
INCOMING = ".incoming"  # ending of files that were sent and are not yet in place


def refuse_running(run_dir: Path) -> None:
    """A job that is running is not sent again; one that has just ended is let end."""
    await_close(run_dir)
    status = status_of(run_dir)
    if status.state in (JobState.RUNNING, JobState.PENDING):
        raise LaunchError(
            f"{run_dir} is {status.state} already",
            remedy="follow it with `maskfleet logs`, cancel it, or choose another --name",
        )


def place(run_dir: Path, files: Mapping[str, str]) -> None:
    """Put `files` there; where the same run is there already it is continued, and how it ended is forgotten."""
    run_dir.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if name == RUN_FILE and (run_dir / RUN_FILE).exists():
            draft = run_dir / f"{RUN_FILE}.new"
            draft.write_text(content, encoding="utf-8")
            try:
                write_run_file(run_dir, load(draft))
            finally:
                draft.unlink()
            continue
        path = run_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    for stale in ("outcome.json", "cancel", "endpoint.json"):
        (run_dir / LAUNCH / stale).unlink(missing_ok=True)
    for beat in (run_dir / LAUNCH).glob("host-*/beat.json"):
        beat.unlink()


def place_incoming(run_dir: Path) -> None:
    """Put what was sent in place, unless the job is running."""
    refuse_running(run_dir)
    drafts = {name: run_dir / f"{name}{INCOMING}" for name in (RUN_FILE, JOB_FILE)}
    place(run_dir, {name: draft.read_text(encoding="utf-8") for name, draft in drafts.items()})
    for draft in drafts.values():
        draft.unlink()
