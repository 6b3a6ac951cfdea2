"""Every fuzzer runs a few cases of a fixed seed, and a finding would be noticed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "fuzz.py"
NAMES = ("coco", "rle", "image", "weights", "yaml", "handle", "http")


def fuzz(*arguments: object, script: Path = SCRIPT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, script, *map(str, arguments)], capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_random_input_gives_a_result_or_an_error_with_a_remedy(name: str, tmp_path: Path) -> None:
    done = fuzz("--only", name, "--cases", 60, "--seed", 7, "--findings", tmp_path, "--out", tmp_path / "out.json")
    assert done.returncode == 0, done.stdout
    result = json.loads((tmp_path / "out.json").read_text())["fuzzers"][name]
    assert result["cases"] == 60
    assert result["findings"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("raise KeyError('a fault')", "KeyError at fuzz_targets.py:5"),
        ("os.abort()", "the process ended with code -6"),
        ("bytearray(1 << 36)", "MemoryError at fuzz_targets.py:5"),
    ],
)
def test_a_fault_a_crash_and_too_much_memory_are_findings(fault: str, says: str, tmp_path: Path) -> None:
    scripts, found = tmp_path / "scripts", tmp_path / "found"
    scripts.mkdir()
    (scripts / "fuzz.py").write_text(SCRIPT.read_text())
    (scripts / "fuzz_targets.py").write_text(
        "import os\n"
        "from types import SimpleNamespace\n"
        "from hypothesis import strategies as st\n"
        "def run(case, folder):\n"
        f"    {fault}\n"
        "def fuzzers(folder):\n"
        "    return {'rle': SimpleNamespace(cases=st.binary(max_size=8), run=run)}\n"
    )
    options = ("--only", "rle", "--cases", 20, "--minutes", 0.001, "--seed", 1, "--findings", found)
    done = fuzz(*options, script=scripts / "fuzz.py")
    assert done.returncode == 1
    assert f"FINDING rle, seed 1: {says}" in done.stdout
    [case] = found.glob("*.case")
    if "abort" not in fault:  # which would end the replaying process, too
        assert fuzz("--replay", case, script=scripts / "fuzz.py").returncode == 1


def test_the_committed_run_has_no_findings() -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "fuzz.json").read_text())
    assert set(record["fuzzers"]) == set(NAMES)
    assert all(result["findings"] == [] and result["cases"] > 300 for result in record["fuzzers"].values())
