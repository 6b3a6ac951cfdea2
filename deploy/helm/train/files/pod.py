"""What the pods of a job do beside mpirun and sshd, with Python's standard library alone.

wait LIMIT_S PORT MEET HOST...  until every worker answers, and no rank of an earlier launcher is left
check PORT HOST...              whether every worker answers now
launch HOSTFILE COMMAND...      mpirun; if it fails, also which workers were killed, for a log that outlives their pods
rank COMMAND...                 one rank, which saves when it is asked to stop
killed                          how the container of this pod that ran ranks before the present one was killed
leave LIMIT_S                   ask the ranks of this pod, or mpirun, to stop, and wait for them
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import NamedTuple

SSH = ("ssh", "-F", "/etc/maskfleet/ssh_config", "-o", "ConnectTimeout=5", "-o", "ConnectionAttempts=1")
CGROUP = Path("/sys/fs/cgroup")
RECORD = Path("/home/fleet/memory-record")  # on a volume of the pod, so it outlives a container that is killed
SAMPLE_S = 0.25
NEAR_LIMIT = 0.8  # of the memory limit: more than that is not allocated between two samples
ASK_S = 30.0  # for a worker whose container is being restarted
GIB = 2**30


def silent(port: int, hosts: Sequence[str], timeout_s: float = 5) -> dict[str, str]:
    """Why each host that does not greet as SSH on `port` does not; empty when all do."""
    found = {}
    for host in hosts:
        try:
            with socket.create_connection((host, port), timeout=timeout_s) as connection:
                connection.settimeout(timeout_s)
                if not connection.recv(4).startswith(b"SSH-"):
                    found[host] = "does not speak SSH"
        except OSError as error:
            found[host] = str(error)
    return found


def wait(limit_s: float, port: int, meet: int, hosts: Sequence[str]) -> int:
    """0 as soon as every host answers and nobody listens on port `meet` of the first; 1 after `limit_s`.

    There the ranks meet. Those of a launcher that was told to leave save until its end, and its successor is here
    long before: a rank that found the port taken would cost an attempt.
    """
    deadline = time.monotonic() + limit_s
    said: list[str] | None = None
    while True:
        missing = silent(port, hosts)
        if not missing and not _listens(hosts[0], meet):
            print(f"all {len(hosts)} workers answer", flush=True)
            return 0
        if missing:
            why = f"no answer from {_listed(missing)}"
            waiting = f"waiting for {len(missing)} of {len(hosts)} workers: {_listed(missing)}"
        else:
            why = f"ranks of an earlier launcher are left: port {meet} of {hosts[0]} is in use"
            waiting = "waiting for the ranks of an earlier launcher, which save and end"
        if list(missing) != said:
            print(waiting, flush=True)
        said = list(missing)
        if time.monotonic() >= deadline:
            print(f"{why} after {limit_s:.0f} s", file=sys.stderr, flush=True)
            return 1
        time.sleep(2)


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


def check(port: int, hosts: Sequence[str]) -> int:
    """0 if every host answers now, else 1."""
    missing = silent(port, hosts, timeout_s=3)
    if missing:
        print(f"no answer from {_listed(missing)}")
    return 1 if missing else 0


def rank(command: Sequence[str]) -> int:
    """Run `command` and return its exit code; the first SIGUSR1 is forwarded as SIGTERM, a request to save and stop.

    After such a stop mpirun would kill the ranks that are still saving as soon as one exits with anything but 0. So
    only rank 0, which writes the checkpoint, exits with its real code; the job then does not count as done.
    """
    asked: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if len(asked) == 1:  # a second SIGTERM would end the trainer before it has saved
            trainer.send_signal(signal.SIGTERM)

    def of_the_trainer() -> None:
        # mpirun signals whole process groups: its own SIGTERM reaches the trainer by itself, SIGUSR1 must not.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])

    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # it waits until there is somebody to pass it on to
    signal.signal(signal.SIGUSR1, stop)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    before = oom_kills()
    trainer = subprocess.Popen(list(command), preexec_fn=of_the_trainer)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
    with Sampler(is_needed=os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0") == "0"):
        code = trainer.wait()
    if code == -signal.SIGKILL and oom_kills() > before:
        print(f"the rank was OOMKilled: the memory limit is {limit_bytes() / GIB:.1f} GiB", file=sys.stderr, flush=True)
    code = 128 - code if code < 0 else code
    was_stopped = asked and code == 128 + signal.SIGTERM
    return 0 if was_stopped and os.environ.get("OMPI_COMM_WORLD_RANK", "0") != "0" else code


class Sampler:
    """Writes the memory in use to RECORD while it is entered; a record that is left tells of a killed container."""

    def __init__(self, *, is_needed: bool) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True) if is_needed else None

    def __enter__(self) -> None:
        if self._thread is not None:
            self._thread.start()

    def __exit__(self, *error: object) -> None:
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            RECORD.unlink(missing_ok=True)

    def _sample(self) -> None:
        fresh = RECORD.with_suffix(".new")
        while not self._over.wait(SAMPLE_S):
            try:
                fresh.write_text(f"{container()} {used_bytes()} {limit_bytes()}")
                fresh.replace(RECORD)
            except OSError:
                return  # the volume is full; the rank matters more than the record


def killed() -> int:
    """Print how the previous container of this pod was killed while it ran ranks; nothing if it was not."""
    try:
        former, used, limit = map(int, RECORD.read_text().split())
    except (OSError, ValueError):
        return 0
    if former != container():
        figures = f"{used / GIB:.1f} of its limit of {limit / GIB:.1f} GiB" if limit else f"{used / GIB:.1f} GiB"
        how = "OOMKilled" if limit and used >= NEAR_LIMIT * limit else "killed"
        print(f"{how}: its container was restarted, shortly before it used {figures}")
    return 0


def container() -> int:
    """When this container was started, in ticks of the machine; no two containers of a pod share it."""
    return int(Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19])


def used_bytes() -> int:
    """Memory of the container that the kernel cannot take back: the page cache does not count."""
    stat = _numbers("memory.stat")
    return sum(stat.get(name, 0) for name in ("anon", "shmem", "slab_unreclaimable", "kernel_stack", "pagetables"))


def limit_bytes() -> int:
    """The container's memory limit; 0 if there is none."""
    try:
        text = (CGROUP / "memory.max").read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0


