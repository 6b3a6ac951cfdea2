"""Write the files of a job into its run directory, on the machine that runs it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from maskfleet.config.load import RUN_FILE, load, write_run_file
from maskfleet.errors import LaunchError
from maskfleet.launch.job import JobState
from maskfleet.launch.supervise.job_files import LAUNCH, JobFolder
from maskfleet.launch.supervise.membership import remove_exits
from maskfleet.launch.supervise.status import wait_until_closed
from maskfleet.system.files import write_atomically

JOB_FILE = f"{LAUNCH}/job.json"
INCOMING = ".incoming"  # suffix of files that were sent and not installed yet


def refuse_running(run_dir: Path) -> None:
    """Raise if the job is running; a job that is just ending gets time to end."""
    status = wait_until_closed(run_dir)
    if status.state in (JobState.RUNNING, JobState.PENDING):
        raise LaunchError(
            f"{run_dir} is {status.state} already",
            remedy="follow it with `maskfleet logs`, cancel it, or choose another --name",
        )


def write_job_files(run_dir: Path, files: Mapping[str, str]) -> None:
    """Write `files`; if the same run is there already it will resume, so its old outcome is removed."""
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
    for heartbeat in (run_dir / LAUNCH).glob("host-*/beat.json"):
        heartbeat.unlink()
    remove_exits(JobFolder(run_dir))


def install_incoming_files(run_dir: Path) -> None:
    """Install the files that were sent, unless the job is running."""
    refuse_running(run_dir)
    drafts = {name: run_dir / f"{name}{INCOMING}" for name in (RUN_FILE, JOB_FILE)}
    write_job_files(run_dir, {name: draft.read_text(encoding="utf-8") for name, draft in drafts.items()})
    for draft in drafts.values():
        draft.unlink()
