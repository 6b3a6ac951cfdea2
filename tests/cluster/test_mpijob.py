"""The train chart's own commands, as the MPIJob has them, in two worker pods and a launcher pod."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from client import until
from pods import Job, Pod, key_pair, volume
from processes import losses
from train_release import main_container, render

from cluster import Cluster
from maskfleet.config.base import replaced
from maskfleet.config.load import dump, load
from maskfleet.config.recipes import recipe
from maskfleet.data.synthetic.dataset import make_shapes
from maskfleet.model.weights.checkpoint import CheckpointFolder
from maskfleet.training.output.metrics import read_metrics
from micro_run import MICRO

CPU: Mapping[str, Any] = {
    "gpu_instance_type": "",
    "gpus_per_node": 0,
    "cpus_per_node": 1,
    "memory_gib_per_node": 2,
    "gpu_nodes": 2,
}
RUN = {**MICRO, "data.root": "/fsx/data/shapes", "train.images_per_gpu": 1}
EPOCHS = 20
ODD = "/tmp/a b;$(touch x) `id` {{ y }} 'z'"
LONG = {**RUN, "eval.every_epochs": 0, "checkpoint.every_epochs": 5, "train.epoch_schedule": ((EPOCHS, None),)}


@pytest.fixture(scope="module")
def fsx(cluster: Cluster) -> Path:
    found = volume(cluster.folder / "fsx")
    make_shapes(
        found / "data" / "shapes",
        num_train=12,
        num_val=5,
        height=(64, 64),
        width=(64, 64),
        num_categories=2,
        max_objects=3,
        seed=3,
    )
    return found


@pytest.fixture
def install(cluster: Cluster, fsx: Path, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def installed(name: str, **values: Any) -> Job:
        jobs.append(Job(cluster, render(tmp_path, {**CPU, **values}, name=name), fsx))
        return jobs[-1]

    yield installed
    for job in jobs:
        for pod in job.pods:
            pod.kill()


def ready(job: Job) -> list[Pod]:
    """The two workers, after the launcher's init container has reached both."""
    waiting = job.init_container()
    until(lambda: "waiting for 2 of 2 workers" in waiting.log)
    workers = [job.worker(0), job.worker(1)]
    assert waiting.ended() == 0, waiting.log
    assert waiting.log.splitlines()[-1] == "all 2 workers answer"
    return workers


def run_yaml(changes: Mapping[str, Any]) -> str:
    return dump(replaced(recipe("demo"), changes))


def last_step(run_dir: Path) -> int:
    records = read_metrics(run_dir)
    return records[-1]["step"] if records else 0


def saved_step(run_dir: Path) -> int:
    newest = CheckpointFolder(run_dir / "checkpoints").newest()
    return newest.step if newest is not None else 0


def test_the_launchers_command_trains_on_two_workers_to_the_end(install: Callable[..., Job], fsx: Path) -> None:
    sets = [f"{name}={json.dumps(value)}" for name, value in {**RUN, "data.cache_dir": ODD}.items()]
    job = install("by-values", recipe="demo", data_dir="data/shapes", extra_config=sets)
    ready(job)
    launcher = job.launcher()
    assert launcher.ended() == 0, launcher.log
    assert "2 ranks on CPU" in launcher.log
    assert "[1,0]<std" in launcher.log
    assert "training is done" in launcher.log
    run_dir = fsx / "logs" / "by-values"
    assert len(losses(run_dir)) == 6 * 3 + 2
    assert load(run_dir / "run.yaml").data.cache_dir == ODD


