"""A host that is gone for good: a new one takes its place in the running job, whether or not it led."""

from __future__ import annotations

import pytest
from client import Client, run_dir_of, until

from maskfleet.launch.supervise.job_files import JobFolder
from maskfleet.training.output.metrics import read_metrics

ENDLESS = (
    "-s", "eval.every_epochs=0", "-s", "checkpoint.every_epochs=2", "-s", "train.epoch_schedule=[[4000, null]]"
)  # fmt: skip


@pytest.mark.parametrize("lost", [0, 1])
def test_a_new_host_takes_the_place_of_one_that_is_gone(client: Client, lost: int) -> None:
    cluster = client.cluster
    listing, program = cluster.shared / "there-are", cluster.shared / "list-hosts"
    listing.write_text("node1 slots=1\nnode2 slots=1\n")
    program.write_text(f"#!/bin/sh\nexec cat {listing}\n")
    program.chmod(0o755)
    options = ("--hosts", "node1,node2", "--launch-set", f"hosts_command={program}")
    handle = client.launched("--name", f"replaced-{lost}", *ENDLESS, *options)
    run_dir = run_dir_of(handle)
    until(lambda: JobFolder(run_dir).newest_checkpoint() > 0)
    cluster.cut_host(lost + 1)
    try:
        listing.write_text(f"node{2 - lost} slots=1\nnode3 slots=1\n")
        until(lambda: JobFolder(run_dir).job().hosts[lost].address == "node3")
        until(lambda: "maskfleet train" in " ".join(cluster.processes(3)))
        step = JobFolder(run_dir).newest_checkpoint()
        until(lambda: JobFolder(run_dir).newest_checkpoint() > step)
    finally:
        cluster.start_host(lost + 1)
    assert read_metrics(run_dir)[-1]["ranks"] == 2
    # The handle still names the hosts of the launch, of which one is enough to ask.
    status = client.status(handle)
    assert [host["address"] for host in status["hosts"]] == (["node3", "node2"], ["node1", "node3"])[lost]
    assert f"host {lost} (node{lost + 1}) is replaced by node3" in " ".join(status["events"])
    cluster.inside(3, "kill", "-9", str(JobFolder(run_dir).heartbeat(lost).pid))  # type: ignore[union-attr]
    assert client("cancel", handle).returncode == 0
    steps = [record["step"] for record in read_metrics(run_dir)]
    assert steps == list(range(1, len(steps) + 1))
    until(lambda: not any("maskfleet" in line for number in (1, 2, 3) for line in cluster.processes(number)))
