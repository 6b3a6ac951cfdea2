"""One on each host of a job, from its start to its end: starts the ranks, notices lost hosts, goes on without them.

It needs nobody: the laptop that launched the run may be gone. The supervisors talk through the job's folder only
(jobdir.py). One of them, on the host that keeps the rendezvous, leads: it alone says that a run has failed, and it
starts the supervisor of a lost host anew as soon as the host answers again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from maskfleet.launch.supervise.child import Child, write_line
from maskfleet.launch.supervise.commands import JOIN_S, SAVE_S, environment, local_address, mpirun, torchrun
from maskfleet.launch.supervise.connectivity import Reach
from maskfleet.launch.supervise.job_files import Beat, Endpoint, Job, JobFolder, locked
from maskfleet.launch.supervise.lost_hosts import BEAT_S, LOST_S, Peers
from maskfleet.launch.supervise.processes import age_s, end, mark_of, marked, ranks_of, sweep
from maskfleet.launch.supervise.rank import STOPPED
from maskfleet.system.process import remote_line

TICK_S = 0.5
RETRY_S = 10.0  # between attempts to reach a lost host
BROKEN_S = 10.0  # that long ranks may take to end when they have nothing to save
LEAVING_S = 10.0  # that long a supervisor may take to end after its last beat
REJOIN_S = 30.0  # that long a follower waits for the leader's word before it joins again


class Supervisor:
    """Of host `index` of the job in `run_dir`."""

    def __init__(self, run_dir: Path, index: int) -> None:
        self.folder = JobFolder(run_dir)
        self.job: Job = self.folder.job()
        self.index = index
        self.own = self.folder.host(index)
        self.output = self.own / "output.log"
        self.mark = mark_of(run_dir)
        self.peers = Peers(self.folder, self.job, index)
        self.reach = Reach(self.folder, self.job, index)
        self.generation = 0
        self.restarts = 0
        self.state = "starting"
        self.changed_members = False  # whether hosts were lost or came back in this generation
        self.leaves = False  # whether this host is about to go down, and the run with it or without it
        self._calls: dict[int, tuple[subprocess.Popen[bytes], float]] = {}
        self._mpi_hosts: dict[int, str] = {}  # what the running mpirun spans
        self._beating = threading.Lock()
        self.address = local_address(self.job, index)

    def run(self) -> int:
        """Until the run ends; the answer is its exit code."""
        sweep(self.mark)  # ranks of an earlier supervisor that was killed
        threading.Thread(target=self._beat_forever, daemon=True).start()
        self.reach.watch()
        self._say(f"supervisor of host {self.index} ({self.job.hosts[self.index].address}) is up")
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
        """Run the ranks; the answer is the starter's exit code, or None when the next generation is due."""
        if self.job.starter == "mpirun" and not self._leads():
            return self._serve()
        if self.job.starter == "mpirun" and not self._enough_hosts():
            return None if self._is_over() else 1
        self.state = "running"
        child = self._start()
        while True:
            code = child.exit_code()
            if code is not None:
                child.clean()
                return 128 + signal.SIGTERM if code == 0 and self._was_stopped() else code
            if self._is_over():
                if self.folder.wants_cancel() or self.leaves:
                    child.stop(SAVE_S + BROKEN_S)
                else:  # another host is done already: this one is about to be
                    self._wait(lambda: child.exit_code() is not None, 30)
                    child.stop(5)
                return None
            patience_s = self._look()
            if patience_s is not None:
                child.stop(patience_s)
                return None
            time.sleep(TICK_S)

    def _enough_hosts(self) -> bool:
        """Wait for hosts that have still to begin, and for a lost one if too few are left, as torchrun does itself."""

        def complete() -> bool:
            self._note_members()
            self._call_lost_hosts()
            return self._is_over() or len(self._reachable()) == len(self.peers.alive())

        def enough() -> bool:
            return complete() and (self._is_over() or len(self._reachable()) >= self.job.min_nodes)

        return self._wait(enough, JOIN_S) and not self._is_over()

    def _start(self) -> Child:
        logs = self.own / f"ranks-{self.generation}"
        logs.mkdir(parents=True, exist_ok=True)
        os.utime(logs)  # there may have been such a generation before the job was launched again
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
        return Child(argv, cwd=Path(self.job.cwd).expanduser(), env=env, output=self.output, mark=self.mark)

    def _was_stopped(self) -> bool:
        """Whether a rank under mpirun was asked to stop: it hides that from mpirun."""
        return any(self.folder.path.glob(f"host-*/{STOPPED}"))

    def _look(self) -> float | None:
        """Act on hosts that were lost or came back; seconds to let the ranks end, if they must be started anew."""
        lost = self._note_members()
        if self._leads():
            self._call_lost_hosts()
        known = self.folder.endpoint()
        if self._is_cut_off() or self._endpoint_lost() or (known is not None and known.generation != self.generation):
            return BROKEN_S
        if self.job.starter == "mpirun":
            missing = any(host in self._mpi_hosts for host in lost)
            if missing or any(host not in self._mpi_hosts for host in self._reachable()):
                self.folder.write_endpoint(Endpoint(self.generation + 1, self.index, self.address))
                return BROKEN_S if missing else SAVE_S + BROKEN_S
        elif lost:
            self._wake_ranks(max(self.peers.silent_s(host) for host in lost))
        return None

    def _note_members(self) -> list[int]:
        """Say which hosts were lost or came back; the answer is who was lost."""
        lost, back = self.peers.look()
        for host in lost:
            self._say(f"host {host} ({self.job.hosts[host].address}) is lost: no sign of life for {LOST_S:.0f} s")
        for host in back:
            self._say(f"host {host} ({self.job.hosts[host].address}) is back")
        self.changed_members |= bool(lost or back)
        return lost

    def _wake_ranks(self, silent_s: float) -> None:
        """Kill ranks that began before a host fell silent: they may wait for it for ever, and torchrun would too."""
        stuck = [pid for pid in ranks_of(marked(self.mark)) if (age_s(pid) or 0) > silent_s]
        if stuck:
            self._say(f"ending {len(stuck)} ranks that wait for the lost host; they go on from the last checkpoint")
            end(stuck)

    def _serve(self) -> int | None:
        """A follower under mpirun has no starter: the leader's reaches its ranks by SSH."""
        self.state = "running"
        while not self._is_over():
            self.peers.look()
            known = self.folder.endpoint()
            if self._endpoint_lost() or (known is not None and known.generation != self.generation):
                sweep(self.mark)
                return None
            time.sleep(TICK_S)
        return None

    def _after_failure(self, code: int) -> None:
        """Whether to go on after a starter ended with `code`; only the leader may say that the run has failed."""
        self.state = "waiting"
        self._say(f"the ranks on host {self.index} ended with code {code}")
        if not self._leads():
            self._await_leader(code)
            return
        self._wait(
            lambda: bool(self._note_members()) or self._is_over(), LOST_S + 2 * BEAT_S if len(self.job.hosts) > 1 else 0
        )
        if self._is_over():
            return
        worth = self.job.starter == "mpirun" or self.changed_members or code >= 128
        if not worth or self.restarts >= self.job.max_restarts:
            budget = f" after {self.restarts} restarts" if self.restarts else ""
            self.folder.write_outcome("failed", code, f"the ranks ended with code {code}{budget}")
            return
        self.restarts += 1
        self.changed_members = False
        self._say(f"starting again from the last checkpoint, restart {self.restarts} of {self.job.max_restarts}")
        self.folder.write_endpoint(Endpoint(self.generation + 1, self.index, self.address))

    def _await_leader(self, code: int) -> None:
        """Until the leader decides; joining again by oneself costs a restart."""
        generation = self.generation

        def decided() -> bool:
            known = self.folder.endpoint()
            self.peers.look()
            return self._is_over() or self._endpoint_lost() or (known is not None and known.generation != generation)

        if self._wait(decided, REJOIN_S):
            return
        if self.restarts >= self.job.max_restarts:
            self.state = "failed"
            self._say(f"host {self.index} stays out after {self.restarts} restarts")
            self._wait(decided, float("inf"))
            return
        self.restarts += 1
        self._say(f"host {self.index} joins again, restart {self.restarts} of {self.job.max_restarts}")

    def _await_network(self) -> None:
        """A host that reaches no other stays out, and silent, until it does."""
        if self._is_cut_off():
            self._say(f"host {self.index} ({self.job.hosts[self.index].address}) reaches no other host, and stays out")
            self._wait(lambda: self._is_over() or not self._is_cut_off(), float("inf"))

    def _elect(self) -> None:
        """Agree on the host that keeps the rendezvous: the one it was, or the first alive if that one is lost."""
        self.state = "waiting"
        while not self._is_over():
            self.peers.look()
            known = self.folder.endpoint()
            if known is not None and (known.host == self.index or not self.peers.is_lost(known.host)):
                self.generation = known.generation
                return
            if self.peers.alive()[0] == self.index:
                generation = known.generation + 1 if known is not None else 0
                if known is not None:
                    self.changed_members = True
                    self._say(f"host {self.index} leads from now on, in place of host {known.host}")
                self.folder.write_endpoint(Endpoint(generation, self.index, self.address))
                self.generation = generation
                return
            time.sleep(TICK_S)

    def _call_lost_hosts(self) -> None:
        """Start the supervisor of each lost host, as soon as it can be reached from here."""
        for host in self.peers.others():
            call = self._calls.get(host)
            if not self.peers.is_lost(host):
                continue
            if call is not None and time.monotonic() - call[1] < RETRY_S:
                continue
            if call is not None and call[0].poll() is None:
                call[0].kill()
                call[0].wait()
            argv = ["ssh", "-oBatchMode=yes", "-oConnectTimeout=5", "-oServerAliveInterval=3"]
            command = ["sh", str(self.folder.path / "remote"), "start", str(host)]
            line = remote_line(command)
            argv += [*ssh_target(self.job.hosts[host].address), line]
            try:
                process = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
            except FileNotFoundError:
                return  # without an ssh client only the launching side can bring hosts back
            self._calls[host] = (process, time.monotonic())

    def _finish(self) -> int:
        sweep(self.mark)
        for call, _ in self._calls.values():
            if call.poll() is None:
                call.kill()
                call.wait()
        if self.folder.wants_cancel():
            self.folder.write_outcome("cancelled", 128 + signal.SIGTERM)
        outcome = self.folder.outcome()
        if outcome is None:
            assert self.leaves
            self._say(f"host {self.index} leaves: its supervisor was told to stop, as when a machine goes down")
            self.state = "left"
            self._beat()
            return 128 + signal.SIGTERM
        self._say(f"the run is {outcome['state']}")
        self.state = str(outcome["state"])  # after the last line: who follows the log leaves when the beat says so
        self._beat()
        return int(outcome["exit_code"])

    def _reachable(self) -> dict[int, str]:
        """Addresses of this host, first, and of all others that have begun and are not lost."""
        found = {self.index: self.address}
        for host in self.peers.others():
            beat = self.folder.beat(host)
            if beat is not None and not self.peers.is_lost(host):
                found[host] = beat.address
        return found

    def _is_over(self) -> bool:
        return self.leaves or self.folder.wants_cancel() or self.folder.outcome() is not None

    def _leads(self) -> bool:
        return self._endpoint_host() == self.index

    def _endpoint_host(self) -> int:
        known = self.folder.endpoint()
        return known.host if known is not None else 0

    def _is_cut_off(self) -> bool:
        return self.reach.is_cut_off(leads=self._leads())

    def _endpoint_lost(self) -> bool:
        return self.peers.is_lost(self._endpoint_host())

    def _wait(self, condition: object, timeout_s: float) -> bool:
        assert callable(condition)
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() >= deadline:
                return False
            time.sleep(TICK_S)
        return True

    def _say(self, what: str) -> None:
        self.folder.add_event(self.index, what)
        write_line(self.output, what)

    def _beat_forever(self) -> None:
        while True:
            if not self._is_cut_off():  # or the others would wait for ranks that they cannot reach
                self._beat()
            time.sleep(BEAT_S)

    def _beat(self) -> None:
        with self._beating:  # two threads beat, and the last beat must tell the last state
            before = self.folder.beat(self.index)
            beat = Beat(
                count=before.count + 1 if before is not None else 1,
                pid=os.getpid(),
                state=self.state,
                generation=self.generation,
                restarts=self.restarts,
                time=time.time(),
                address=self.address,
                lost=self.peers.lost(),
            )
            self.folder.write_beat(self.index, beat)


def ssh_target(address: str) -> list[str]:
    """`user@host:port` as arguments of the ssh program; a name that looks like an option stays a name."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit() and not (":" in host and not host.endswith("]")):
        return ["-p", port, "--", host.replace("[", "").replace("]", "")]
    return ["--", address]


def supervise(run_dir: Path, index: int) -> int:
    """Be the supervisor, unless there is one; that of a run which is launched again may be just about to leave."""
    own = JobFolder(run_dir).host(index)
    own.mkdir(parents=True, exist_ok=True)
    with (own / "lock").open("w") as lock:
        if not locked(lock, within_s=LEAVING_S):
            return 0
        supervisor = Supervisor(run_dir, index)

        def stop(number: int, frame: FrameType | None) -> None:
            supervisor.leaves = True

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return supervisor.run()


if __name__ == "__main__":
    raise SystemExit(supervise(Path(sys.argv[1]), int(sys.argv[2])))