def oom_kills() -> int:
    """How many processes of this container the kernel has killed because memory ran out."""
    return _numbers("memory.events").get("oom_kill", 0)


def _numbers(name: str) -> dict[str, int]:
    try:
        lines = (CGROUP / name).read_text().splitlines()
    except OSError:
        return {}  # not cgroup v2
    return {key: int(value) for key, _, value in (line.partition(" ") for line in lines) if value.isdigit()}


def launch(hostfile: Path, command: Sequence[str]) -> int:
    """Run mpirun and return its exit code; if it fails by itself, print which workers were killed.

    The operator deletes the workers of a failed job, and with their pods the only trace of why they were killed.
    """
    asked: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if mpirun.poll() is not None:
            os._exit(128 + number)  # while it asks the workers, which must not delay the end of the pod
        mpirun.send_signal(number)

    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    signal.signal(signal.SIGTERM, stop)
    mpirun = subprocess.Popen(
        list(command), preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    )
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    code = mpirun.wait()
    if code not in (0, 128 + signal.SIGTERM) and not asked:
        workers = [line.split()[0] for line in hostfile.read_text().splitlines() if line.strip()]
        deadline = time.monotonic() + ASK_S
        with ThreadPoolExecutor(max_workers=32) as pool:
            for worker, how in zip(workers, pool.map(lambda host: _how_killed(host, deadline), workers), strict=True):
                if how:
                    print(f"worker {worker.partition('.')[0]} was {how}", flush=True)
    return 128 - code if code < 0 else code


def _how_killed(worker: str, deadline: float) -> str:
    """What `killed` prints on a worker; nothing if it does not answer in time."""
    ask = [*SSH, worker, sys.executable, "-I", "/etc/maskfleet/pod.py", "killed"]
    while time.monotonic() < deadline:
        try:
            done = subprocess.run(
                ask, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=10
            )
        except subprocess.TimeoutExpired:
            continue
        if done.returncode == 0:
            return done.stdout.strip()
        time.sleep(1)
    return ""


def leave(limit_s: float) -> int:
    """0 once mpirun and the ranks of this pod have ended, 1 if some still run after `limit_s`."""
    deadline = time.monotonic() + limit_s
    starters = {process.pid for process in _named("orted")}
    for process in _processes():
        # mpirun passes SIGUSR1 on to every rank; SIGTERM would give them one second.
        if process.name == "mpirun" or process.parent in starters:
            _signal(process.pid, signal.SIGUSR1)
    while _named("mpirun") or _named("orted"):
        if time.monotonic() >= deadline:
            return 1
        time.sleep(0.2)
    return 0


class Process(NamedTuple):
    """A process of this pod."""

    pid: int
    name: str
    parent: int


def _named(name: str) -> list[Process]:
    return [process for process in _processes() if process.name == name]


def _processes() -> list[Process]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                text = (folder / "stat").read_text()
            except OSError:
                continue  # it has just ended
            name, _, rest = text.partition("(")[2].rpartition(")")
            state, parent, *_ = rest.split()
            if state not in "XZ":
                found.append(Process(int(folder.name), name, int(parent)))
    return found


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it ended by itself


def _listed(missing: dict[str, str]) -> str:
    return ", ".join(f"{host} ({why})" for host, why in missing.items())


def main(arguments: Sequence[str]) -> int:
    match list(arguments):
        case ["wait", limit_s, port, meet, *hosts]:
            return wait(float(limit_s), int(port), int(meet), hosts)
        case ["check", port, *hosts]:
            return check(int(port), hosts)
        case ["launch", hostfile, *command]:
            return launch(Path(hostfile), command)
        case ["killed"]:
            return killed()
        case ["rank", *command]:
            return rank(command)
        case ["leave", limit_s]:
            return leave(float(limit_s))
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
