"""scripts/soak.py, which `make soak` runs with a hundred kills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import LONG_S

SCRIPT = Path(__file__).parents[2] / "scripts" / "soak.py"


@pytest.mark.slow
def test_four_kills_change_neither_a_loss_nor_the_weights(tmp_path: Path) -> None:
    output = tmp_path / "soak.json"
    command = [sys.executable, str(SCRIPT), "--kills", "4", "--ranks", "1,2", "--steps", "20", "--output", str(output)]
    done = subprocess.run(
        command,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=2 * LONG_S - 60,  # six short runs, one after the other; pytest ends a test after 1,800 s
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(output.read_text())
    results = [(result["ranks"], result["kills"], result["bit_equal"]) for result in report["results"]]
    assert results == [(1, 2, True), (2, 2, True)]
    assert sum(report["kills_by"]["signal"].values()) == 4
    assert {"commit", "machine", "seed"} <= report.keys()
