"""Elastic jobs: what is sent, what status, logs, explain and cancel make of an Indexed Job, and the pods' program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
import yaml
from eks_world import IMAGE, fit_cluster, helm_record
from test_logs import Following

from maskfleet.config.launch import EksLaunch
from maskfleet.config.load import load
from maskfleet.config.recipes import recipe
from maskfleet.errors import LaunchError
from maskfleet.launch.backend import backend_of
from maskfleet.launch.eks.backend import EksBackend
from maskfleet.launch.eks.elastic import pod as program
from maskfleet.launch.eks.jobs import following as eks_following
from maskfleet.launch.job import JobHandle, JobState
from maskfleet.launch.supervise.job_files import Endpoint, Host, Job, JobFolder, Scheduler
from maskfleet.launch.supervise.state.kept_lines import KeptLines
from maskfleet.system.kube.fake import FakeKube
from maskfleet.system.process import RecordingShell
from ports import free_port

HANDLE = JobHandle("eks", "kubeflow", "r50")
OURS = {"app.kubernetes.io/part-of": "maskfleet"}


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKube]:
    fake = fit_cluster(FakeKube(tmp_path, port=free_port()))
    monkeypatch.setenv("KUBECONFIG", str(fake.kubeconfig))
    monkeypatch.setattr(eks_following, "POLL_S", 0.05)
    yield fake
    fake.stop()


def indexed_job(*conditions: str, suspend: bool = False, queue: str = "") -> dict[str, Any]:
    status = {"conditions": [{"type": kind, "status": "True", "reason": kind} for kind in conditions]}
    labels = OURS | ({"kueue.x-k8s.io/queue-name": queue} if queue else {})
    return {"kind": "Job", "metadata": {"name": "r50", "namespace": "kubeflow", "labels": labels,
                                        "creationTimestamp": "2026-11-15T10:00:00Z"},
            "spec": {"completionMode": "Indexed", "completions": 3, "suspend": suspend,
                     "successPolicy": {"rules": [{"succeededCount": 2}]}}, "status": status}  # fmt: skip


def worker(index: int, *, phase: str = "Running", code: int | None = None, attempt: int = 1, why: str = "Error") -> Any:
    state: Any = {"running": {}} if code is None else {"terminated": {"exitCode": code, "reason": why}}
    labels = {"batch.kubernetes.io/job-name": "r50", "batch.kubernetes.io/job-completion-index": str(index)}
    return {"kind": "Pod", "spec": {"volumes": []},
            "metadata": {"name": f"r50-{index}-{'abcde'[:4]}{attempt}", "namespace": "kubeflow", "labels": labels,
                         "creationTimestamp": f"2026-11-15T10:0{attempt}:00Z"},
            "status": {"phase": phase, "conditions": [],
                       "containerStatuses": [] if phase == "Pending" else [
                           {"name": "worker", "restartCount": 0, "state": state}]}}  # fmt: skip


def test_min_nodes_makes_the_chart_render_an_indexed_job() -> None:
    backend = EksBackend(EksLaunch(image=IMAGE, nodes=3, min_nodes=2), run=RecordingShell())
    values = yaml.safe_load(backend.render(backend.job(recipe("standard"), name="r50")).files["values.yaml"])
    assert (values["gpu_nodes"], values["min_nodes"]) == (3, 2)
    plain = EksBackend(EksLaunch(image=IMAGE, nodes=3), run=RecordingShell())
    assert "min_nodes" not in plain.render(plain.job(recipe("standard"), name="r50")).files["values.yaml"]
    with pytest.raises(LaunchError, match="needs at least 4 hosts, but it has only 3"):
        EksBackend(EksLaunch(image=IMAGE, nodes=3, min_nodes=4)).job(recipe("standard"))


@pytest.mark.parametrize(
    ("job", "workers", "state", "detail"),
    [
        (indexed_job(), [worker(0, phase="Pending")], JobState.PENDING, "0 of 3 workers run, and it needs 2"),
        (indexed_job(), [worker(0), worker(1), worker(2)], JobState.RUNNING, ""),
        (indexed_job(), [worker(0), worker(1, phase="Pending"), worker(2)], JobState.RUNNING,
         "continues with 2 of 3 workers"),
        (indexed_job(suspend=True, queue="gpus"), [], JobState.PENDING, "waits in queue gpus"),
        (indexed_job("SuccessCriteriaMet"), [worker(0)], JobState.DONE, ""),
        (indexed_job("Complete"), [worker(0, phase="Succeeded", code=0)], JobState.DONE, ""),
        (indexed_job("Failed"), [worker(0, phase="Failed", code=10)], JobState.FAILED, "Failed"),
    ],
)  # fmt: skip
def test_the_state_comes_from_the_job_and_its_newest_pods(
    api: FakeKube, job: Any, workers: list[Any], state: JobState, detail: str
) -> None:
    api.add(job, *workers, worker(0, phase="Failed", code=143, attempt=0))
    found = backend_of(HANDLE).status(HANDLE)
    assert (found.state, found.detail) == (state, detail)


def test_a_run_that_waits_for_workers_has_begun(api: FakeKube) -> None:
    api.add(indexed_job(), worker(0), worker(1, phase="Pending"))
    api.append_log("r50-0-abcd1", "[rank0]: 10:00:00 step: 41/90  loss: 1.5")
    found = backend_of(HANDLE).status(HANDLE)
    assert (found.state, found.step, found.min_nodes) == (JobState.RUNNING, 41, 2)
    assert found.detail == "waits for workers: 1 of 3 run, and it needs 2"


def test_a_failed_run_is_explained_by_what_its_supervisors_and_ranks_said(api: FakeKube) -> None:
    api.add(indexed_job("Failed"), worker(0, phase="Failed", code=10))
    api.append_log("r50-0-abcd1", "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
                   "[launch]: the run is failed: the ranks ended with code 1 after 3 restarts")  # fmt: skip
    told = backend_of(HANDLE).explain(HANDLE)
    assert "The run is failed: the ranks ended with code 1 after 3 restarts." in told
    assert "worker 0 ended with code 10, pod r50-0-abcd1" in told
    assert "gpu memory" in told.lower()


def test_follow_shows_all_workers_and_names_those_that_are_replaced(api: FakeKube) -> None:
    job, lost = indexed_job(), worker(1)
    api.add(job, worker(0), lost)
    api.append_log("r50-1-abcd1", "[rank1]: one", second=1)
    api.append_log("r50-0-abcd1", "[rank0]: two", second=2)
    following = Following()
    following.shows("two")
    lost["status"] = worker(1, phase="Failed", code=143)["status"]
    lost["status"]["conditions"] = [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]
    following.shows("worker 1 in pod r50-1-abcd1 ended with code 143 (EvictionByEvictionAPI)")
    api.add(worker(1, attempt=2))
    api.append_log("r50-1-abcd2", "[rank1]: three", second=3)
    following.shows("three")
    api.append_log("r50-0-abcd1", "[rank0]: last", second=4)
    job["status"] = indexed_job("Complete")["status"]
    lines = following.end()
    assert following.of_ranks() == ["[rank1]: one", "[rank0]: two", "[rank1]: three", "[rank0]: last"]
    assert "[launch]: pod r50-1-abcd2 takes the place of r50-1-abcd1 as worker 1" in lines


def test_cancel_leaves_a_finished_job_and_removes_one_that_runs(api: FakeKube) -> None:
    shell = RecordingShell()
    backend = EksBackend(EksLaunch(), run=shell)
    api.add(indexed_job("Complete"), helm_record("r50", {"min_nodes": 2}))
    backend.cancel(HANDLE)
    assert shell.calls == []
    api.add(indexed_job())
    backend.cancel(HANDLE)
    assert [call[0][:3] for call in shell.calls] == [["helm", "uninstall", "r50"]]


def job_for(uid: str) -> Job:
    hosts = (Host("r50-0", 1), Host("r50-1", 1))
    return Job("r50", "supervisor", hosts, 1, 3, 0, "/", scheduler=Scheduler(uid, 900))


def test_the_first_pod_of_a_job_prepares_its_folder_and_the_others_leave_it_alone(tmp_path: Path) -> None:
    run, folder = "recipe: demo\n", JobFolder(tmp_path)
    program.prepare(tmp_path, job_for("a"), run)
    assert folder.known_job() == job_for("a")
    folder.write_outcome("failed", 1)
    folder.write_endpoint(Endpoint(3, 0, "10.0.0.1"))
    program.prepare(tmp_path, job_for("a"), run)
    assert folder.outcome() is not None, "it is that of this job"
    program.prepare(tmp_path, job_for("b"), run)
    assert (folder.outcome(), folder.endpoint()) == (None, None)
    assert folder.known_job() == job_for("b")
    assert load(tmp_path / "run.yaml") == recipe("demo")


@pytest.mark.parametrize(("state", "code"), [("done", 0), ("failed", 10), ("cancelled", 10), (None, 143)])
def test_the_exit_code_tells_the_job_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str | None, code: int
) -> None:
    program.prepare(tmp_path, job_for("a"), "recipe: demo\n")
    slept: list[float] = []
    monkeypatch.setattr(program.time, "sleep", slept.append)
    monkeypatch.setattr(program.signal, "signal", lambda number, handler: None)
    JobFolder(tmp_path).write_endpoint(Endpoint(0, 1, "10.0.0.1"))
    if state is not None:
        JobFolder(tmp_path).write_outcome(state, 1)
    assert program.closed(tmp_path, 0, 143) == code
    assert slept == ([] if state is None else [program.LEADER_FIRST_S])
    assert program.closed(tmp_path, 1, 143) == code
    assert len(slept) <= 1, "the leader leaves first: its log has rank 0"


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "code"), [(("--recipe", "nonsense"), 10), (("--recipe", "demo"), 143)])
def test_a_run_that_cannot_begin_fails_the_job_and_a_pod_that_waits_can_leave(
    tmp_path: Path, arguments: tuple[str, ...], code: int
) -> None:
    """The second pod never gets the lock of its number, which a dead pod holds."""
    from maskfleet.system.lock import locked

    numbers = ("--workers", "2", "--slots", "1", "--min-nodes", "1", "--max-restarts", "0", "--wait-s", "60")
    command = [sys.executable, "-m", "maskfleet.launch.eks.elastic.pod", str(tmp_path), "--name", "r50", *numbers]
    env = {"JOB_COMPLETION_INDEX": "0", "MASKFLEET_JOB_UID": "a", "MASKFLEET_HOST_ADDRESS": "127.0.0.1", "PATH": ""}
    (tmp_path / "launch" / "host-0").mkdir(parents=True)
    with locked(tmp_path / "launch" / "host-0" / "lock", "supervising"):
        process = subprocess.Popen([*command, *arguments], env=env, stderr=subprocess.PIPE, text=True)
        if code == 143:
            while not (tmp_path / "launch" / "job.json").exists():
                threading.Event().wait(0.05)
            process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=300)
    assert process.returncode == code, said
    assert code == 143 or "nonsense" in said


def test_every_line_of_a_supervisor_is_also_one_of_its_pod(tmp_path: Path) -> None:
    source, sink = os.pipe()
    with os.fdopen(sink, "wb", buffering=0) as pod:
        lines = KeptLines(tmp_path / "output.log", echo=cast(BinaryIO, pod))
        lines.add(b"2026-11-16T15:00:00.000001Z [rank0]: step: 1\n")
        assert os.read(source, 100) == b"[rank0]: step: 1\n"
        os.close(source)
        lines.add(b"2026-11-16T15:00:00.000002Z [rank0]: step: 2\n")
    assert (tmp_path / "output.log").read_text().count("Z [rank0]: step: ") == 2, "a closed pipe stops nobody"
