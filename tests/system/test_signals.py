"""Stop requests: the first is remembered and acknowledged, Ctrl-C again quits."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from maskfleet.system.signals import DUPLICATE_S, StopRequest, stop_request

LONG_S = 300
# Blocks for good in native code that no signal interrupts, as a GPU kernel that never ends does.
BLOCKED_IN_NATIVE_CODE = """
import ctypes
from maskfleet.system import signals

signals.DUPLICATE_S = 0.0
mutex = ctypes.create_string_buffer(64)
lock = ctypes.CDLL(None).pthread_mutex_lock
with signals.stop_request():
    print("\\x1b[?25l ready", file=__import__("sys").stderr, flush=True)
    lock(mutex)
    lock(mutex)
"""


def read_until(terminal: int, text: bytes) -> bytes:
    output = b""
    while text not in output:
        output += os.read(terminal, 4096)
    return output


def test_the_first_signal_is_the_request_and_ctrl_c_again_quits() -> None:
    request = StopRequest()
    assert request.receive(signal.SIGTERM, 10.0) == "stop"
    assert request.number == signal.SIGTERM
    assert request.receive(signal.SIGTERM, 10.0 + 100 * DUPLICATE_S) == "ignore"
    assert request.receive(signal.SIGINT, 10.0 + 100 * DUPLICATE_S) == "quit"
    assert request.number == signal.SIGTERM


def test_a_signal_that_a_launcher_forwards_as_well_is_one_request() -> None:
    request = StopRequest()
    assert request.receive(signal.SIGINT, 10.0) == "stop"
    assert request.receive(signal.SIGINT, 10.0 + DUPLICATE_S / 2) == "ignore"
    assert request.receive(signal.SIGINT, 10.0 + DUPLICATE_S) == "quit"


def test_the_request_is_set_and_the_handlers_are_restored(caplog: pytest.LogCaptureFixture) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), signal.set_wakeup_fd(-1)
    with stop_request() as request:
        assert request.number == 0
        signal.raise_signal(signal.SIGTERM)
    assert request.number == signal.SIGTERM  # the block ends after all signals inside it were read
    assert "stopping after this step, saving" in caplog.text
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), signal.set_wakeup_fd(-1)) == before


def test_ctrl_c_is_acknowledged_and_quits_while_the_main_thread_is_busy_in_native_code(tmp_path: Path) -> None:
    terminal, stderr = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", BLOCKED_IN_NATIVE_CODE], stderr=stderr)
    os.close(stderr)
    try:
        read_until(terminal, b"ready")
        process.send_signal(signal.SIGINT)
        read_until(terminal, b"stopping after this step, saving; Ctrl-C again to quit now")
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        read_until(terminal, b"\x1b[?25h")  # shows the cursor
        assert process.wait(LONG_S) == 128 + signal.SIGINT
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
