"""Supervisors that die: their ranks die with them, and another host replaces them."""

from __future__ import annotations

import pytest
from client import Client, run_dir_of, until

from maskfleet.launch.supervise.job_files import JobFolder
from maskfleet.training.output.metrics import read_metrics

ENDLESS = (
    "-s", "eval.every_epochs=0", "-s", "checkpoint.every_epochs=2", "-s", "train.epoch_schedule=[[4000, null]]"
)  # fmt: skip


@pytest.mark.parametrize("host", [0, 2])
def test_a_supervisor_that_is_killed_takes_its_ranks_along_and_is_replaced(client: Client, host: int) -> None:
    cluster, number = client.cluster, host + 1
    handle = client.launched("--name", f"killed-{host}", *ENDLESS)
    run_dir = run_dir_of(handle)
    folder = JobFolder(run_dir)
    until(lambda: any(record["step"] >= 10 for record in read_metrics(run_dir)))
    heartbeat = folder.heartbeat(host)
    assert heartbeat is not None
    cluster.inside(number, "kill", "-9", str(heartbeat.pid))
    until(lambda: not any("maskfleet train" in line for line in cluster.processes(number)), 30)
    step = read_metrics(run_dir)[-1]["step"]

    def replaced() -> bool:
        now = folder.heartbeat(host)
        return now is not None and now.pid != heartbeat.pid and now.state == "running"

    until(replaced)
    until(lambda: read_metrics(run_dir)[-1]["step"] > step + 4)
    assert read_metrics(run_dir)[-1]["ranks"] == 3
    assert client("cancel", handle).returncode == 0
    steps = [record["step"] for record in read_metrics(run_dir)]
    assert steps == list(range(1, len(steps) + 1))
    cluster.until_idle()


def test_a_rank_that_dies_on_another_host_is_named_and_the_run_resumes(client: Client) -> None:
    cluster = client.cluster
    handle = client.launched("--name", "one-rank", *ENDLESS)
    run_dir = run_dir_of(handle)
    until(lambda: any(record["step"] >= 10 for record in read_metrics(run_dir)))
    lines = cluster.inside(2, "ps", "-e", "-o", "pid=,args=").stdout.splitlines()
    [pid] = [line.split()[0] for line in lines if "maskfleet train" in line]
    cluster.inside(2, "kill", "-9", pid)
    step = read_metrics(run_dir)[-1]["step"]
    until(lambda: read_metrics(run_dir)[-1]["step"] > step + 4)
    assert any(
        "first to fail: rank 1 on host 1 (node2), code 137" in event for event in client.status(handle)["events"]
    )
    assert client("cancel", handle).returncode == 0
    cluster.until_idle()
