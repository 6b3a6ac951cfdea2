"""The supervisor of one host: starts its ranks, reacts to lost hosts (lost_hosts.py) and continues without them.

It does not depend on the machine that launched the run. The supervisors of a job communicate only through its folder
(job_files.py). One of them leads: it decides which hosts take part in a generation, serves the store of the ranks,
declares the run done or failed, and restarts the supervisor of a lost host as soon as the host is reachable again. The
others start their ranks as it says and report how they ended (membership.py).
"""

from __future__ import annotations

import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from maskfleet.launch.job import LostTime
from maskfleet.launch.persist.install import remove_at_end
from maskfleet.launch.supervise.child import ABORT_GRACE_S, SAVE_GRACE_S, STOPPED_CODES, Child, grace_after, write_line
from maskfleet.launch.supervise.commands import STOPPED, local_address, start_child
from maskfleet.launch.supervise.connectivity import Connectivity, HostStarter
from maskfleet.launch.supervise.job_files import Endpoint, Job, JobFolder, event_line
from maskfleet.launch.supervise.lost_hosts import HEARTBEAT_S, LOST_S, HostMonitor
from maskfleet.launch.supervise.membership import (
    LEFT,
    Exit,
    Hosts,
    Interruption,
    Leadership,
    exits,
    first_failure,
    persistently,
    store_folder,
    write_exit,
)
from maskfleet.launch.supervise.processes import job_id, kill_all
from maskfleet.launch.supervise.state.heartbeat import Heartbeats, HostReport, report_second_supervisor
from maskfleet.launch.supervise.state.kept_lines import KeptLines
from maskfleet.launch.supervise.state.own_folder import FOLDER_GONE, OwnFolder
from maskfleet.system.lock import LockHeldError, locked
from maskfleet.system.machine import gpu_errors
from maskfleet.system.network import listening_socket

TICK_S = 0.5
LOST_GRACE_S = 1.0  # grace period for ranks that wait for others in vain: they can save nothing
EXIT_GRACE_S = 10.0  # grace period for a supervisor to exit after its last heartbeat
ALREADY_SUPERVISED = 4  # exit code of a second supervisor


