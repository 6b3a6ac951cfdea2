"""The child processes that compile: bounded in number, silent, and never left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from maskfleet.system.machine import process_start
from maskfleet.training.background import children as module
from maskfleet.training.background.child import CompileJob
from maskfleet.training.background.children import Children

LONG_S = 900.0


def job(width: int = 64) -> CompileJob:
    capacity = {"objects": 4, "crowds": 0, "edges": 16, "parts": 1}
    return CompileJob({}, 2, (64, width), capacity, masks=True, precision="fp32", device="cpu", split=False)


def finished(children: Children) -> tuple[bool, str]:
    deadline = time.monotonic() + LONG_S
    while time.monotonic() < deadline:
        done, failure = children.poll()
        if done or failure:
            return done, failure
        time.sleep(0.01)
    raise AssertionError("the children did not finish")


def script(text: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", text)


def test_a_job_survives_its_file(tmp_path: Path) -> None:
    job().save(tmp_path / "job.json")
    assert CompileJob.load(tmp_path / "job.json") == job()


def test_each_canvas_has_a_process_and_only_a_few_run_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "side_by_side", lambda jobs: 2)
    text = (
        "import sys, os, json, time; name = json.load(open(sys.argv[1]))['canvas'][1]; print('noise')\n"
        f"open('{tmp_path}/' + str(name), 'w').write(repr(time.monotonic())); time.sleep(0.1)\n"
        f"open('{tmp_path}/' + str(name), 'a').write(' ' + repr(time.monotonic()) + ' ' + str('RANK' in os.environ))"
    )
    children = Children([job(width) for width in (1, 2, 3)], script(text), env={**os.environ, "RANK": "3"})
    try:
        assert finished(children) == (True, "")
    finally:
        children.stop()
    times = [(tmp_path / str(width)).read_text().split() for width in (1, 2, 3)]
    assert float(times[2][0]) >= min(float(times[0][1]), float(times[1][1]))
    assert [time[2] for time in times] == ["False"] * 3
    assert capfd.readouterr() == ("", "")


def test_a_failed_child_ends_the_others_and_its_last_line_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "side_by_side", lambda jobs: 2)
    text = (
        "import sys, json, time\n"
        "if json.load(open(sys.argv[1]))['canvas'][1] == 1: sys.exit('first\\nno space left')\n"
        f"time.sleep({LONG_S})"
    )
    children = Children([job(1), job(2)], script(text))
    other = children._running[1].pid
    try:
        assert finished(children) == (True, "for images of 64 x 1: no space left")
        assert process_start(other) is None
    finally:
        children.stop()


def test_children_end_when_they_are_stopped() -> None:
    children = Children([job()], script(f"import time; time.sleep({LONG_S})"))
    [child] = children._running.values()
    assert children.poll() == (False, "")
    children.stop()
    assert process_start(child.pid) is None
    assert not Path(children._folder.name).exists()


def test_children_that_take_too_long_are_a_failure() -> None:
    now = 0.0
    children = Children([job()], script(f"import time; time.sleep({LONG_S})"), clock=lambda: now)
    now = 60 * module.MAX_MINUTES + 1
    assert children.poll() == (True, "within 30 minutes")
    children.stop()


@pytest.mark.slow
def test_children_die_with_a_run_that_is_killed() -> None:
    text = (
        "import sys, time; from maskfleet.training.background.child import CompileJob; "
        "from maskfleet.training.background.children import Children; "
        "job = CompileJob({}, 2, (64, 64), {}, True, 'fp32', 'cpu', False); "
        f"children = Children([job], (sys.executable, '-c', 'import time; time.sleep({LONG_S})')); "
        "print(children._running[0].pid, flush=True); time.sleep(1000)"
    )
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert process_start(child) is not None
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + LONG_S
    while process_start(child) is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process_start(child) is None
