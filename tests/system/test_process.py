"""Processes: captured, started, stopped with all that they started."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
import time
from pathlib import Path
from typing import Literal

import pytest

from maskfleet.errors import MaskfleetError
from maskfleet.system.process import (
    Finished,
    RecordingShell,
    Running,
    capture,
    piped,
    run_command,
    shell_code,
    start,
    stream,
)

LONG_S = 120
PYTHON = sys.executable
IGNORES_SIGTERM = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
os.write(1, b"%d\\n" % child)
time.sleep(1000)
"""


def is_running(pid: int) -> bool:
    try:
        state = (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + LONG_S
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} is still running"
        time.sleep(0.02)


def test_a_command_is_captured_with_input_folder_and_environment(tmp_path: Path) -> None:
    code = "import os, sys; print(sys.stdin.read(), os.getcwd(), os.environ['A']); print('e', file=sys.stderr); exit(3)"
    done = capture([PYTHON, "-c", code], "in", cwd=tmp_path, env={**os.environ, "A": "b"})
    assert done == Finished(3, f"in {tmp_path} b\n", "e\n")


def test_arguments_are_never_read_by_a_shell() -> None:
    assert capture([PYTHON, "-c", "import sys; print(sys.argv[1])", "$HOME; `x`"]).out == "$HOME; `x`\n"


@pytest.mark.parametrize("run", [capture, run_command, start], ids=["capture", "run_command", "start"])
def test_a_program_that_is_not_installed_is_named(run: object) -> None:
    assert callable(run)
    with pytest.raises(MaskfleetError, match="no-such-program is not installed here") as caught:
        run(["no-such-program", "x"])
    assert caught.value.remedy == "install no-such-program"


def test_a_missing_folder_is_not_taken_for_a_missing_program(tmp_path: Path) -> None:
    with pytest.raises(MaskfleetError, match=r"there is no folder .*/absent to run"):
        capture([PYTHON, "-c", ""], cwd=tmp_path / "absent")


def test_a_program_without_execute_permission_is_named(tmp_path: Path) -> None:
    (tmp_path / "program").write_text("x")
    with pytest.raises(MaskfleetError, match="program cannot be started: Permission denied"):
        capture([str(tmp_path / "program")])


def test_a_command_that_takes_too_long_is_named_without_its_secrets() -> None:
    with pytest.raises(MaskfleetError, match=r"python\S* -c did not finish within 0 s") as caught:
        capture([PYTHON, "-c", "import time; time.sleep(1000)", "secret"], timeout_s=0.2)
    assert "secret" not in str(caught.value)


def test_output_is_appended_to_a_file_and_the_process_has_its_own_session(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    process = start([PYTHON, "-c", "import os; print(os.getsid(0) == os.getpid())"], output=log)
    assert process.wait(LONG_S) == 0
    assert log.read_text() == "before\nTrue\n"


def test_private_output_and_files_are_for_their_owner_only(tmp_path: Path) -> None:
    process = start([PYTHON, "-c", "open('made', 'w')"], cwd=tmp_path, output=tmp_path / "log", private=True)
    assert process.wait(LONG_S) == 0
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("log", "made")} == {0o600}


def test_a_pipe_gives_both_outputs() -> None:
    process = start([PYTHON, "-c", "import sys; print('a', flush=True); print('b', file=sys.stderr)"], output="pipe")
    assert process.output.read() == b"a\nb\n"
    assert process.wait(LONG_S) == 0
    process.output.close()


def test_a_process_that_handles_sigterm_is_not_killed(tmp_path: Path) -> None:
    code = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\nprint(1, flush=True)\n"
    process = start([PYTHON, "-c", code + "time.sleep(1000)"], output="pipe")
    process.output.readline()
    assert process.exit_code() is None
    assert process.wait(0.01) is None
    process.stop(LONG_S)
    assert process.exit_code() == 9
    process.stop(LONG_S)  # stopping a process that has exited does nothing
    process.output.close()


def ignoring_sigterm(lifetime: Literal["independent", "session"] = "independent") -> tuple[Running, int]:
    process = start([PYTHON, "-c", IGNORES_SIGTERM], output="pipe", lifetime=lifetime)
    pids = [int(process.output.readline()) for _ in range(2)]  # of the child, and 0 from the child
    return process, max(pids)


def test_a_process_that_ignores_sigterm_is_killed_with_its_group() -> None:
    process, child = ignoring_sigterm()
    process.stop(0.1)
    assert process.exit_code() == -signal.SIGKILL
    wait_until_gone(child)
    process.output.close()


def test_a_process_in_our_own_group_is_killed_alone() -> None:
    process, child = ignoring_sigterm("session")
    process.kill()
    assert process.exit_code() == -signal.SIGKILL
    assert is_running(child)
    os.kill(child, signal.SIGKILL)
    process.output.close()


def test_exit_codes_as_a_shell_reports_them() -> None:
    assert [shell_code(code) for code in (0, 3, -9, -15)] == [0, 3, 137, 143]


def test_a_detached_command_writes_its_log(tmp_path: Path) -> None:
    run_command.detach([PYTHON, "-c", "print('on', flush=True)"], cwd=tmp_path, log=tmp_path / "log")
    deadline = time.monotonic() + LONG_S
    while (tmp_path / "log").read_text() != "on\n":
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_piped_process_answers_and_is_terminated() -> None:
    async def ask() -> tuple[bytes, int | None]:
        async with piped([PYTHON, "-c", "import time; print(input(), flush=True); time.sleep(1000)"]) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"hello\n")
            answer = await process.stdout.readline()
        return answer, process.returncode

    assert asyncio.run(ask()) == (b"hello\n", -signal.SIGTERM)


def test_the_fake_records_and_answers_in_order() -> None:
    shell = RecordingShell([Finished(1, "no")])
    assert shell(["helm", "list"], "in") == Finished(1, "no")
    assert shell(["helm", "list"]) == Finished(0)
    shell.detach(["sleep", "1"], cwd=Path(), log=Path("log"))
    assert shell.calls == [(["helm", "list"], "in"), (["helm", "list"], "")]
    assert shell.detached == [["sleep", "1"]]


def test_a_command_with_the_lifetime_of_its_parent_dies_with_it() -> None:
    code = (
        "import os, signal, sys; from maskfleet.system.process import start; "
        "child = start([sys.executable, '-c', 'import time; time.sleep(600)'], lifetime='parent'); "
        "print(child.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = capture([PYTHON, "-c", code])
    assert done.code == -signal.SIGKILL
    deadline = time.monotonic() + LONG_S
    while _is_running(int(done.out)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


COUNTS_INTERRUPTS = """
import pathlib, signal, time
seen = []
signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
pathlib.Path("ready").touch()
while not seen:
    time.sleep(0.01)
time.sleep(0.3)
pathlib.Path("seen").write_text(str(len(seen)))
"""


def test_a_stop_request_that_cannot_be_shown_reaches_the_command_once(tmp_path: Path) -> None:
    """A second interrupt would make Terraform abandon its state."""

    def ask_once_it_runs() -> None:
        if (tmp_path / "ready").exists():
            (tmp_path / "ready").unlink()
            os.kill(os.getpid(), signal.SIGTERM)

    def closed(count: int) -> None:
        time.sleep(0.1)  # two signals at once would count as one
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        stream(
            [sys.executable, "-c", COUNTS_INTERRUPTS],
            cwd=tmp_path,
            env=os.environ,
            log=tmp_path / "log",
            line=lambda text: None,
            tick=ask_once_it_runs,
            asked_to_stop=closed,
        )
    assert (tmp_path / "seen").read_text() == "1"
