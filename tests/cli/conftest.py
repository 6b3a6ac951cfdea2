"""Commands that run in this process: starting another one and loading torch there would be most of a test's time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from maskfleet.cli.main import main


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`maskfleet ARGUMENTS` as in a shell in `tmp_path`: exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # `main` sets it, for good

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        argv = ["maskfleet", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", argv)
        capsys.readouterr()
        code: int | str | None = 0
        try:
            main()
        except SystemExit as exit_:
            code = exit_.code
        printed = capsys.readouterr()
        assert isinstance(code, int | None)
        return subprocess.CompletedProcess(argv, code or 0, printed.out, printed.err)

    return run
