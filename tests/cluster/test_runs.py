"""Runs over three hosts."""

from __future__ import annotations

import os
import signal
import time
from datetime import datetime

from client import Client, run_dir_of, until
from processes import losses

from maskfleet.model.weights.checkpoint import CheckpointFolder
from maskfleet.training.output.metrics import read_metrics

LONG = ("-s", "eval.every_epochs=0", "-s", "checkpoint.every_epochs=5", "-s", "train.epoch_schedule=[[150, null]]")


def test_the_same_run_has_the_same_losses_under_local_ssh_and_mpirun(client: Client) -> None:
    by_ssh = client.launched("--name", "by-ssh")
    output = client.finish(by_ssh)
    assert "3 ranks on CPU" in output
    by_mpirun = client.launched("--name", "by-mpirun", "--with", "mpirun")
    output = client.finish(by_mpirun)
    assert "3 ranks on CPU" in output
    local = client("launch", "-c", str(client.run_file), "--name", "here", "--ranks", "3")
    assert local.returncode == 0, local.stdout + local.stderr
    here = run_dir_of(local.stdout.splitlines()[0])
    assert len(losses(here)) == 12 + 2
    assert losses(run_dir_of(by_ssh)) == losses(here)
    assert losses(run_dir_of(by_mpirun)) == losses(here)


def test_a_host_that_is_cut_off_and_comes_back_costs_no_step(client: Client) -> None:
    cluster = client.cluster
    handle = client.launched("--name", "survivor", "--min-nodes", "2", *LONG)
    run_dir = run_dir_of(handle)
    until(lambda: any(record["step"] >= 30 for record in read_metrics(run_dir)))
    cluster.cut_host(3)
    cut_at = time.time()
    until(lambda: any(record["ranks"] == 2 for record in read_metrics(run_dir)))
    status = client.status(handle)
    assert status["state"] == "running"
    assert [host["state"] for host in status["hosts"]] == ["running", "running", "lost"]
    lost = [event for event in status["events"] if "host 2 (node3) is lost" in event]
    assert lost
    resumed = next(record["time"] for record in read_metrics(run_dir) if record["ranks"] == 2)
    print(f"resumed {resumed - cut_at:.1f} s after the cut")
    cluster.start_host(3)
    back_at = time.time()
    until(lambda: read_metrics(run_dir)[-1]["ranks"] == 3)
    print(f"three again {time.time() - back_at:.1f} s after the return")
    output = client.finish(handle)
    assert "host 2 (node3) is lost" in output
    assert "host 2 (node3) is back" in output
    records = read_metrics(run_dir)
    steps = [record["step"] for record in records]
    assert steps == list(range(1, len(steps) + 1))
    assert {record["ranks"] for record in records} == {2, 3}
    images = sum(record["ranks"] for record in records)
    assert abs(images - 150 * 12) <= 3 * 3
    newest = CheckpointFolder(run_dir / "checkpoints").newest()
    assert newest is not None
    assert newest.step == steps[-1]
    detected = datetime.fromisoformat(lost[0].split()[0]).timestamp()
    assert resumed > detected


def test_the_run_outlives_the_process_that_launched_it(client: Client) -> None:
    launcher = client.start(*client.options("--name", "orphan", "-s", "train.epoch_schedule=[[20, null]]"))
    assert launcher.stdout is not None
    handle = launcher.stdout.readline().strip()
    run_dir = run_dir_of(handle)
    until(lambda: any(record["step"] >= 5 for record in read_metrics(run_dir)))
    os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait()
    launcher.stdout.close()
    output = client.finish(handle)
    steps = [line for line in output.splitlines() if line.startswith("[rank0]: ") and " step: " in line]
    logged = [line for line in steps if "evaluation" not in line]
    assert len(logged) == 20 * 4
    assert "training is done" in output
    only = client("logs", handle, "--rank", "2").stdout
    assert [line for line in only.splitlines() if not line.startswith("[rank2]: ")] == []
    assert only


def test_cancel_leaves_no_process_on_any_host_twice_in_a_row(client: Client) -> None:
    handle = client.launched("--name", "cancelled", *LONG)
    run_dir = run_dir_of(handle)
    until(lambda: any(record["step"] >= 5 for record in read_metrics(run_dir)))
    assert all(client.cluster.processes(number) for number in (1, 2, 3))
    for _ in range(2):
        done = client("cancel", handle)
        assert done.returncode == 0, done.stderr
        client.cluster.until_idle()
    assert client.status(handle)["state"] == "cancelled"
    newest = CheckpointFolder(run_dir / "checkpoints").newest()
    assert newest is not None
    assert newest.step == read_metrics(run_dir)[-1]["step"]


def test_the_run_continues_without_the_host_that_led_it(client: Client) -> None:
    cluster = client.cluster
    handle = client.launched("--name", "leaderless", "--min-nodes", "2", *LONG)
    run_dir = run_dir_of(handle)
    until(lambda: any(record["step"] >= 20 for record in read_metrics(run_dir)))
    cluster.cut_host(1)
    try:
        until(lambda: any(record["ranks"] == 2 for record in read_metrics(run_dir)))
    finally:
        cluster.start_host(1)
    until(lambda: read_metrics(run_dir)[-1]["ranks"] == 3)
    assert any("host 1 is the new leader" in event for event in client.status(handle)["events"])
    assert client("cancel", handle).returncode == 0
    steps = [record["step"] for record in read_metrics(run_dir)]
    assert steps == list(range(1, len(steps) + 1))


def test_mpirun_that_hangs_on_a_lost_host_is_stopped_and_the_run_continues_and_takes_the_host_back(
    client: Client,
) -> None:
    cluster = client.cluster
    handle = client.launched("--name", "mpi-loss", "--with", "mpirun", "--min-nodes", "2", *LONG)
    run_dir = run_dir_of(handle)
    until(lambda: any(record["step"] >= 20 for record in read_metrics(run_dir)))
    cluster.cut_host(3)
    try:
        until(lambda: any(record["ranks"] == 2 for record in read_metrics(run_dir)))
    finally:
        cluster.start_host(3)
    until(lambda: read_metrics(run_dir)[-1]["ranks"] == 3)
    assert client("cancel", handle).returncode == 0
    steps = [record["step"] for record in read_metrics(run_dir)]
    assert steps == list(range(1, len(steps) + 1))
    cluster.until_idle()


def test_a_host_without_a_network_stays_out_until_it_has_one_again(client: Client) -> None:
    """Nothing is killed: the host keeps running, sees the shared folder, and must notice by itself."""
    cluster = client.cluster
    handle = client.launched("--name", "unplugged", "--min-nodes", "2", *LONG)
    run_dir = run_dir_of(handle)
    until(lambda: any(record["step"] >= 20 for record in read_metrics(run_dir)))
    cluster.unplug(2)
    try:
        until(lambda: any(record["ranks"] == 2 for record in read_metrics(run_dir)))
    finally:
        cluster.plug(2)
    until(lambda: read_metrics(run_dir)[-1]["ranks"] == 3)
    assert any("node2) reaches no other host" in event for event in client.status(handle)["events"])
    assert client("cancel", handle).returncode == 0
    steps = [record["step"] for record in read_metrics(run_dir)]
    assert steps == list(range(1, len(steps) + 1))
