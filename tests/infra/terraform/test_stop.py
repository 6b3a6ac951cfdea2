"""Ctrl-C, a closed pipe and a kill while terraform works: it exits cleanly, and the next run resumes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from maskfleet.system.process import stream

pytestmark = pytest.mark.slow

CLUSTER = "terraform_data.cluster"
LONG_S = 240  # longer than anything takes, even on a busy machine


def start(stage: Any, driver: list[str], *words: str, **more: Any) -> subprocess.Popen[str]:
    argv = [*driver, *words, "eks", "--workdir", str(stage.workdir)]
    return subprocess.Popen(argv, env=stage.env, text=True, start_new_session=True, **more)


def up(stage: Any, driver: list[str], **more: Any) -> subprocess.Popen[str]:
    given = ["--var", "region=us-west-2", "--var", "cluster_name=fleet", "--var", f"sleep_s={LONG_S}"]
    return start(stage, driver, "up", "--yes", *given, **more)


def wait_for(condition: Any, what: str, limit_s: float = LONG_S) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen"
        time.sleep(0.05)


def log_says(stage: Any, text: str) -> bool:
    logs = [path.read_text(errors="replace") for path in (stage.workdir / "logs").glob("*apply.jsonl")]
    return any(text in log for log in logs)


def is_making_the_cluster(stage: Any) -> bool:
    return log_says(stage, f'"sleep {LONG_S}')


def tainted(stage: Any) -> list[str]:
    return [one.address for one in stage.read().base.state().resources if one.tainted]


def finish(stage: Any, driver: list[str]) -> str:
    """Run up again, with nothing to wait for."""
    done = subprocess.run(
        [*driver, "up", "eks", "--yes", "--workdir", str(stage.workdir), "--var", "sleep_s=0"],
        env=stage.env,
        capture_output=True,
        text=True,
        check=True,
        timeout=LONG_S,
    )
    return done.stderr


def test_ctrl_c_stops_terraform_cleanly_and_the_next_up_resumes(stage: Any, driver: list[str]) -> None:
    running = up(stage, driver, stderr=subprocess.PIPE)
    wait_for(lambda: is_making_the_cluster(stage), "making the cluster")
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does
    os.killpg(running.pid, signal.SIGINT)  # the user presses it twice
    _, shown = running.communicate(timeout=LONG_S)
    assert running.returncode == 130
    assert "terraform exited cleanly, its state is saved" in shown
    assert tainted(stage) == [CLUSTER]
    entry = json.loads((stage.workdir / "journal.json").read_text())["aws"]
    assert (entry["did"], entry["ended"]) == ("up", "failed")
    again = finish(stage, driver)
    assert f"replace: {CLUSTER} (tainted)" in again
    assert tainted(stage) == []


def test_a_child_is_interrupted_once_however_often_the_user_asks(tmp_path: Path) -> None:
    count = """
import pathlib, signal, sys, time
heard = []
signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
print("ready", flush=True)
while not (heard and pathlib.Path(sys.argv[1]).exists()):
    time.sleep(0.01)
sys.exit(40 + len(heard))
"""
    may_end = tmp_path / "may_end"
    asked: list[int] = []
    lines: list[str] = []

    def tick() -> None:
        if lines and len(asked) < 2:
            os.kill(os.getpid(), signal.SIGINT)
        elif lines:
            may_end.touch()

    done = stream(
        [sys.executable, "-c", count, str(may_end)],
        cwd=tmp_path,
        env=os.environ,
        log=tmp_path / "log",
        line=lines.append,
        tick=tick,
        asked_to_stop=asked.append,
    )
    assert (done.code, done.interrupted) == (41, True)
    assert asked == [1, 2]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_terraform_saves_its_state_after_maskfleet_is_killed(stage: Any, driver: list[str]) -> None:
    running = up(stage, driver, stderr=subprocess.DEVNULL)
    wait_for(lambda: is_making_the_cluster(stage), "making the cluster")
    running.kill()
    running.wait()
    # A child that is about to become `sleep` looks like terraform for a moment.
    wait_for(lambda: len(terraforms(stage)) == 1, "one terraform")
    os.kill(terraforms(stage)[0], signal.SIGINT)  # it still runs; stop it now instead of waiting a minute
    wait_for(lambda: not terraforms(stage), "the end of terraform")
    assert tainted(stage) == [CLUSTER]
    entry = json.loads((stage.workdir / "journal.json").read_text())["aws"]
    assert entry["ended"] == ""
    finish(stage, driver)
    assert tainted(stage) == []


def test_a_closed_output_pipe_stops_terraform_cleanly(stage: Any, driver: list[str]) -> None:
    running = up(stage, driver, stderr=subprocess.PIPE)
    assert running.stderr is not None
    for text in running.stderr:
        if f"{CLUSTER}: create started" in text:
            break
    wait_for(lambda: is_making_the_cluster(stage), "making the cluster")
    running.stderr.close()
    os.kill(running.pid, signal.SIGTERM)
    assert running.wait(timeout=LONG_S) != 0
    assert not terraforms(stage)
    assert tainted(stage) == [CLUSTER]


def test_two_commands_cannot_use_one_work_folder_at_the_same_time(stage: Any, driver: list[str]) -> None:
    running = up(stage, driver, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: is_making_the_cluster(stage), "making the cluster")
        other = start(stage, driver, "plan", stderr=subprocess.PIPE)
        _, shown = other.communicate(timeout=LONG_S)
        assert other.returncode == 2
        assert "another process is changing the infrastructure in" in shown
    finally:
        running.send_signal(signal.SIGINT)
        running.wait(timeout=LONG_S)


def terraforms(stage: Any) -> list[int]:
    """Processes that apply in this test's work folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            argv = (process / "cmdline").read_bytes().split(b"\0")
            state = (process / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        plan = str(stage.workdir / "plans").encode()
        if argv[0].endswith(b"terraform") and any(plan in word for word in argv) and state != "Z":
            found.append(int(process.name))
    return found
