"""Status, logs, start and stop of a job, on a machine that sees its run directory.

On hosts it runs as `RUN_DIR/launch/remote status`, so that a client needs nothing but the handle.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from maskfleet.errors import MaskfleetError
from maskfleet.launch.job import HostStatus, JobState, JobStatus
from maskfleet.launch.supervise.job_files import JobFolder
from maskfleet.launch.supervise.processes import job_id, kill_all
from maskfleet.system.lock import LockHeldError, locked
from maskfleet.system.process import detach

SILENT_S = 40.0  # more than LOST_S: the clocks of machines may differ a little
BEGIN_S = 120.0  # a host that has not started by then will not
POLL_S = 0.3
CLOSING_S = 40.0  # grace period after the outcome for a host to end its ranks and write its last lines
_RANK = re.compile(r"^\S+ \[rank(\d+)\]: ?")


def status_of(run_dir: Path, *, now: float | None = None) -> JobStatus:
    """State of the job in `run_dir`, read from its files."""
    folder = JobFolder(run_dir)
    if not (folder.path / "job.json").exists():
        return JobStatus(JobState.UNKNOWN, f"there is no job in {run_dir}")
    now = time.time() if now is None else now
    job, outcome = folder.job(), folder.outcome()
    heartbeats = [folder.heartbeat(index) for index in range(len(job.hosts))]
    lost = {
        index
        for heartbeat in heartbeats
        if heartbeat is not None and now - heartbeat.time < SILENT_S
        for index in heartbeat.lost
    }
    hosts, restarts, alive = [], 0, 0
    for index, (host, heartbeat) in enumerate(zip(job.hosts, heartbeats, strict=True)):
        if heartbeat is None:
            hosts.append(HostStatus(host.address, "not started"))
            continue
        silent = now - heartbeat.time
        is_alive = silent < SILENT_S and index not in lost and heartbeat.state != "left"
        alive += is_alive
        state = heartbeat.state if is_alive or outcome is not None or heartbeat.state == "left" else "lost"
        hosts.append(HostStatus(host.address, state, "" if is_alive else f"last heartbeat {silent:.0f} s ago"))
        restarts = max(restarts, _restarts(folder, index))
    if outcome is not None:
        state, detail, code = JobState(outcome["state"]), str(outcome["why"]), int(outcome["exit_code"])
    elif alive:
        out = len(job.hosts) - alive
        state, code = JobState.RUNNING, None
        detail = f"continues with {alive} of {len(job.hosts)} hosts" if out else ""
    elif any(heartbeat is not None for heartbeat in heartbeats):
        state, detail, code = JobState.LOST, "no host of the job sends heartbeats; launch it again to resume", None
    elif now - (folder.path / "job.json").stat().st_mtime > BEGIN_S:
        state, detail, code = JobState.LOST, "no host has started; see launch/host-*/supervisor.log", None
    else:
        state, detail, code = JobState.PENDING, "no host has started yet", None
    return JobStatus(state, detail, folder.last_step(), code, restarts, tuple(hosts), tuple(folder.events()))


def _restarts(folder: JobFolder, index: int) -> int:
    """How often the ranks of a host were restarted since the job was launched.

    Counts the folders of each generation, and those that torchrun makes in them for each attempt.
    """
    launched_at = (folder.path / "job.json").stat().st_mtime
    attempts = 0
    for generation in folder.host(index).glob("ranks-*"):
        if generation.stat().st_mtime >= launched_at:
            tries = list(generation.glob("*/attempt_*"))
            attempts += sum(one.stat().st_mtime >= launched_at for one in tries) if tries else 1
    return max(0, attempts - 1)


def log_lines(
    run_dir: Path, *, follow: bool = False, rank: int | None = None, after: str = "", stamped: bool = False
) -> Iterator[str]:
    """Lines of all hosts in the order of their time stamps; with `follow`, until the job is over."""
    folder = JobFolder(run_dir)
    offsets: dict[Path, int] = {}
    ended: float | None = None
    while True:
        status = status_of(run_dir)  # read before the lines, so that none written before the end is missed
        ended = (ended or time.monotonic()) if status.state.is_final else None
        is_over = ended is not None and (not _is_closing(status) or time.monotonic() - ended > CLOSING_S)
        batch = [line for file in sorted(folder.path.glob("host-*/output.log")) for line in _new_lines(file, offsets)]
        for line in sorted(batch, key=lambda text: text[:27]):
            if line[:27] > after and _is_wanted(line, rank):
                yield line if stamped else line[28:]
        if not follow or is_over:
            return
        time.sleep(POLL_S)


def wait_until_closed(run_dir: Path) -> None:
    """Wait until no host writes into the folder of a job that has ended."""
    ended = time.monotonic()
    while time.monotonic() - ended < CLOSING_S:
        status = status_of(run_dir)
        if not (status.state.is_final and _is_closing(status)):
            return
        time.sleep(POLL_S)


def _is_closing(status: JobStatus) -> bool:
    """Whether a host that is alive is still ending the job: the outcome is written before the last log lines."""
    return any(not host.detail and host.state in ("starting", "running", "waiting") for host in status.hosts)


def _new_lines(file: Path, offsets: dict[Path, int]) -> list[str]:
    with file.open("rb") as source:
        source.seek(offsets.get(file, 0))
        data = source.read()
    whole = data.rfind(b"\n") + 1
    offsets[file] = offsets.get(file, 0) + whole
    return data[:whole].decode("utf-8", "replace").splitlines()


def _is_wanted(line: str, rank: int | None) -> bool:
    if rank is None:
        return True
    match = _RANK.match(line)
    return match is not None and int(match[1]) == rank


def start(run_dir: Path, index: int) -> None:
    """Start the supervisor of host `index` in its own session; does nothing if there is one already."""
    folder = JobFolder(run_dir)
    folder.host(index).mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "maskfleet.launch.supervise.supervisor", str(run_dir), str(index)]
    detach(argv, log=folder.host(index) / "supervisor.log")


def stop(run_dir: Path, index: int, *, grace_s: float = 90) -> list[int]:
    """Wait for host `index` to stop after a cancel request, then kill what is left; returns what cannot be killed."""
    own = JobFolder(run_dir).host(index)
    own.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        with suppress(LockHeldError):  # a supervisor that does not stop in time is killed with the rest
            stack.enter_context(locked(own / "lock", f"supervising {run_dir}", wait_s=grace_s))
        left = kill_all(job_id(run_dir))
    JobFolder(run_dir).write_outcome("cancelled", 143)
    return left


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="remote")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("what", choices=("status", "logs", "explain", "place", "start", "cancel", "stop"))
    parser.add_argument("index", type=int, nargs="?", default=0)
    parser.add_argument("--follow", action="store_true")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--after", default="")
    asked = parser.parse_args(arguments)
    try:
        return _answer(asked)
    except MaskfleetError as error:
        print(error, file=sys.stderr)
        return 3  # not 2: with that a shell reports a missing script, and so a missing job


def _answer(asked: argparse.Namespace) -> int:
    match asked.what:
        case "status":
            print(json.dumps(status_of(asked.run_dir).as_json()))
        case "logs":
            for line in log_lines(asked.run_dir, follow=asked.follow, rank=asked.rank, after=asked.after, stamped=True):
                print(line, flush=True)
        case "explain":
            from maskfleet.launch.explain import explain_job

            print(explain_job(asked.run_dir))
        case "place":
            from maskfleet.launch.supervise.prepare import install_incoming_files

            install_incoming_files(asked.run_dir)
        case "start":
            start(asked.run_dir, asked.index)
        case "cancel":
            JobFolder(asked.run_dir).request_cancel()
        case "stop":
            left = stop(asked.run_dir, asked.index)
            if left:
                print(f"processes {left} cannot be killed", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
