"""Runs over three hosts."""

from __future__ import annotations

import time
from datetime import datetime

from client import Client, run_dir_of, until
from processes import losses

from maskfleet.training.checkpoint import CheckpointStore
from maskfleet.training.metrics import read_metrics

LONG = ("-s", "eval.every_epochs=0", "-s", "checkpoint.every_epochs=5", "-s", "train.epoch_schedule=[[150, null]]")


def test_the_same_run_has_the_same_losses_under_local_ssh_and_mpirun(client: Client) -> None:
    by_torchrun = client.launched("--name", "by-torchrun")
    output = client.finish(by_torchrun)
    assert "3 ranks on CPU" in output
    by_mpirun = client.launched("--name", "by-mpirun", "--with", "mpirun")
    output = client.finish(by_mpirun)
    assert "3 ranks on CPU" in output
    local = client("launch", "-c", str(client.run_file), "--name", "here", "--ranks", "3")
    assert local.returncode == 0, local.stdout + local.stderr
    here = run_dir_of(local.stdout.splitlines()[0])
    assert len(losses(here)) == 12 + 2
    assert losses(run_dir_of(by_torchrun)) == losses(here)
    assert losses(run_dir_of(by_mpirun)) == losses(here)


def test_a_host_that_is_cut_off_and_comes_back_costs_no_step(client: Client) -> None:
    cluster = client.cluster
    handle = client.launched("--name", "survivor", "--min-nodes", "2", *LONG)
    run_dir = run_dir_of(handle)
    until(lambda: any(record["step"] >= 30 for record in read_metrics(run_dir)))
    cluster.cut_host(3)
    cut_at = time.time()
    until(lambda: any(record["ranks"] == 2 for record in read_metrics(run_dir)), 120)
    status = client.status(handle)
    assert status["state"] == "running"
    assert [host["state"] for host in status["hosts"]] == ["running", "running", "lost"]
    lost = [event for event in status["events"] if "host 2 (node3) is lost" in event]
    assert lost
    resumed = next(record["time"] for record in read_metrics(run_dir) if record["ranks"] == 2)
    print(f"resumed {resumed - cut_at:.1f} s after the cut")
    cluster.start_host(3)
    back_at = time.time()
    until(lambda: read_metrics(run_dir)[-1]["ranks"] == 3, 120)
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
    newest = CheckpointStore(run_dir / "checkpoints", keep_last=3).newest()
    assert newest is not None
    assert newest.step == steps[-1]
    detected = datetime.fromisoformat(lost[0].split()[0]).timestamp()
    assert 0 < resumed - detected < 90
