"""The supervisor of one host: starts the ranks, reacts to lost hosts (lost_hosts.py) and continues without them.

It does not depend on the machine that launched the run. The supervisors of a job communicate only through its folder
(job_files.py). The one on the host that serves the rendezvous is the leader: it alone declares a run failed, and it
restarts the supervisor of a lost host as soon as the host is reachable again.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from maskfleet.errors import MaskfleetError
from maskfleet.launch.supervise.child import Child, write_line
from maskfleet.launch.supervise.commands import (
    JOIN_S,
    SAVE_GRACE_S,
    address_parts,
    environment,
    local_address,
    mpirun,
    torchrun,
)
from maskfleet.launch.supervise.connectivity import Connectivity
from maskfleet.launch.supervise.job_files import Endpoint, Heartbeat, Job, JobFolder
from maskfleet.launch.supervise.lost_hosts import HEARTBEAT_S, LOST_S, HostMonitor
from maskfleet.launch.supervise.processes import age_s, job_id, kill_all, processes_of, ranks_of, send_signal
from maskfleet.launch.supervise.rank import STOPPED
from maskfleet.system.lock import LockHeldError, locked
from maskfleet.system.process import Running, remote_line, start

TICK_S = 0.5
RETRY_S = 10.0  # between attempts to reach a lost host
ABORT_GRACE_S = 10.0  # grace period for ranks to exit when they have nothing to save
EXIT_GRACE_S = 10.0  # grace period for a supervisor to exit after its last heartbeat
REJOIN_S = 30.0  # how long a follower waits for the leader's decision before it rejoins


class Supervisor:
    """Supervises host `index` of the job in `run_dir`."""

    def __init__(self, run_dir: Path, index: int) -> None:
        self.folder = JobFolder(run_dir)
        self.job: Job = self.folder.job()
        self.index = index
        self.own = self.folder.host(index)
        self.output = self.own / "output.log"
        self.job_id = job_id(run_dir)
        self.monitor = HostMonitor(self.folder, self.job, index)
        self.connectivity = Connectivity(self.folder, self.job, index)
        self.generation = 0
        self.restarts = 0
        self.state = "starting"
        self.hosts_changed = False  # whether hosts were lost or came back in this generation
        self.stop_requested = False  # by a signal, as when the machine shuts down
        self._restart_attempts: dict[int, tuple[Running, float]] = {}
        self._mpi_hosts: dict[int, str] = {}  # hosts of the running mpirun
        self._heartbeat_lock = threading.Lock()
        self.address = local_address(self.job, index)

    def run(self) -> int:
        """Run the job until it ends; returns its exit code."""
        kill_all(self.job_id)  # ranks of an earlier supervisor that was killed
        threading.Thread(target=self._send_heartbeats, daemon=True).start()
        self.connectivity.start()
        self._log_event(f"supervisor of host {self.index} ({self.job.hosts[self.index].address}) is up")
        checkpoint = self.folder.newest_checkpoint()
        while not self._is_over():
            self._await_network()
            self._elect()
            code = self._one_generation()
            if code is None:
                continue
            if code == 0:
                self.folder.write_outcome("done", 0)
                break
            newer = self.folder.newest_checkpoint()
            if newer > checkpoint:
                checkpoint, self.restarts = newer, 0
            self._after_failure(code)
        return self._finish()

    def _one_generation(self) -> int | None:
        """Run the ranks; returns the exit code of torchrun or mpirun, or None when the next generation is due."""
        if self.job.starter == "mpirun" and not self._is_leader():
            return self._follow_leader()
        if self.job.starter == "mpirun" and not self._enough_hosts():
            return None if self._is_over() else 1
        self.state = "running"
        child = self._start()
        while True:
            code = child.exit_code()
            if code is not None:
                child.clean_up()
                return 128 + signal.SIGTERM if code == 0 and self._was_stopped() else code
            if self._is_over():
                if self.folder.cancel_requested() or self.stop_requested:
                    child.stop(SAVE_GRACE_S + ABORT_GRACE_S)
                else:  # another host has finished: this one is about to
                    self._wait(lambda: child.exit_code() is not None, 30)
                    child.stop(5)
                return None
            grace_s = self._check_hosts()
            if grace_s is not None:
                child.stop(grace_s)
                return None
            time.sleep(TICK_S)

    def _enough_hosts(self) -> bool:
        """Wait for hosts that have not started, and for lost ones if too few are left, as torchrun does by itself."""

        def complete() -> bool:
            self._report_host_changes()
            self._restart_lost_hosts()
            return self._is_over() or len(self._reachable()) == len(self.monitor.alive())

        def enough() -> bool:
            return complete() and (self._is_over() or len(self._reachable()) >= self.job.min_nodes)

        return self._wait(enough, JOIN_S) and not self._is_over()

    def _start(self) -> Child:
        logs = self.own / f"ranks-{self.generation}"
        logs.mkdir(parents=True, exist_ok=True)
        os.utime(logs)  # the folder may be left from before the job was launched again
        run_dir, endpoint = self.folder.run_dir, self.folder.endpoint()
        assert endpoint is not None
        env = environment(self.job, run_dir, self.index, os.environ)
        if self.job.starter == "mpirun":
            if os.getuid() == 0:
                env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            self._mpi_hosts = self._reachable()
            for stale in self.folder.path.glob(f"host-*/{STOPPED}"):
                stale.unlink(missing_ok=True)
            argv = mpirun(self.job, run_dir, logs, hosts=self._mpi_hosts, generation=self.generation)
        else:
            argv = torchrun(self.job, run_dir, logs, index=self.index, endpoint=endpoint)
        return Child(argv, cwd=Path(self.job.cwd).expanduser(), env=env, output=self.output, job=self.job_id)

    def _was_stopped(self) -> bool:
        """Whether a rank under mpirun got a stop request, which it hides from mpirun (rank.py)."""
        return any(self.folder.path.glob(f"host-*/{STOPPED}"))

    def _check_hosts(self) -> float | None:
        """React to hosts that were lost or came back; returns a grace period if the ranks must be restarted."""
        lost = self._report_host_changes()
        if self._is_leader():
            self._restart_lost_hosts()
        if self._is_cut_off() or self._is_superseded():
            return ABORT_GRACE_S
        if self.job.starter == "mpirun":
            missing = any(host in self._mpi_hosts for host in lost)
            if missing or any(host not in self._mpi_hosts for host in self._reachable()):
                self.folder.write_endpoint(Endpoint(self.generation + 1, self.index, self.address))
                return ABORT_GRACE_S if missing else SAVE_GRACE_S + ABORT_GRACE_S
        elif lost:
            self._kill_stuck_ranks(max(self.monitor.silent_s(host) for host in lost))
        return None

    def _report_host_changes(self) -> list[int]:
        """Log which hosts were lost or came back; returns the lost ones."""
        lost, back = self.monitor.poll()
        for host in lost:
            self._log_event(f"host {host} ({self.job.hosts[host].address}) is lost: no sign of life for {LOST_S:.0f} s")
        for host in back:
            self._log_event(f"host {host} ({self.job.hosts[host].address}) is back")
        self.hosts_changed |= bool(lost or back)
        return lost

    def _kill_stuck_ranks(self, silent_s: float) -> None:
        """Kill ranks that started before a host was lost: they, and torchrun, might wait for it forever."""
        stuck = [pid for pid in ranks_of(processes_of(self.job_id)) if (age_s(pid) or 0) > silent_s]
        if stuck:
            self._log_event(
                f"killing {len(stuck)} ranks that wait for the lost host; they resume from the last checkpoint"
            )
            send_signal(stuck)

    def _follow_leader(self) -> int | None:
        """Wait while the leader's mpirun runs the ranks of this host over SSH."""
        self.state = "running"
        while not self._is_over():
            self.monitor.poll()
            if self._is_superseded():
                kill_all(self.job_id)
                return None
            time.sleep(TICK_S)
        return None

    def _after_failure(self, code: int) -> None:
        """Restart or give up after torchrun or mpirun exited with `code`; only the leader declares the run failed."""
        self.state = "waiting"
        self._log_event(f"the ranks on host {self.index} ended with code {code}")
        if not self._is_leader():
            self._await_leader(code)
            return
        self._wait(
            lambda: bool(self._report_host_changes()) or self._is_over(),
            LOST_S + 2 * HEARTBEAT_S if len(self.job.hosts) > 1 else 0,
        )
        if self._is_over():
            return
        can_recover = self.job.starter == "mpirun" or self.hosts_changed or code >= 128
        if not can_recover or self.restarts >= self.job.max_restarts:
            attempts = f" after {self.restarts} restarts" if self.restarts else ""
            self.folder.write_outcome("failed", code, f"the ranks ended with code {code}{attempts}")
            return
        self.restarts += 1
        self.hosts_changed = False
        self._log_event(f"restarting from the last checkpoint, restart {self.restarts} of {self.job.max_restarts}")
        self.folder.write_endpoint(Endpoint(self.generation + 1, self.index, self.address))

    def _await_leader(self, code: int) -> None:
        """Wait for the leader's decision; rejoining without it counts as a restart."""

        def decided() -> bool:
            self.monitor.poll()
            return self._is_over() or self._is_superseded()

        if self._wait(decided, REJOIN_S):
            return
        if self.restarts >= self.job.max_restarts:
            self.state = "failed"
            self._log_event(f"host {self.index} gives up after {self.restarts} restarts")
            self._wait(decided, float("inf"))
            return
        self.restarts += 1
        self._log_event(f"host {self.index} rejoins, restart {self.restarts} of {self.job.max_restarts}")

    def _await_network(self) -> None:
        """Wait, without heartbeats, while this host is cut off from all others."""
        if self._is_cut_off():
            self._log_event(
                f"host {self.index} ({self.job.hosts[self.index].address}) reaches no other host, and waits"
            )
            self._wait(lambda: self._is_over() or not self._is_cut_off(), float("inf"))

    def _elect(self) -> None:
        """Agree on the leader: the previous one, or the first host alive if that one is lost."""
        self.state = "waiting"
        while not self._is_over():
            self.monitor.poll()
            known = self.folder.endpoint()
            if known is not None and (known.host == self.index or not self.monitor.is_lost(known.host)):
                self.generation = known.generation
                return
            if self.monitor.alive()[0] == self.index:
                generation = known.generation + 1 if known is not None else 0
                if known is not None:
                    self.hosts_changed = True
                    self._log_event(f"host {self.index} is the new leader, instead of host {known.host}")
                self.folder.write_endpoint(Endpoint(generation, self.index, self.address))
                self.generation = generation
                return
            time.sleep(TICK_S)

    def _restart_lost_hosts(self) -> None:
        """Start the supervisor of each lost host over SSH, as soon as the host is reachable."""
        for host in self.monitor.others():
            attempt = self._restart_attempts.get(host)
            if not self.monitor.is_lost(host):
                continue
            if attempt is not None and time.monotonic() - attempt[1] < RETRY_S:
                continue
            if attempt is not None:
                attempt[0].kill()
            argv = ["ssh", "-oBatchMode=yes", "-oConnectTimeout=5", "-oServerAliveInterval=3"]
            line = remote_line(["sh", str(self.folder.path / "remote"), "start", str(host)])
            argv += [*ssh_target(self.job.hosts[host].address), line]
            try:
                self._restart_attempts[host] = (start(argv), time.monotonic())
            except MaskfleetError:
                return  # without an ssh client only the launching machine can restart hosts

    def _finish(self) -> int:
        kill_all(self.job_id)
        for attempt, _ in self._restart_attempts.values():
            attempt.kill()
        if self.folder.cancel_requested():
            self.folder.write_outcome("cancelled", 128 + signal.SIGTERM)
        outcome = self.folder.outcome()
        if outcome is None:
            assert self.stop_requested
            self._log_event(f"host {self.index} stops: its supervisor got a signal, as when a machine shuts down")
            self.state = "left"
            self._send_heartbeat()
            return 128 + signal.SIGTERM
        self._log_event(f"the run is {outcome['state']}")
        self.state = str(outcome["state"])  # after the last line: `logs --follow` ends with this heartbeat
        self._send_heartbeat()
        return int(outcome["exit_code"])

    def _reachable(self) -> dict[int, str]:
        """Addresses of this host, first, and of all others that have started and are not lost."""
        found = {self.index: self.address}
        for host in self.monitor.others():
            heartbeat = self.folder.heartbeat(host)
            if heartbeat is not None and not self.monitor.is_lost(host):
                found[host] = heartbeat.address
        return found

    def _is_over(self) -> bool:
        return self.stop_requested or self.folder.cancel_requested() or self.folder.outcome() is not None

    def _is_leader(self) -> bool:
        known = self.folder.endpoint()
        return (known.host if known is not None else 0) == self.index

    def _is_cut_off(self) -> bool:
        return self.connectivity.is_cut_off(leads=self._is_leader())

    def _is_superseded(self) -> bool:
        """Whether the leader is lost or has begun another generation."""
        known = self.folder.endpoint()
        if known is None:
            return self.monitor.is_lost(0)
        return self.monitor.is_lost(known.host) or known.generation != self.generation

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() >= deadline:
                return False
            time.sleep(TICK_S)
        return True

    def _log_event(self, what: str) -> None:
        self.folder.add_event(self.index, what)
        write_line(self.output, what)

    def _send_heartbeats(self) -> None:
        while True:
            if not self._is_cut_off():  # else the others would wait for ranks that they cannot reach
                self._send_heartbeat()
            time.sleep(HEARTBEAT_S)

    def _send_heartbeat(self) -> None:
        with self._heartbeat_lock:  # two threads write heartbeats, and the last one must hold the last state
            before = self.folder.heartbeat(self.index)
            heartbeat = Heartbeat(
                count=before.count + 1 if before is not None else 1,
                pid=os.getpid(),
                state=self.state,
                generation=self.generation,
                restarts=self.restarts,
                time=time.time(),
                address=self.address,
                lost=self.monitor.lost(),
            )
            self.folder.write_heartbeat(self.index, heartbeat)


def ssh_target(address: str) -> list[str]:
    """`user@host:port` as arguments of ssh; a host name cannot be read as an option."""
    user, host, port = address_parts(address)
    return [*(["-p", str(port)] if port else []), "--", f"{user}@{host}" if user else host]


def supervise(run_dir: Path, index: int) -> int:
    """Run the supervisor unless there is one; that of an earlier launch may still be exiting."""
    own = JobFolder(run_dir).host(index)
    own.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(own / "lock", f"supervising {run_dir}", wait_s=EXIT_GRACE_S))
        except LockHeldError:
            return 0
        supervisor = Supervisor(run_dir, index)

        def request_stop(number: int, frame: FrameType | None) -> None:
            supervisor.stop_requested = True

        signal.signal(signal.SIGTERM, request_stop)
        signal.signal(signal.SIGINT, request_stop)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return supervisor.run()


if __name__ == "__main__":
    raise SystemExit(supervise(Path(sys.argv[1]), int(sys.argv[2])))
