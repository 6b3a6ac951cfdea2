"""The image's `train` program on two hosts that share no folder: two addresses of this machine's loopback interface."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from opt_ml import LONG, Host, hyperparameters, opt_ml, run_job
from processes import LONG_S, children_of, copy_of_first_checkpoint, losses, rank_of, same_weights

from maskfleet.inference.load import load
from maskfleet.log import SAGEMAKER_METRICS, metric_pattern
from maskfleet.model.weights.checkpoint import CheckpointFolder
from maskfleet.training.output.metrics import read_metrics
from ports import free_port

HOSTS = ("127.0.0.1", "127.0.0.2")
ARTIFACTS = {
    *("run.yaml", "metrics.jsonl", "environment.json", "log.txt", "report.html", "detections.npz", "tensorboard"),
    *("model.safetensors", "checkpoints"),
}


def until(condition: Callable[[], bool], hosts: list[Host]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        assert all(host.process.poll() is None for host in hosts), "\n".join(host.printed for host in hosts)
        time.sleep(0.02)


def steps_done(host: Host) -> int:
    return max((int(record["step"]) for record in read_metrics(host.root / "checkpoints")), default=0)


@pytest.fixture(scope="module")
def finished(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Host]:
    """A job on two hosts that ran to its end."""
    folder = tmp_path_factory.mktemp("job")
    return run_job([opt_ml(folder / host, shapes, HOSTS, index) for index, host in enumerate(HOSTS)], free_port())


@pytest.mark.slow
def test_a_job_on_two_hosts_leaves_its_artifacts(finished: list[Host]) -> None:
    first, second = finished
    assert "2 ranks on CPU" in first.stdout
    model = first.root / "model"
    assert {path.name for path in model.iterdir()} == ARTIFACTS
    assert list((model / "tensorboard").glob("events.*"))
    assert len(losses(model)) == 12 + 1
    assert {path.name for path in (second.root / "model").iterdir()} == {"log-rank1.txt"}
    assert load(model, "cpu").class_names, "the model folder is a run that can be loaded"
    steps = CheckpointFolder(model / "checkpoints").intact_steps()
    assert steps[-1] == 12
    assert f"step {steps[0]}" in load(model, "cpu", checkpoint=steps[0]).source


@pytest.mark.slow
def test_two_hosts_compute_what_two_ranks_of_one_host_do(finished: list[Host], shapes: Path, tmp_path: Path) -> None:
    alone = Host(opt_ml(tmp_path / "alone", shapes), "--ranks", "2")
    assert alone.code() == 0, alone.printed
    assert losses(alone.root / "model") == losses(finished[0].root / "model")
    assert same_weights(alone.root / "model", finished[0].root / "model")


@pytest.mark.slow
def test_a_finished_job_that_is_started_again_only_leaves_its_artifacts(
    finished: list[Host], shapes: Path, tmp_path: Path
) -> None:
    root = opt_ml(tmp_path / "again", shapes)
    shutil.copytree(finished[0].root / "checkpoints", root / "checkpoints")
    again = Host(root, "--ranks", "2")
    assert again.code() == 0, again.printed
    assert losses(root / "model") == losses(finished[0].root / "model")
    assert same_weights(root / "model", finished[0].root / "model")


@pytest.mark.slow
def test_metric_definitions_find_the_values_of_metrics_jsonl_and_nothing_else(finished: list[Host]) -> None:
    records = read_metrics(finished[0].root / "model")
    assert {name for name, _ in SAGEMAKER_METRICS} <= {name for record in records for name in record}
    every = dict(SAGEMAKER_METRICS) | {name: metric_pattern(name) for record in records for name in record}
    del every["time"]  # the time stamp of the record, which is in no log line
    for name, pattern in every.items():
        found = [float(value) for line in finished[0].stdout.splitlines() for value in re.findall(pattern, line)]
        expected = [record[name] for record in records if name in record]
        assert str(found) == str([float(value) for value in expected]), name  # as text, where NaN equals NaN
    assert not [line for line in finished[1].printed.splitlines() if "loss:" in line], "only rank 0 prints metrics"


@pytest.mark.slow
def test_a_job_resumes_on_as_many_hosts_with_the_same_result_and_on_one(
    finished: list[Host], shapes: Path, tmp_path: Path
) -> None:
    saved = copy_of_first_checkpoint(finished[0].root / "checkpoints", tmp_path / "saved")
    (step,) = CheckpointFolder(saved / "checkpoints").intact_steps()
    assert 0 < step < 12

    def resumed(name: str, hosts: tuple[str, ...]) -> Host:
        roots = [opt_ml(tmp_path / name / host, shapes, hosts, index) for index, host in enumerate(hosts)]
        shutil.copytree(saved, roots[0] / "checkpoints")  # the second host has no checkpoint
        job = run_job(roots, free_port())[0]
        assert f"resuming after step {step}" in job.stdout
        return job

    again = resumed("again", HOSTS)
    assert losses(again.root / "model") == losses(finished[0].root / "model")
    assert same_weights(again.root / "model", finished[0].root / "model")
    fewer = resumed("fewer", HOSTS[:1])
    assert "the run resumes with 1 ranks" in fewer.stdout
    assert (fewer.root / "model" / "model.safetensors").exists()


@pytest.mark.slow
def test_all_hosts_save_and_exit_when_one_gets_sigterm(shapes: Path, tmp_path: Path) -> None:
    """tests/cluster resumes such a job."""
    settings, port = hyperparameters(LONG), str(free_port())
    roots = [opt_ml(tmp_path / host, shapes, HOSTS, index, settings=settings) for index, host in enumerate(HOSTS)]
    stopped = [Host(root, "--port", port) for root in roots]
    until(lambda: steps_done(stopped[0]) >= 2, stopped)
    stopped[1].process.send_signal(signal.SIGTERM)
    assert [host.code() for host in stopped] == [143, 143], "\n".join(host.printed for host in stopped)
    assert [host.failure for host in stopped] == [None, None]
    step = CheckpointFolder(roots[0] / "checkpoints" / "checkpoints").intact_steps()[-1]
    assert step == steps_done(stopped[0]) < 72
    assert CheckpointFolder(roots[0] / "model" / "checkpoints").intact_steps() == [step]


@pytest.mark.slow
def test_a_rank_that_dies_fails_the_job_and_the_reason_says_so(shapes: Path, tmp_path: Path) -> None:
    settings, port = hyperparameters(LONG), str(free_port())
    roots = [opt_ml(tmp_path / host, shapes, HOSTS, index, settings=settings) for index, host in enumerate(HOSTS)]
    hosts = [Host(root, "--port", port) for root in roots]
    until(lambda: steps_done(hosts[0]) >= 3, hosts)
    os.kill(next(pid for pid in children_of(hosts[1].process.pid) if rank_of(pid) == 1), signal.SIGKILL)
    codes = [host.code() for host in hosts]
    assert codes[1] == 137
    assert codes[0] not in (0, 143)
    assert hosts[1].failure is not None
    assert hosts[1].failure.startswith("rank 1 on 127.0.0.2 was killed (signal 9)")
    assert hosts[0].failure is not None
    assert hosts[0].failure.startswith("rank 0: rank 0 lost another rank")


@pytest.mark.slow
def test_an_error_of_the_data_is_the_failure_reason(shapes: Path, tmp_path: Path) -> None:
    data = tmp_path / "set"
    shutil.copytree(shapes, data)
    for image in [path for path in data.rglob("*") if path.suffix in (".png", ".jpg")]:
        image.write_bytes(b"")
    host = Host(opt_ml(tmp_path / "ml", data))
    assert host.code() == 2, host.printed
    assert host.failure is not None
    assert host.failure.startswith("rank 0: ")
    assert "→" in host.failure
    assert len(host.failure.encode()) <= 1024
    assert host.failure.splitlines()[0].removeprefix("rank 0: ") in host.stdout
