"""The script that reports unhealthy GPUs, run by bash with programs that play nvidia-smi, the kernel's log and AWS."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from maskfleet.system.deploy_files import deploy_path

SCRIPT = deploy_path("cloudformation", "bootstrap") / "health.sh"
PROGRAMS = {
    "aws": 'echo "$*" >>"$FOLDER/calls"',
    "nvidia-smi": 'cat "$FOLDER/gpus"',
    "journalctl": 'cat "$FOLDER/kernel"',
}
XID = "NVRM: Xid (PCI:0000:00:{}): {}, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


class Node:
    """A node with two GPUs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, line in PROGRAMS.items():
            file = folder / "bin" / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(f"#!/bin/bash\n{line}\n", encoding="utf-8")
            file.chmod(0o755)
        self.gpus("00000000:00:1E.0, 0", "00000000:00:1F.0, 0")
        self.kernel()
        (folder / "node.env").write_text(
            f"CLUSTER=fleet\nREGION=us-west-2\nROLE=worker\nGPUS=2\nINSTANCE=i-1\nHOST_FILE={folder}/host\n"
            "HOST_LINE='10.0.0.1 slots=2'\n",
            encoding="utf-8",
        )

    def gpus(self, *lines: str) -> None:
        (self.folder / "gpus").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def kernel(self, *lines: str) -> None:
        (self.folder / "kernel").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def report(self) -> tuple[int, bool]:
        """(unhealthy GPUs that the script reported, whether it had the node replaced)."""
        calls = self.folder / "calls"
        calls.unlink(missing_ok=True)
        folders = {"NODE_ENV": self.folder / "node.env", "RUN_FOLDER": self.folder, "FOLDER": self.folder}
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        env = {**{key: str(value) for key, value in folders.items()}, "PATH": path}
        bash = shutil.which("bash")
        assert bash is not None
        subprocess.run([bash, SCRIPT], env=env, check=True, capture_output=True, timeout=240)
        metric, *others = calls.read_text(encoding="utf-8").splitlines()
        assert metric.startswith("cloudwatch put-metric-data --namespace maskfleet --metric-name UnhealthyGpus")
        assert metric.endswith("--dimensions Cluster=fleet,Role=worker")
        replaced = "autoscaling set-instance-health --instance-id i-1 --health-status Unhealthy"
        assert others in ([], [replaced])
        return int(metric.partition("--value ")[2].split()[0]), bool(others)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_healthy_node_reports_itself_as_a_host(node: Node) -> None:
    assert node.report() == (0, False)
    assert (node.folder / "host").read_text(encoding="utf-8") == "10.0.0.1 slots=2\n"


def test_a_node_is_replaced_when_a_gpu_is_unhealthy_three_times_in_a_row(node: Node) -> None:
    node.kernel(XID.format("1e", 79), XID.format("1e", 79))
    assert [node.report() for _ in range(3)] == [(1, False), (1, False), (1, True)]
    assert not (node.folder / "host").exists()


def test_a_gpu_that_recovers_is_counted_from_the_start(node: Node) -> None:
    node.gpus("00000000:00:1E.0, 0")
    assert [node.report() for _ in range(2)] == [(1, False), (1, False)]
    node.gpus("00000000:00:1E.0, 0", "00000000:00:1F.0, 0")
    assert node.report() == (0, False)
    node.gpus()
    assert node.report() == (2, False)


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 63, 94])
def test_errors_of_programs_do_not_count(node: Node, xid: int) -> None:
    node.kernel(XID.format("1e", xid))
    assert node.report() == (0, False)


def test_uncorrected_memory_errors_and_several_gpus_count(node: Node) -> None:
    node.gpus("00000000:00:1E.0, 2", "00000000:00:1F.0, [N/A]")
    assert node.report() == (1, False)
    node.kernel(XID.format("1e", 79), XID.format("1f", 48))
    assert node.report() == (2, False)


def test_a_metric_that_is_refused_does_not_stop_the_replacement(node: Node) -> None:
    node.kernel(XID.format("1e", 119))
    assert [node.report()[1] for _ in range(2)] == [False, False]
    file = node.folder / "bin" / "aws"
    file.write_text(f"{file.read_text()}[[ $1 != cloudwatch ]]\n", encoding="utf-8")
    assert node.report() == (1, True)


def test_a_node_without_gpus_reports_none(node: Node) -> None:
    env = node.folder / "node.env"
    env.write_text(env.read_text(encoding="utf-8").replace("GPUS=2", "GPUS=0"), encoding="utf-8")
    node.gpus()
    assert node.report() == (0, False)
    assert not (node.folder / "host").exists()
