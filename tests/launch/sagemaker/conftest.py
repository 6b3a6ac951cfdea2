"""An AWS account in memory for tests of jobs on SageMaker."""

from __future__ import annotations

from pathlib import Path

import pytest
from sagemaker_world import REGION, World, connect

from maskfleet.launch.sagemaker.services import Services


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    found = World()
    connect(found, monkeypatch, tmp_path)
    return found


@pytest.fixture
def region(world: World) -> Services:
    return Services(REGION)