class Supervisor:
    """Supervises host `index` of the job in `run_dir`."""

    def __init__(self, run_dir: Path, index: int, *, echo: BinaryIO | None = None) -> None:
        self.folder = JobFolder(run_dir)
        self.job: Job = self.folder.job()
        self.index, self.own = index, self.folder.host(index)
        self.own_folder = OwnFolder(self.folder, index)
        self.output = KeptLines(self.own / "output.log", echo=echo)
        self.events = KeptLines(self.own / "events.jsonl", durable=True)
        self.job_id = job_id(run_dir)
        self.monitor = HostMonitor(self.folder, self.job, index)
        self.connectivity = Connectivity(self.folder, self.job, index, hears_others=self.monitor.hears_others)
        self.starter = HostStarter(self.folder, self.job)
        self.restarts, self.state = 0, "starting"
        self.stop_requested = False  # by a signal, as when the machine shuts down
        self._listening: socket.socket | None = None  # for rank 0, which inherits it
        self.address = local_address(self.job, index)
        self.hosts = Hosts(self.folder, self.job, self.monitor, index, self.address)
        self.leadership = Leadership(self.hosts, log=self._log_event, give_up=self._stops)
        self.heartbeats = Heartbeats(
            self.folder,
            index,
            self.monitor,
            report=self._report,
            withheld=self._has_no_network,  # else the others would wait for ranks that they cannot reach
            say=self._log_event,
            kept=(self.output, self.events),
        )

    @property
    def generation(self) -> int:
        """How often the ranks were started with other hosts, or again."""
        return self.leadership.generation

    def run(self) -> int:
        """Run the job until it ends; returns its exit code."""
        kill_all(self.job_id)  # ranks of an earlier supervisor that was killed
        before = self.folder.endpoint()  # with the first heartbeat the leader may choose this host for the next one
        self.heartbeats.start()
        self.connectivity.start()
        self._log_event(f"supervisor of {self.hosts.named(self.index)} is up")
        self._take_over(before)
        checkpoint = self.folder.newest_checkpoint()
        while not self._is_over():
            try:
                self._await_network()
                self._elect()
                code = self._one_generation()
                if code is None:
                    continue
                newer = self.folder.newest_checkpoint()
                if newer > checkpoint:
                    checkpoint, self.restarts = newer, 0
                self._after_end(code)
            except OSError as error:  # of the shared folder; it may be back in a moment
                self._log_event(f"host {self.index} starts over: {error.strerror} ({error.filename})")
                kill_all(self.job_id)
                time.sleep(HEARTBEAT_S)
        return self._finish()

    def _one_generation(self) -> int | None:
        """Run the ranks of this host; returns their exit code, or None when the next generation is due."""
        leads = self.leadership.is_own()
        if not (self._choose_members() if leads else self._await_members()):
            return None
        endpoint = self.folder.endpoint()
        if endpoint is None or self.index not in endpoint.members or (self.job.starter == "mpirun" and not leads):
            self._follow_leader()
            return None
        self.state = "running"
        listening, self._listening = self._listening, None
        with listening or nullcontext():  # rank 0 has its own copy
            job = self.folder.known_job() or self.job  # a new host may have taken the place of a lost one
            child = start_child(job, self.folder, self.index, endpoint, self.hosts.reachable(), listening, self.output)
        try:
            return self._watch(child, endpoint)
        finally:
            shutil.rmtree(store_folder(self.folder, self.index, endpoint.generation), ignore_errors=True)

    def _choose_members(self) -> bool:
        """As the leader: wait for enough hosts, then write which of them take part; False if the run is over."""

        def complete() -> bool:
            self._report_host_changes()
            self.starter.start_all(self.monitor.lost())
            return self.hosts.are_complete()

        if not self._wait(lambda: self._must_stop() or complete(), self.job.join_s):
            found, needed = len(self.hosts.reachable()), self.job.min_nodes
            self._end("failed", 1, f"{found} of at least {needed} hosts were there for {self.job.join_s:.0f} s")
        if self._must_stop():
            return False
        members = list(self.hosts.reachable())
        try:
            self._listening = listening_socket(self.address, self.job.port) if len(members) > 1 else None
        except OSError as error:
            why = f"cannot listen on {self.address}, port {self.job.port}: {error.strerror or error}"
            self._end(
                "failed", 1, f"{self.hosts.named(self.index)} {why}; leave out rendezvous_port to take a free one"
            )
            return False
        port = self._listening.getsockname()[1] if self._listening is not None else 0
        self.leadership.begin(self.generation, port, members)
        return True

    def _await_members(self) -> bool:
        """Wait until the leader has chosen the hosts of this generation; False if it comes to nothing."""

        def chosen() -> bool:
            self._report_host_changes()
            known = self.folder.endpoint()
            return known is not None and known.generation == self.generation and bool(known.members)

        self._wait(lambda: self._must_stop() or chosen(), float("inf"))
        return not self._must_stop() and chosen()

    def _watch(self, child: Child, endpoint: Endpoint) -> int | None:
        """Wait for the end of the ranks, or stop them when another host makes it necessary."""
        while True:
            code = child.exit_code()
            if code is not None:
                child.clean_up()
                code = 128 + signal.SIGTERM if code == 0 and self._was_stopped() else code
                self._report_exit(code, child.failed_rank)
                return code
            if self._is_over():
                self._stop_at_the_end(child)
                return None
            interruption = self._interruption(endpoint)
            if interruption is not None:
                if interruption.regroup == "before":
                    self.leadership.begin(self.generation + 1)
                child.stop(interruption.grace_s)
                if interruption.regroup == "after":
                    self.leadership.begin(self.generation + 1)
                if interruption.code is not None:
                    self._report_exit(interruption.code, None)
                return interruption.code
            time.sleep(TICK_S)

    def _stop_at_the_end(self, child: Child) -> None:
        if self.own_folder.is_gone():
            child.stop(LOST_GRACE_S)
        elif self.folder.cancel_requested() or self.stop_requested:
            child.stop(SAVE_GRACE_S + ABORT_GRACE_S)
        else:  # another host has finished: this one is about to
            self._wait(lambda: child.exit_code() is not None, 30)
            child.stop(5)
        if self.stop_requested:
            self.state = LEFT  # before the others learn that its ranks ended: the next generation is without this host
            self.heartbeats.send()
            self._report_exit(128 + signal.SIGTERM, None)

    def _interruption(self, endpoint: Endpoint) -> Interruption | None:
        """Whether other hosts make it necessary to stop the ranks of this one."""
        self._report_host_changes()
        if self._is_cut_off() or self.leadership.is_superseded():
            return Interruption(LOST_GRACE_S)
        if not self.leadership.is_own():
            return None
        self.starter.start_all(self.monitor.lost())
        if any(self.monitor.is_lost(host) for host in endpoint.members):
            self._log_event("stopping the ranks that wait for a lost host; they resume from the last checkpoint")
            return Interruption(LOST_GRACE_S, regroup="before")
        if any(host not in endpoint.members for host in self.hosts.reachable()):
            return Interruption(SAVE_GRACE_S + ABORT_GRACE_S, regroup="after")
        failure = first_failure(exits(self.folder, endpoint.members, self.generation))
        return Interruption(grace_after(failure[1].code), code=failure[1].code) if failure is not None else None

    def _report_exit(self, code: int, rank: int | None) -> None:
        """Tell the leader how the ranks of this host ended; it decides what follows."""
        if self.own_folder.is_gone():
            return
        if code != 0:
            who = f"rank {rank}" if rank is not None else "the ranks"
            self._log_event(f"{who} on {self.hosts.named(self.index)} ended with code {code}")
            for line in gpu_errors():
                self._log_event(f"{self.hosts.named(self.index)}: {line}")
        end = Exit(code, rank, time.time())
        persistently(lambda: write_exit(self.folder, self.index, self.generation, end), give_up=self._stops)

    def _was_stopped(self) -> bool:
        """Whether a rank under mpirun got a stop request, which it hides from mpirun (rank.py)."""
        return self.job.starter == "mpirun" and any(self.folder.path.glob(f"host-*/{STOPPED}"))

    def _report_host_changes(self) -> None:
        """Log which hosts were lost or came back."""
        lost, back = self.monitor.poll()
        for host in lost:
            self._log_event(f"{self.hosts.named(host)} is lost: no sign of life for {LOST_S:.0f} s")
        for host in back:
            self._log_event(f"{self.hosts.named(host)} is back")

    def _follow_leader(self) -> None:
        """Wait while the ranks of this generation run without this host, or the leader's mpirun runs those of it."""
        self.state = "running" if self.job.starter == "mpirun" else "waiting"
        self._wait(self._decided, float("inf"))
        if not self._is_over():
            kill_all(self.job_id, up_to=self.generation)  # the leader's next mpirun may already have its daemon here

    def _after_end(self, code: int) -> None:
        """After the ranks of this host have ended: the leader declares the run done or failed, or restarts it."""
        self.state = "waiting"
        if not self.leadership.is_own():
            self._wait(self._decided, float("inf"))
            return
        if code == 0:
            self._end("done", 0)
            return
        endpoint = self.folder.endpoint()
        members = endpoint.members if endpoint is not None and self.job.starter != "mpirun" else [self.index]

        def ended() -> bool:
            self._report_host_changes()
            return self.hosts.have_ended(members, self.generation)

        self._wait(lambda: self._is_over() or ended(), LOST_S + 2 * HEARTBEAT_S)
        folder_failed = self.heartbeats.await_recovery(self._is_over)  # ranks fail while nobody can write
        if self._is_over():
            return
        failure = first_failure(exits(self.folder, members, self.generation))
        if failure is not None and len(members) > 1:
            host, end = failure
            code, who = end.code, f"rank {end.rank}" if end.rank is not None else "a rank"
            self._log_event(f"first to fail: {who} on {self.hosts.named(host)}, code {code}")
        asked = code in STOPPED_CODES  # as when a machine shuts down: that is no failure of the run
        if self.restarts >= self.job.max_restarts and not asked:
            attempts = f" after {self.restarts} restarts" if self.restarts else ""
            self._end("failed", 1, f"the ranks ended with code {code}{attempts}")
            return
        self.restarts += not (folder_failed or asked)
        why = "since a host leaves" if asked else f"restart {self.restarts} of {self.job.max_restarts}"
        self._log_event(f"restarting from the last checkpoint, {why}")
        self.leadership.begin(self.generation + 1)

    def _decided(self) -> bool:
        """Whether the leader has ended the run or begun another generation, or is lost."""
        self._report_host_changes()
        return self._must_stop()

    def _await_network(self) -> None:
        """Wait, without heartbeats, while this host is cut off from all others."""
        if self._is_cut_off():
            lacks = "reaches no other host" if self._has_no_network() else "cannot write to the shared folder"
            self._log_event(f"{self.hosts.named(self.index)} {lacks}, and waits")
            self._wait(lambda: self._is_over() or not self._is_cut_off(), float("inf"))

    def _elect(self) -> None:
        """Agree on the leader."""
        self.state = "waiting"

        def settled() -> bool:
            self.monitor.poll()
            return self.leadership.is_settled()

        self._wait(lambda: self._is_over() or settled(), float("inf"))

    def _take_over(self, known: Endpoint | None) -> None:
        """After an earlier supervisor of this host, whose ranks died with it: ask for the next generation."""
        if known is not None and known.host == self.index:
            self.leadership.begin(known.generation + 1)
        elif known is not None and self.index in known.members:
            self.leadership.generation = known.generation
            self._report_exit(128 + signal.SIGKILL, None)

    def _end(self, state: str, code: int, why: str = "") -> None:
        persistently(lambda: self.folder.write_outcome(state, code, why), give_up=self._stops)

    def _finish(self) -> int:
        kill_all(self.job_id)
        self.starter.close()
        if self.own_folder.is_gone():
            return FOLDER_GONE
        if self.folder.cancel_requested():
            self._end("cancelled", 128 + signal.SIGTERM)
        outcome = self.folder.outcome()
        if outcome is None:
            assert self.stop_requested
            self._log_event(f"host {self.index} stops: its supervisor got a signal, as when a machine shuts down")
            self.state = LEFT
            self.heartbeats.send_last()
            return 128 + signal.SIGTERM
        remove_at_end(self.folder.run_dir, self.index, self._log_event)
        self.heartbeats.send()  # it tells what no heartbeat has seen yet, which must not follow the last line
        self._log_event(f"the run is {outcome.state}{f': {outcome.why}' if outcome.why else ''}")
        self.state = outcome.state  # after the last line: `logs --follow` ends with this heartbeat
        self.heartbeats.send_last()
        return outcome.exit_code

    def _is_over(self) -> bool:
        return self.stop_requested or self.folder.is_over() or self.own_folder.is_gone()

    def _must_stop(self) -> bool:
        """Whether this generation is over for this host."""
        return self._is_over() or self._is_cut_off() or self.leadership.is_superseded()

    def _has_no_network(self) -> bool:
        return self.connectivity.is_cut_off(leads=self.leadership.is_own())

    def _is_cut_off(self) -> bool:
        """Whether the others continue without this host: it reaches none of them, or cannot write heartbeats."""
        return self._has_no_network() or self.heartbeats.are_missed()

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() >= deadline:
                return False
            time.sleep(TICK_S)
        return True

    def _stops(self) -> bool:
        return self.stop_requested

    def _log_event(self, what: str, failure: LostTime | None = None) -> None:
        self.events.add(event_line(what, failure))
        write_line(self.output, what)

    def _report(self) -> HostReport:
        return HostReport(self.state, self.generation, self.restarts, self.address, leads=self.leadership.is_own())


def supervise(run_dir: Path, index: int, *, lock_s: float = EXIT_GRACE_S, echo: BinaryIO | None = None) -> int:
    """Run the supervisor; if there is one, say so: that of an earlier launch may still be exiting."""
    own = JobFolder(run_dir).host(index)
    own.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(own / "lock", f"supervising {run_dir}", wait_s=lock_s))
        except LockHeldError as error:
            report_second_supervisor(JobFolder(run_dir), index, error.what)
            return ALREADY_SUPERVISED
        supervisor = Supervisor(run_dir, index, echo=echo)

        def request_stop(number: int, frame: FrameType | None) -> None:
            supervisor.stop_requested = True

        signal.signal(signal.SIGTERM, request_stop)
        signal.signal(signal.SIGINT, request_stop)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return supervisor.run()


if __name__ == "__main__":
    raise SystemExit(supervise(Path(sys.argv[1]), int(sys.argv[2])))
