"""pod.py of the train chart: waiting for workers, and ranks that stop when asked."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from train_release import CHART

from ports import free_port

SCRIPT = CHART / "files" / "pod.py"
HOSTS = ("127.0.0.1", "localhost")
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
