"""Runs of a few seconds, started as users start them."""

from __future__ import annotations

from pathlib import Path

import pytest
from workshop import Workshop

from maskfleet.config.base import replaced
from maskfleet.config.load import dump
from maskfleet.config.recipes import recipe
from maskfleet.data.synthetic.dataset import make_shapes
from micro_run import MICRO


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("launch") / "set"
    make_shapes(root, num_train=12, num_val=5, height=(64, 64), width=(64, 64), num_categories=2, max_objects=3, seed=3)
    return root


@pytest.fixture
def workshop(shapes: Path, tmp_path: Path) -> Workshop:
    run_file = tmp_path / "micro.yaml"
    run_file.write_text(dump(replaced(recipe("demo"), {**MICRO, "data.root": str(shapes)})))
    return Workshop(tmp_path, run_file)
