"""The pods of an elastic job with the chart's own commands: they train on without one that is lost, and take it back.

There are three hosts and, for a pod that Kubernetes starts elsewhere, a fourth. They share the volume, nothing else.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from client import until
from pods import ElasticJob, volume
from train_release import render

from cluster import Cluster, why_not
from maskfleet.config.base import replaced
from maskfleet.config.load import dump
from maskfleet.config.recipes import recipe
from maskfleet.data.synthetic.dataset import make_shapes
from maskfleet.launch.supervise.job_files import JobFolder
from maskfleet.training.output.metrics import read_metrics
from micro_run import MICRO

CPU: Mapping[str, Any] = {
    "gpu_instance_type": "",
    "gpus_per_node": 0,
    "cpus_per_node": 1,
    "memory_gib_per_node": 2,
    "gpu_nodes": 3,
    "min_nodes": 2,
}
EPOCHS = 120  # the run must outlast the start of another pod
RUN = {
    **MICRO,
    "data.root": "/fsx/data/shapes",
    "train.images_per_gpu": 1,
    "eval.every_epochs": 0,
    "checkpoint.every_epochs": 5,
    "train.epoch_schedule": ((EPOCHS, None),),
}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if os.environ.get("MASKFLEET_TEST_CLUSTER") != "1":
        pytest.skip("four hosts in network namespaces: run `make test-cluster`")
    reason = why_not()
    if reason is not None:
        pytest.skip(f"NOT TESTED: four hosts on this machine: {reason}")
    found = Cluster(tmp_path_factory.mktemp("elastic"), 4, name="mfe", network="10.78.0")
    try:
        found.up()
        yield found
    finally:
        found.down()


@pytest.fixture(scope="module")
def fsx(hosts: Cluster) -> Path:
    found = volume(hosts.folder / "fsx")
    shapes = found / "data" / "shapes"
    make_shapes(
        shapes, num_train=12, num_val=5, height=(64, 64), width=(64, 64), num_categories=2, max_objects=3, seed=3
    )
    return found


@pytest.fixture
def install(hosts: Cluster, fsx: Path, tmp_path: Path) -> Iterator[Callable[..., ElasticJob]]:
    jobs: list[ElasticJob] = []

    def installed(name: str, **values: Any) -> ElasticJob:
        run_yaml = dump(replaced(recipe("demo"), RUN))
        jobs.append(ElasticJob(hosts, render(tmp_path, {**CPU, "run_yaml": run_yaml, **values}, name=name), fsx))
        return jobs[-1]

    yield installed
    for job in jobs:
        for pod in job.pods:
            pod.kill()


def last_step(run_dir: Path) -> int:
    records = read_metrics(run_dir)
    return records[-1]["step"] if records else 0


def members(run_dir: Path) -> list[int]:
    endpoint = JobFolder(run_dir).endpoint()
    return sorted(endpoint.members) if endpoint is not None else []


def grows(run_dir: Path, by: int = 10) -> None:
    before = last_step(run_dir)
    until(lambda: last_step(run_dir) >= before + by)


def events(run_dir: Path) -> list[str]:
    return [event.what for event in JobFolder(run_dir).events()]


def test_a_pod_whose_node_died_is_replaced_and_the_others_train_on_meanwhile(
    install: Callable[..., ElasticJob], hosts: Cluster, fsx: Path
) -> None:
    job, lost = install("died"), 0  # it leads
    run_dir = fsx / "logs" / "died"
    pods = [job.worker(index, index + 1) for index in range(3)]
    until(lambda: members(run_dir) == [0, 1, 2] and last_step(run_dir) >= 35)
    hosts.unplug(lost + 1)
    pods[lost].kill()
    died = time.monotonic()
    others = [index for index in range(3) if index != lost]
    until(lambda: members(run_dir) == others)
    at = last_step(run_dir)
    until(lambda: last_step(run_dir) > at)
    print(f"the others made a step {time.monotonic() - died:.1f} s after the node died")
    grows(run_dir)
    pods[lost] = job.worker(lost, 4)
    until(lambda: members(run_dir) == [0, 1, 2])
    grows(run_dir)
    try:
        assert [pod.ended() for pod in pods] == [0, 0, 0], pods[lost].log
    finally:
        hosts.plug(lost + 1)
    steps = [record["step"] for record in read_metrics(run_dir)]
    assert steps == list(range(1, steps[-1] + 1))
    assert json.loads((run_dir / "launch" / "outcome.json").read_text())["state"] == "done"
    assert any("is lost: no sign of life" in what for what in events(run_dir))
    lines = pods[others[0]].log.splitlines() + pods[lost].log.splitlines()
    assert any(line.startswith("[rank0]: ") and " step: " in line for line in lines + pods[others[1]].log.splitlines())
    assert any(line.startswith("[launch]: ") for line in lines)


@pytest.mark.parametrize("leaves", [0, 2])
def test_a_pod_that_is_asked_to_leave_saves_and_costs_no_attempt(
    install: Callable[..., ElasticJob], fsx: Path, leaves: int
) -> None:
    job = install(f"left-{leaves}", backoff_limit=0)
    run_dir = fsx / "logs" / f"left-{leaves}"
    pods = [job.worker(index, index + 1) for index in range(3)]
    until(lambda: members(run_dir) == [0, 1, 2] and last_step(run_dir) >= 35)
    asked = time.monotonic()
    pods[leaves].terminate()
    assert pods[leaves].ended() == 143, pods[leaves].log
    print(f"the pod ended {time.monotonic() - asked:.1f} s after it was asked to leave")
    others = [index for index in range(3) if index != leaves]
    until(lambda: members(run_dir) == others)
    at = last_step(run_dir)
    until(lambda: last_step(run_dir) > at)
    print(f"the others made a step {time.monotonic() - asked:.1f} s after it was asked to leave")
    pods[leaves] = job.worker(leaves, 4)
    until(lambda: members(run_dir) == [0, 1, 2])
    assert [pod.ended() for pod in pods] == [0, 0, 0], pods[leaves].log
    steps = [record["step"] for record in read_metrics(run_dir)]
    assert steps == list(range(1, steps[-1] + 1))
    assert json.loads((run_dir / "launch" / "outcome.json").read_text())["state"] == "done"
    assert any("since a host leaves" in what for what in events(run_dir)) or leaves == 0
    assert not any("restart 1 of" in what for what in events(run_dir))
