"""Status, logs, start and stop of a job, on a machine that sees its run directory.

On hosts it runs as `RUN_DIR/launch/remote status`, so that a client needs nothing but the handle.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
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
from maskfleet.launch.supervise.state.liveness import HostView, Liveness
from maskfleet.system.lock import LockHeldError, locked
from maskfleet.system.machine import installation_id
from maskfleet.system.process import detach

SLOW_S = 60.0  # a run without a new step for longer says so: it may evaluate, or wait for a host
BEGIN_S = 120.0  # a host that has not started by then will not
POLL_S = 0.3
CLOSING_S = 40.0  # grace period after the outcome for a host to end its ranks and write its last lines
NOTE = "note: "  # begins a line of the output that the user should see
logger = logging.getLogger("maskfleet")
WHATS = ("status", "logs", "explain", "place", "persist", "start", "restart", "resume", "cancel", "stop")
_RANK = re.compile(r"^\S+ \[rank(\d{1,6})\]: ?")


def status_of(run_dir: Path, *, liveness: Liveness | None = None, now: float | None = None) -> JobStatus:
    """State of the job in `run_dir`, read from its files; with `liveness`, what it saw before is not watched again."""
    folder = JobFolder(run_dir)
    if not folder.exists():
        return JobStatus(JobState.UNKNOWN, f"there is no job in {run_dir}")
    job, outcome, events = folder.known_job(), folder.outcome(), folder.events()
    addresses = [host.address for host in job.hosts] if job is not None else folder.host_names()
    views = (liveness or Liveness(folder)).views(len(addresses), is_over=outcome is not None)
    alive = sum(view.is_alive for view in views)
    step = folder.last_step()
    age_s = step_age_s(views, step)
    if outcome is not None:
        state, detail, code = JobState(outcome.state), outcome.why, outcome.exit_code
    elif alive or any(view.has_process for view in views):
        min_nodes = job.min_nodes if job is not None else 1
        state, detail, code = JobState.RUNNING, _running_detail(alive, len(addresses), min_nodes, age_s), None
    else:
        state, detail, code = *_idle(folder, views, time.time() if now is None else now), None
    return JobStatus(
        state,
        detail,
        step,
        code,
        max((_restarts(folder, index) for index, view in enumerate(views) if view.heartbeat is not None), default=0),
        tuple(_host_status(*one, is_over=outcome is not None) for one in zip(addresses, views, strict=True)),
        tuple(f"{event.time} {event.what}" for event in events),
        step_age_s=age_s if outcome is None else None,
        min_nodes=job.min_nodes if job is not None else None,
        failures=tuple(event.failure for event in events if event.failure is not None),
        persist=_persist(folder, addresses),
    )


def _persist(folder: JobFolder, addresses: list[str]) -> str:
    """What continues the run after a reboot, and where; empty if nothing does."""
    found: dict[str, list[str]] = {}
    for index, address in enumerate(addresses):
        persisted = folder.persisted(index)
        if persisted is not None:
            found.setdefault(str(persisted), []).append(address)
    return "; ".join(f"{what} on {', '.join(hosts)}" for what, hosts in found.items())


def step_age_s(views: list[HostView], step: int | None) -> float | None:
    """Seconds since `step`, the last step of the run, by the clocks of supervisors that are alive.

    A supervisor that started after it only knows that it is older than the supervisor itself. So of those that know the
    step the largest age is right; the others have not seen the step yet.
    """
    ages = [
        (view.heartbeat.step == step, view.heartbeat.step_age_s + view.silent_s)
        for view in views
        if view.is_alive and view.heartbeat is not None and view.heartbeat.step_age_s is not None
    ]
    known = [age for knows, age in ages if knows]
    if not ages:
        return None
    return round(max(known) if known else min(age for _, age in ages), 1)


def _running_detail(alive: int, hosts: int, min_nodes: int, age_s: float | None) -> str:
    parts = []
    if alive < min_nodes:
        parts.append(f"waits for hosts: {alive} of {hosts} are alive, and it needs {min_nodes}")
    elif alive < hosts:
        parts.append(f"continues with {alive} of {hosts} hosts")
    if age_s is not None and age_s > SLOW_S:
        parts.append(f"no progress for {age_s:.0f} s")
    return "; ".join(parts)


def _idle(folder: JobFolder, views: list[HostView], now: float) -> tuple[JobState, str]:
    """State of a job of which no host is alive, and that has no outcome."""
    if any(view.heartbeat is not None for view in views):
        return JobState.LOST, "no host of the job sends heartbeats; launch it again to resume"
    if now - (folder.path / "job.json").stat().st_mtime > BEGIN_S:
        return JobState.LOST, "no host has started; see launch/host-*/supervisor.log"
    return JobState.PENDING, "no host has started yet"


def _host_status(address: str, view: HostView, *, is_over: bool) -> HostStatus:
    heartbeat = view.heartbeat
    if heartbeat is None:
        return HostStatus(address, "not started")
    if view.is_alive or heartbeat.is_last:
        return HostStatus(address, heartbeat.state)
    silent = f"no heartbeat for {view.silent_s:.0f} s" if math.isfinite(view.silent_s) else "no heartbeat"
    if view.has_process:
        why = "it is stopped, cannot write to the run directory, or has no network"
        return HostStatus(address, "silent", f"{silent}, but its supervisor (process {heartbeat.pid}) runs: {why}")
    return HostStatus(address, heartbeat.state if is_over else "lost", silent)


def _restarts(folder: JobFolder, index: int) -> int:
    """How often the ranks of a host were restarted since the job was launched: each generation has a folder."""
    launched_at = (folder.path / "job.json").stat().st_mtime
    generations = folder.host(index).glob("ranks-*")
    return max(0, sum(generation.stat().st_mtime >= launched_at for generation in generations) - 1)


def log_lines(
    run_dir: Path, *, follow: bool = False, rank: int | None = None, after: str = "", stamped: bool = False
) -> Iterator[str]:
    """Lines of all hosts in the order of their time stamps; with `follow`, until the job is over."""
    folder = JobFolder(run_dir)
    liveness = Liveness(folder)
    offsets: dict[Path, int] = {}
    ended: float | None = None
    while True:
        status = status_of(
            run_dir, liveness=liveness
        )  # read before the lines, so that none written before the end is missed
        ended = (ended or time.monotonic()) if status.state.is_final else None
        is_over = ended is not None and (not _is_closing(status) or time.monotonic() - ended > CLOSING_S)
        batch = [line for file in sorted(folder.path.glob("host-*/output.log")) for line in _new_lines(file, offsets)]
        for line in sorted(batch, key=lambda text: text[:27]):
            if line[:27] > after and _is_wanted(line, rank):
                yield line if stamped else line[28:]
        if not follow or is_over:
            return
        time.sleep(POLL_S)


def wait_until_closed(run_dir: Path) -> JobStatus:
    """Wait until no host writes into the folder of a job that has ended; returns the status then."""
    ended, liveness = time.monotonic(), Liveness(JobFolder(run_dir))
    while True:
        status = status_of(run_dir, liveness=liveness)
        is_closing = status.state.is_final and _is_closing(status)
        if not is_closing or time.monotonic() - ended > CLOSING_S:
            return status
        time.sleep(POLL_S)


def _is_closing(status: JobStatus) -> bool:
    """Whether a host that is alive is still ending the job: the outcome is written before the last log lines."""
    return any(not host.detail and host.state in ("starting", "running", "waiting") for host in status.hosts)


def _new_lines(file: Path, offsets: dict[Path, int]) -> list[str]:
    try:
        with file.open("rb") as source:
            source.seek(offsets.get(file, 0))
            data = source.read()
    except OSError:
        return []  # it may be readable again the next time
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


def tell_notes(output: str) -> None:
    """Show the user the notes in the output of one of these commands."""
    for line in output.splitlines():
        if line.startswith(NOTE):
            logger.warning("%s", line)


def remove_persisted(run_dir: Path, index: int) -> None:
    """Remove what would continue a run that was cancelled after a reboot."""
    from maskfleet.launch.persist.install import remove_at_end

    remove_at_end(run_dir, index, lambda what: print(what, file=sys.stderr))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="remote")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("what", choices=WHATS)
    parser.add_argument("index", type=int, nargs="?", default=0)
    parser.add_argument("--follow", action="store_true")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--after", default="")
    parser.add_argument("--installation", default="")
    asked = parser.parse_args(arguments)
    try:
        return _answer(asked)
    except MaskfleetError as error:
        print(error, file=sys.stderr)
    except OSError as error:
        print(f"{error.filename or asked.run_dir}: {error.strerror}", file=sys.stderr)
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
        case "persist":
            from maskfleet.launch.persist.install import Boot, install

            persisted = install(asked.run_dir, asked.index, boot=Boot.here(), env=os.environ)
            if persisted.note:
                print(f"{NOTE}{os.uname().nodename}: {persisted.note}")
        case "resume":
            from maskfleet.launch.persist.install import resume

            if asked.installation == installation_id():  # else: another host with the same home directory
                resume(asked.run_dir, asked.index, start=start)
        case "start":
            start(asked.run_dir, asked.index)
        case "restart":
            from maskfleet.launch.supervise.connectivity import restart_lost_host

            return restart_lost_host(JobFolder(asked.run_dir), asked.index)
        case "cancel":
            JobFolder(asked.run_dir).request_cancel()
        case "stop":
            left = stop(asked.run_dir, asked.index)
            remove_persisted(asked.run_dir, asked.index)
            if left:
                print(f"processes {left} cannot be killed", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
