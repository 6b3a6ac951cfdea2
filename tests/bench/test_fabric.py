"""The fabric test: real ranks on this machine, and what is made of their output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from maskfleet.bench import fabric
from maskfleet.bench.fabric import SIZES, _expect_sum
from maskfleet.errors import TrainingError
from maskfleet.launch.fabric import FabricTest, size_text
from maskfleet.launch.findings import Verdict
from maskfleet.launch.instances import INSTANCES, NETWORK_GBIT, Bandwidth, expected_bandwidth
from maskfleet.log import FABRIC_MARK

# The script itself, with sizes that a CPU exchanges at once.
SMALL = (
    "import os, pathlib, sys\n"
    "from maskfleet.bench.fabric import run_rank\n"
    "run_rank(os.environ, pathlib.Path(sys.argv[1]), (8, 4096, 1 << 20))\n"
)


@pytest.mark.slow
def test_two_ranks_measure_each_size_and_rank_0_prints_it(tmp_path: Path) -> None:
    def rank(number: int) -> subprocess.Popen[str]:
        env = {**os.environ, "RANK": str(number), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
               "MASKFLEET_STORE_FILE": str(tmp_path / "store")}  # fmt: skip
        argv = [sys.executable, "-c", SMALL, str(tmp_path)]
        return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    processes = [rank(number) for number in range(2)]
    outputs = [process.communicate(timeout=900) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[1][0] == ""
    test = FabricTest()
    assert all(test.read(f"[rank0]: {line}") for line in outputs[0][0].splitlines())
    assert test.transport == "gloo over TCP"
    assert [row["bytes"] for row in test.rows] == [8, 4096, 1 << 20]
    for row in test.rows:
        assert row["ranks"] == 2
        assert row["hosts"] == 1
        # With two ranks each sends as many bytes as it has.
        assert row["bus_gb_per_s"] == pytest.approx(row["bytes"] / row["time_us"] / 1e3)


def test_a_single_rank_is_told_that_it_exchanges_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert fabric.main() == 2
    said = capsys.readouterr().err
    assert said == "error: one rank exchanges nothing\n  → start at least two, on one host or several\n"


def test_sizes_go_from_8_bytes_to_1_gib() -> None:
    assert (SIZES[0], SIZES[-1]) == (8, 2**30)
    assert [size_text(size) for size in SIZES] == [
        "8 B", "64 B", "512 B", "4 KiB", "32 KiB", "256 KiB", "2 MiB", "16 MiB", "128 MiB", "1 GiB",
    ]  # fmt: skip


def test_a_wrong_sum_is_an_error() -> None:
    _expect_sum(torch.full((4,), 3.0), 3.0)
    with pytest.raises(TrainingError, match=r"gave 3.0 to 7.0, not 3.0"):
        _expect_sum(torch.tensor([3.0, 7.0]), 3.0)


@pytest.mark.parametrize(("measured", "verdict"), [(437.0, Verdict.OK), (320.0, Verdict.OK), (9.0, Verdict.WARN)])
def test_the_largest_size_is_compared_with_what_the_type_should_reach(measured: float, verdict: Verdict) -> None:
    test = FabricTest()
    for size, speed in ((8, 0.001), (2**30, measured)):
        row = f'{{"bytes": {size}, "time_us": 4607.6, "bus_gb_per_s": {speed}, "ranks": 16, "hosts": 2}}'
        assert test.read(f"[rank0]: {FABRIC_MARK}{row}")
    assert not test.read("[rank0]: fabric: not JSON")
    assert not test.read("all 2 workers answer")
    small, large = test.findings(expected_bandwidth("p5.48xlarge", 2))
    assert (small.verdict, small.found) == (Verdict.OK, "0.001 GB/s, 4,608 us")
    assert large.verdict == verdict
    assert "16 ranks on 2 hosts; should reach 437 GB/s (two p5.48xlarge, " in large.found
    assert ("placement group" in large.remedy) == (verdict is Verdict.WARN)
    [_, unknown] = test.findings(None)
    assert unknown.verdict is Verdict.OK


def test_every_instance_type_has_a_figure_between_machines() -> None:
    assert NETWORK_GBIT.keys() == INSTANCES.keys()
    for name in INSTANCES:
        found = expected_bandwidth(name, 2)
        assert found is not None
        # Two machines exchange half of the sum each, so bus bandwidth may exceed the line rate, by less than twice.
        assert 0 < found.gb_per_s < 2 * NETWORK_GBIT[name] / 8
    assert expected_bandwidth("g6.12xlarge", 4) == Bandwidth(2.5, "an estimate: half of 40 Gbit/s")
    assert expected_bandwidth("g6.12xlarge", 1) is None
    assert expected_bandwidth("x9.large", 2) is None