@pytest.mark.parametrize("killed", ["launcher", "worker"])
def test_after_a_kill_the_next_attempt_resumes_from_the_last_checkpoint(
    install: Callable[..., Job], fsx: Path, killed: str
) -> None:
    job = install(f"killed-{killed}", run_yaml=run_yaml(LONG), run_id=f"kept-{killed}")
    run_dir = fsx / "logs" / f"kept-{killed}"
    workers = ready(job)
    first = job.launcher()
    until(lambda: last_step(run_dir) >= 35 and saved_step(run_dir) >= 30)
    if killed == "launcher":
        first.kill()
    else:
        workers[0].kill()
        assert first.ended() != 0
        workers[0] = job.worker(0)
    until(lambda: all("orted" not in pod.names() for pod in workers))
    saved = saved_step(run_dir)
    assert saved >= 30
    assert job.init_container().ended() == 0
    second = job.launcher()
    assert second.ended() == 0, second.log
    assert f"resuming after step {saved}" in second.log
    steps = [record["step"] for record in read_metrics(run_dir)]
    assert steps == list(range(1, EPOCHS * 6 + 1))
    logged = [line for line in second.log.splitlines() if "[1,0]" in line and " step: " in line]
    assert len(logged) == len(steps) - saved


def test_an_attempt_fails_by_itself_when_a_worker_loses_its_network(install: Callable[..., Job], fsx: Path) -> None:
    endless = {**LONG, "train.epoch_schedule": ((1000, None),)}
    job = install("silent", run_yaml=run_yaml(endless))
    workers = ready(job)
    launcher = job.launcher()
    until(lambda: last_step(fsx / "logs" / "silent") >= 7)
    cut_at = time.monotonic()
    job.cluster.unplug(2)
    try:
        assert launcher.ended() != 0
        print(f"mpirun exited {time.monotonic() - cut_at:.0f} s after the cut")
        until(lambda: all("orted" not in pod.names() for pod in workers))
    finally:
        job.cluster.plug(2)


@pytest.mark.parametrize("role", ["launcher", "worker"])
def test_a_pod_that_is_stopped_lets_the_ranks_save_first(install: Callable[..., Job], fsx: Path, role: str) -> None:
    job = install(f"leaving-{role}", run_yaml=run_yaml(LONG))
    run_dir = fsx / "logs" / job.name
    workers = ready(job)
    launcher = job.launcher()
    until(lambda: last_step(run_dir) >= 7)
    check = main_container(job.objects, "Launcher")["livenessProbe"]["exec"]["command"]
    assert launcher.exec(check).returncode == 0
    hook = main_container(job.objects, role.title())["lifecycle"]["preStop"]["exec"]["command"]
    leaving = launcher if role == "launcher" else workers[0]
    hooked = leaving.exec(hook)
    assert launcher.ended() != 0, launcher.log
    if role == "worker":  # the launcher's hook stops with its pod
        assert hooked.returncode == 0
        leaving.kill()
        assert launcher_check_fails(job, check)
    assert "stopped by SIGTERM after step" in launcher.log
    assert 7 <= saved_step(run_dir) == last_step(run_dir) < EPOCHS * 6


def launcher_check_fails(job: Job, check: list[str]) -> bool:
    """Whether the liveness probe of a launcher fails once a worker is gone."""
    still = job.init_container()
    try:
        return still.exec(check).returncode == 1
    finally:
        still.kill()


def test_workers_accept_only_the_jobs_key_and_the_launcher_trusts_only_its_workers(
    install: Callable[..., Job],
) -> None:
    job = install("guarded")
    other = key_pair(job.folder / "other")
    job.worker(0)
    job.worker(1, keys={**other, "authorized_keys": job.keys["authorized_keys"]})
    waiting = job.init_container()
    assert waiting.ended() == 0, waiting.log
    inside = job.worker(2)  # stands for any pod with the job's key and files
    ssh = ["ssh", "-F", "/etc/maskfleet/ssh_config"]
    accepted = inside.exec([*ssh, job.workers[0], "id", "-u"])
    assert (accepted.returncode, accepted.stdout) == (0, "1000\n"), accepted.stderr
    refused = inside.exec([*ssh, job.workers[1], "id", "-u"])
    assert refused.returncode == 255
    assert "Host key verification failed" in refused.stderr
    inside.kill()
    intruder = job.worker(2, keys=other | {"id_rsa.pub": job.keys["id_rsa.pub"]})
    denied = intruder.exec([*ssh, job.workers[0], "id", "-u"])
    assert denied.returncode == 255
    assert "Permission denied (publickey)" in denied.stderr
