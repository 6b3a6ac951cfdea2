"""An AWS account in memory that hosts endpoints."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from endpoint_world import Command, EndpointWorld
from sagemaker_world import REGION, connect

from maskfleet.cli.main import main
from maskfleet.launch.sagemaker.services import Services


@pytest.fixture
def hosting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> EndpointWorld:
    found = EndpointWorld()
    connect(found, monkeypatch, tmp_path)
    return found


@pytest.fixture
def services(hosting: EndpointWorld) -> Services:
    return Services(REGION)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`maskfleet ARGUMENTS` in this process."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # `main` sets it, for good

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["maskfleet", *map(str, arguments)])
        capsys.readouterr()
        code: object = 0
        try:
            main()
        except SystemExit as exit_:
            code = exit_.code
        printed = capsys.readouterr()
        return int(str(code or 0)), printed.out, printed.err

    return run
