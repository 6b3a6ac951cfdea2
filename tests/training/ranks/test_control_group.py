"""Ranks connect to those that they exchange messages with, not every one to every other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ENV, LONG_S

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "control_group.py"
RANKS = 12


@pytest.mark.slow
def test_the_groups_are_no_full_mesh_of_sockets() -> None:
    argv = [sys.executable, str(SCRIPT), "--one", str(RANKS)]
    env = {name: value for name, value in ENV.items() if name != "TORCH_GLOO_LAZY_INIT"}
    ended = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert ended.returncode == 0, ended.stderr
    groups, ends = 2, RANKS * (RANKS - 1)  # of one connection for every pair
    assert json.loads(ended.stdout.splitlines()[-1])["sockets"] < groups * ends
