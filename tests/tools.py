"""Programs that tests use, from .tools (`make test-tools`) or PATH. A test whose program is missing is skipped."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = tuple(ROOT / ".tools" / name / "bin" for name in ("py", "checkov", "aws"))
OTHER_NAMES = {"chromium": ("chromium-browser", "google-chrome")}


def tool(name: str) -> str:
    """Path of the program `name`; skips the test with a hint if it is missing."""
    path = os.pathsep.join([*map(str, FOLDERS), os.environ.get("PATH", "")])
    for known in (name, *OTHER_NAMES.get(name, ())):
        if found := shutil.which(known, path=path):
            return found
    pytest.skip(f"{name} is not installed: make test-tools installs it")


def run_tool(name: str, *arguments: str | Path, cwd: Path | None = None, **environment: str) -> str:
    """Standard output of a tool that must succeed."""
    done = try_tool(name, *arguments, cwd=cwd, **environment)
    assert done.returncode == 0, f"{name} {' '.join(map(str, arguments))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def try_tool(
    name: str, *arguments: str | Path, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The result of a tool that may fail."""
    command: Sequence[str] = [tool(name), *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=900
    )


@contextmanager
def moto_server(log: Path) -> Iterator[str]:
    """The URL of a moto server on loopback that runs until the block ends."""
    with (
        log.open("w") as file,
        subprocess.Popen([tool("moto_server"), "-H", "127.0.0.1", "-p", "0"], stdout=file, stderr=file) as process,
    ):
        try:
            deadline = time.monotonic() + 240
            while time.monotonic() < deadline:
                found = re.search(r"Running on (http://127\.0\.0\.1:\d+)", log.read_text())
                if found or process.poll() is not None:
                    break
                time.sleep(0.05)
            assert found, log.read_text()
            yield found.group(1)
        finally:
            process.terminate()
