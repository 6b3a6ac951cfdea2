"""A SageMaker job on two hosts, each with its own network, process ids and /opt/ml tree."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path

from client import Client
from opt_ml import LONG, Host, hyperparameters, opt_ml
from processes import losses, same_weights

from maskfleet.model.weights.checkpoint import CheckpointFolder
from maskfleet.system.network import LOOPBACK
from maskfleet.training.output.metrics import read_metrics

NAMES = ("node1", "node2")
LIMIT_S = 600


def started(client: Client, name: str, count: int, *, resumed: Path | None = None) -> list[Host]:
    """The job on the first `count` hosts, which find each other by name; the first has the checkpoints of S3."""
    cluster, hosts = client.cluster, []
    for index in range(count):
        root = opt_ml(
            cluster.folder / name / NAMES[index],
            cluster.shared / "set",
            NAMES[:count],
            index,
            settings=hyperparameters(LONG),
            interface="eth0",
        )
        if resumed is not None and index == 0:
            shutil.copytree(resumed, root / "checkpoints")
        inside = ["ip", "netns", "exec", cluster.namespace(index + 1)]
        hosts.append(Host(root, inside=inside))
    return hosts


def ended(hosts: list[Host]) -> list[int]:
    codes = [host.code() for host in hosts]
    print("\n".join(host.printed for host in hosts))  # pytest shows it if the test fails
    return codes


def wait_for_step(host: Host, step: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not any(record["step"] >= step for record in read_metrics(host.root / "checkpoints")):
        assert time.monotonic() < deadline
        assert host.process.poll() is None, host.printed
        time.sleep(0.02)


def test_a_job_stopped_mid_run_resumes_with_one_host_fewer_or_with_the_same_result(client: Client) -> None:
    stopped = started(client, "stopped", 2)
    wait_for_step(stopped[0], 4)
    listening = subprocess.run(
        ["ip", "netns", "exec", client.cluster.namespace(1), "ss", "-ltnH"], capture_output=True, text=True, check=True
    ).stdout
    places = {line.split()[3].rpartition(":")[0] for line in listening.splitlines()}
    assert places <= {client.cluster.address(1), LOOPBACK}, "no port is open on all interfaces"
    for host in stopped:
        host.process.send_signal(signal.SIGTERM)
    assert ended(stopped) == [143, 143]
    assert [host.failure for host in stopped] == [None, None]
    saved = stopped[0].root / "checkpoints"
    step = CheckpointFolder(saved / "checkpoints").intact_steps()[-1]

    whole = started(client, "whole", 2)
    assert ended(whole) == [0, 0]
    again = started(client, "again", 2, resumed=saved)
    assert ended(again) == [0, 0]
    assert f"resuming after step {step}" in again[0].stdout
    assert losses(again[0].root / "model") == losses(whole[0].root / "model")
    assert same_weights(again[0].root / "model", whole[0].root / "model")
    assert (whole[1].root / "model" / "log-rank1.txt").exists()

    fewer = started(client, "fewer", 1, resumed=saved)
    assert ended(fewer) == [0]
    assert "the run resumes with 1 ranks" in fewer[0].stdout


def test_a_host_that_is_cut_off_fails_the_job_on_the_other(client: Client) -> None:
    hosts = started(client, "cut", 2)
    wait_for_step(hosts[0], 4)
    hosts[1].process.kill()  # with its rank, as when the instance is lost
    code, killed = ended(hosts)
    assert killed == -signal.SIGKILL
    assert code not in (0, 143)
    assert hosts[0].failure is not None
    assert "rank 0 lost another rank" in hosts[0].failure
    assert "node2" in hosts[0].failure
