"""pod.py of the train chart: waiting for workers, and ranks that stop when asked."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from train_release import CHART

from maskfleet.launch.causes import CAUSES
from ports import free_port

SCRIPT = CHART / "files" / "pod.py"
HOSTS = ("127.0.0.1", "localhost")
GIB = 2**30
LONG_S = 240  # longer than anything takes, even on a busy machine
SAVES = (
    "import os, pathlib, signal, sys, time\n"
    "asked = []\n"
    "signal.signal(signal.SIGTERM, lambda *_: asked.append(1))\n"
    "started, may_end, saved = map(pathlib.Path, sys.argv[1:])\n"
    "started.touch()\n"
    "while not (asked and may_end.exists()): time.sleep(0.01)\n"
    "saved.write_text(str(len(asked)))\n"
    "sys.exit(143)\n"
)


def pod(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-I", str(SCRIPT), *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def sshd() -> Iterator[int]:
    """Port of a server that sends the greeting of sshd."""
    server = socket.create_server(("127.0.0.1", 0))

    def greet() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.sendall(b"SSH-2.0-test\r\n")

    thread = threading.Thread(target=greet)
    thread.start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join()


def test_wait_ends_when_all_workers_answer(sshd: int) -> None:
    out, err = (process := pod("wait", "20", str(sshd), str(free_port()), *HOSTS)).communicate(timeout=LONG_S)
    assert (process.returncode, out, err) == (0, "all 2 workers answer\n", "")


def test_wait_names_the_workers_that_never_answered() -> None:
    hosts = ("127.0.0.1", "no.such.host.invalid")
    process = pod("wait", "1", str(free_port()), str(free_port()), *hosts)
    out, err = process.communicate(timeout=LONG_S)
    assert process.returncode == 1
    assert out.startswith("waiting for 2 of 2 workers: 127.0.0.1 (")
    assert err.startswith("no answer from 127.0.0.1 (")
    assert "no.such.host.invalid" in err
    assert err.endswith("after 1 s\n")


def test_wait_returns_after_the_ranks_of_an_earlier_launcher_exit(sshd: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as earlier:
        meet = str(earlier.getsockname()[1])
        process = pod("wait", "1", str(sshd), meet, *HOSTS)
        out, err = process.communicate(timeout=LONG_S)
        assert (process.returncode, out) == (1, "waiting for the ranks of an earlier launcher, which save and end\n")
        assert err == f"ranks of an earlier launcher are left: port {meet} of 127.0.0.1 is in use after 1 s\n"
        process = pod("wait", str(LONG_S), str(sshd), meet, *HOSTS)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("waiting for the ranks")
    out, err = process.communicate(timeout=LONG_S)
    assert (process.returncode, out, err) == (0, "all 2 workers answer\n", "")


def test_check_fails_for_a_silent_worker_and_for_one_without_ssh(sshd: int) -> None:
    for port, code in ((sshd, 0), (free_port(), 1)):
        process = pod("check", str(port), "127.0.0.1")
        process.communicate(timeout=LONG_S)
        assert process.returncode == code
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = pod("check", str(server.getsockname()[1]), "127.0.0.1")
        connection, _ = server.accept()
        connection.sendall(b"HTTP/1.1 400\r\n")
        out, _ = process.communicate(timeout=LONG_S)
        connection.close()
    assert process.returncode == 1
    assert "does not speak SSH" in out


def pending(process_id: int, number: signal.Signals) -> bool:
    """Whether the process has a pending signal."""
    lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd", "ShdPnd"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


@pytest.mark.parametrize(("rank", "code"), [("0", 143), ("1", 0)])
def test_two_stop_requests_save_once_and_only_rank_0_exits_as_stopped(tmp_path: Path, rank: str, code: int) -> None:
    started, may_end, saved = (tmp_path / name for name in ("started", "may_end", "saved"))
    files = map(str, (started, may_end, saved))
    process = pod("rank", sys.executable, "-c", SAVES, *files, OMPI_COMM_WORLD_RANK=rank)
    while not started.exists():
        assert process.poll() is None
        time.sleep(0.01)
    for _ in range(2):
        os.killpg(process.pid, signal.SIGUSR1)  # as mpirun does: to the whole group
        while pending(process.pid, signal.SIGUSR1):
            time.sleep(0.01)
    may_end.touch()
    process.communicate(timeout=LONG_S)
    assert process.returncode == code
    assert saved.read_text() == "1"


@pytest.mark.parametrize(
    ("program", "code"), [("import sys; sys.exit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137), ("", 0)]
)
def test_a_rank_exits_with_the_status_of_its_trainer(program: str, code: int) -> None:
    process = pod("rank", sys.executable, "-c", program, OMPI_COMM_WORLD_RANK="3")
    process.communicate(timeout=LONG_S)
    assert process.returncode == code


@pytest.fixture
def worker(tmp_path: Path) -> ModuleType:
    """pod.py as a module, with the record and the cgroup of a container that may use 64 GiB."""
    spec = importlib.util.spec_from_file_location("pod", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.RECORD, module.CGROUP, module.SAMPLE_S = tmp_path / "record", tmp_path, 0.001
    (tmp_path / "memory.max").write_text(f"{64 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {60 * GIB}\nfile {900 * GIB}\nshmem {3 * GIB}\n")
    (tmp_path / "memory.events").write_text("oom 0\noom_kill 0\n")
    return module


@pytest.mark.parametrize(("used_gib", "how"), [(60, "OOMKilled"), (20, "killed")])
def test_a_killed_container_is_told_from_one_whose_ranks_ended(
    used_gib: int, how: str, worker: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "memory.stat").write_text(f"anon {used_gib * GIB}\nfile {900 * GIB}\nshmem {3 * GIB}\n")
    sampler = worker.Sampler(is_needed=True)
    with sampler:
        while not worker.RECORD.exists():
            time.sleep(0.001)
        left = worker.RECORD.read_text()
        assert worker.killed() == 0
        assert capsys.readouterr().out == "", "the container that runs the ranks is still the same"
    assert not worker.RECORD.exists()
    # A later container of the pod finds what the killed one could not remove.
    worker.RECORD.write_text(left)
    worker.container = lambda: -1
    assert worker.killed() == 0
    said = f"{how}: its container was restarted, shortly before it used {used_gib + 3}.0 of its limit of 64.0 GiB\n"
    assert capsys.readouterr().out == said


def test_a_rank_that_the_kernel_killed_for_memory_says_so(
    worker: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = tmp_path / "memory.events"
    program = f"import os, pathlib; pathlib.Path({str(events)!r}).write_text('oom_kill 1'); os.kill(os.getpid(), 9)"
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    try:
        assert worker.rank([sys.executable, "-c", program]) == 137
        said = capsys.readouterr().err
        assert said == "the rank was OOMKilled: the memory limit is 64.0 GiB\n"
        assert next(cause.name for cause in CAUSES if cause.pattern.search(said)) == "host memory"
        assert worker.rank([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]) == 137
        assert capsys.readouterr().err == "", "killed by something else"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def launched(tmp_path: Path, code: str, *answers: str) -> tuple[int, str]:
    """Exit code and output of `launch` whose mpirun ends with `code`; each worker in turn gives one of `answers`."""
    hosts = [f"r50-worker-{index}.r50.kubeflow.svc" for index in range(len(answers))]
    (tmp_path / "hostfile").write_text("".join(f"{host} slots=8\n" for host in hosts))
    for host, answer in zip(hosts, answers, strict=True):
        (tmp_path / host).write_text(answer)
    ssh = tmp_path / "ssh"
    # The first attempt to reach a worker fails, as while its container is being restarted.
    ssh.write_text(
        f"#!{sys.executable}\nimport pathlib, sys\n"
        f"host = pathlib.Path({str(tmp_path)!r}, sys.argv[7])\nseen = host.with_suffix('.seen')\n"
        "if not seen.exists():\n    seen.touch()\n    sys.exit(255)\n"
        "assert sys.argv[-2:] == ['/etc/maskfleet/pod.py', 'killed'], sys.argv\n"
        "print(host.read_text())\n"
    )
    ssh.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    process = pod("launch", str(tmp_path / "hostfile"), sys.executable, "-c", code, PATH=path)
    out, err = process.communicate(timeout=LONG_S)
    assert err == ""
    return process.returncode, out


@pytest.mark.slow
def test_a_failed_launch_prints_which_workers_were_killed(tmp_path: Path) -> None:
    code, out = launched(tmp_path, "raise SystemExit(3)", "", "OOMKilled: its container was restarted")
    assert (code, out) == (3, "worker r50-worker-1 was OOMKilled: its container was restarted\n")


@pytest.mark.parametrize("code", [0, 143])
def test_a_launch_that_succeeds_or_was_stopped_asks_no_worker(tmp_path: Path, code: int) -> None:
    program = f"print('trained'); raise SystemExit({code})"
    assert launched(tmp_path, program, "OOMKilled: before") == (code, "trained\n")


def test_a_launch_that_asks_its_workers_ends_at_once_when_it_is_terminated(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("r50-worker-0 slots=8\n")
    ssh, asked = tmp_path / "ssh", tmp_path / "asked"
    ssh.write_text(f"#!/bin/sh\ntouch '{asked}'\nexec sleep 5\n")
    ssh.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    process = pod("launch", str(tmp_path / "hostfile"), sys.executable, "-c", "raise SystemExit(3)", PATH=path)
    while not asked.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LONG_S) == 143
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=LONG_S)


def test_a_launch_that_is_asked_to_stop_passes_it_on_and_asks_no_worker(tmp_path: Path) -> None:
    program = "import signal, sys; signal.signal(15, lambda *_: sys.exit(9)); print('up', flush=True); signal.pause()"
    process = pod("launch", str(tmp_path / "no hostfile"), sys.executable, "-c", program)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=LONG_S)
    assert (process.returncode, out, err) == (9, "", "")


def test_a_pod_without_ranks_stops_at_once() -> None:
    # In its own process namespace, as in a pod: otherwise it would find the mpirun of another test.
    argv = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-I", str(SCRIPT), "leave", "20"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LONG_S, check=False)
    if done.returncode != 0 and "unshare" in done.stderr:
        pytest.skip(f"namespaces cannot be made here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr


def test_any_other_command_prints_the_help() -> None:
    process = pod("dance")
    _, err = process.communicate(timeout=LONG_S)
    assert process.returncode == 2
    assert "wait LIMIT_S PORT MEET HOST..." in err
