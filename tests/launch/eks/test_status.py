"""What status and explain say of a job, for each way in which a cluster shows that it waits or failed.

Each file in eks/ holds objects as the API gives them. They were written after the messages that Kubernetes, the MPI
operator, Karpenter and Kueue send, and served by the fake API.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from eks_world import helm_record, launcher, mpijob

from maskfleet.errors import LaunchError
from maskfleet.launch.backend import backend_of, parse_handle
from maskfleet.launch.job import JobHandle, JobState
from maskfleet.system.kube.client import ApiError
from maskfleet.system.kube.fake import FakeKube
from ports import free_port

CASES = Path(__file__).parent / "cases"
HANDLE = JobHandle("eks", "kubeflow", "r50")


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKube]:
    fake = FakeKube(tmp_path, port=free_port())
    monkeypatch.setenv("KUBECONFIG", str(fake.kubeconfig))
    yield fake
    fake.stop()


def filled(api: FakeKube, name: str) -> dict[str, Any]:
    """The case `name`, whose objects `api` has from now on."""
    case: dict[str, Any] = json.loads((CASES / f"{name}.json").read_text())
    api.add(*case["things"])
    for pod, lines in case["logs"].items():
        api.append_log(pod, *lines)
    return case


@pytest.mark.parametrize("name", sorted(path.stem for path in CASES.glob("*.json")))
def test_each_trouble_is_explained_with_its_cause_and_a_next_step(name: str, api: FakeKube) -> None:
    case = filled(api, name)
    assert backend_of(HANDLE).status(HANDLE).state == case["state"]
    told = backend_of(HANDLE).explain(HANDLE)
    if case["cause"] is None:
        assert "nothing to explain" in told
        return
    assert f"cause: {case['cause']}." in told
    assert "  → " in told
    for word in case["words"]:
        assert word in told


@pytest.mark.parametrize("name", ["no-capacity", "image-pull", "waits-for-karpenter"])
def test_a_launcher_that_waits_for_its_workers_does_not_hide_why_they_do_not_start(name: str, api: FakeKube) -> None:
    case = filled(api, name)
    waiting = json.loads((CASES / "workers-never-came.json").read_text())["things"]
    [pod] = [thing for thing in waiting if thing["kind"] == "Pod"]
    [wait] = pod["status"]["initContainerStatuses"]
    wait["state"] = {"running": {"startedAt": "2026-11-15T10:00:05Z"}}
    pod["status"] = {**pod["status"], "phase": "Pending"}
    api.add(pod)
    status = backend_of(HANDLE).status(HANDLE)
    assert status.state == "pending"
    assert status.detail.endswith("workers are ready")
    assert f"cause: {case['cause']}." in backend_of(HANDLE).explain(HANDLE)


def test_a_worker_killed_for_memory_is_explained_after_its_pod_is_deleted(api: FakeKube) -> None:
    # The launcher asked its workers before it ended; the other ranks' own errors, which come first, are not the cause.
    api.add(mpijob("Created", "Failed", completed=True), launcher(phase="Failed", code=1))
    api.append_log(
        "r50-launcher-1",
        "[1,0]<stderr>:Traceback (most recent call last):",
        "[1,0]<stderr>:torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0",
        "worker r50-worker-1 was OOMKilled: its container was restarted, shortly before it used 63.9 of its limit of "
        "64.0 GiB",
    )
    told = backend_of(HANDLE).explain(HANDLE)
    assert "cause: host memory. A worker was killed" in told
    assert "seen in: worker r50-worker-1 was OOMKilled" in told


def test_a_broken_gpu_is_explained_by_its_node_after_the_workers_are_deleted(api: FakeKube) -> None:
    # As EKS's node monitoring agent reports it: a condition of the node, whose name only the scheduler's event tells.
    node = "ip-10-0-1-5.ec2.internal"
    api.add(mpijob("Created", "Failed", completed=True), launcher(phase="Failed", code=1))
    api.add(
        {"kind": "Event", "metadata": {"name": "r50-worker-0.1", "namespace": "kubeflow"}, "reason": "Scheduled",
         "involvedObject": {"kind": "Pod", "name": "r50-worker-0"},
         "message": f"Successfully assigned kubeflow/r50-worker-0 to {node}"},
        {"kind": "Node", "metadata": {"name": node},
         "status": {"conditions": [{"type": "AcceleratedHardwareReady", "status": "False", "reason": "NvidiaXID79Error",
                                    "message": "detected XID-79 on the instance, review kernel logs"}]}},
    )  # fmt: skip
    api.append_log("r50-launcher-1", "[1,3]<stderr>:error: NCCL communicator was aborted on rank 3")
    told = backend_of(HANDLE).explain(HANDLE)
    assert "cause: gpu broken. A GPU of a node is broken." in told
    assert f"seen in: node {node} NvidiaXID79Error: detected XID-79" in told


def test_there_are_cases_for_all_that_users_are_promised() -> None:
    causes = {json.loads(path.read_text())["cause"] for path in CASES.glob("*.json")}
    assert len(causes - {None}) >= 20


def test_status_tells_hosts_step_restarts_and_exit_code(api: FakeKube) -> None:
    filled(api, "launcher-error")
    status = backend_of(HANDLE).status(HANDLE)
    assert (status.state, status.step, status.restarts, status.exit_code) == (JobState.FAILED, 60, 1, 1)
    assert status.detail.startswith("BackoffLimitExceeded")
    assert any("FailedScheduling" in event for event in status.events)


def test_hosts_are_the_workers_with_what_keeps_them(api: FakeKube) -> None:
    filled(api, "image-pull")
    first, second = backend_of(HANDLE).status(HANDLE).hosts
    assert (first.address, first.state) == ("r50-worker-0", "ImagePullBackOff")
    assert "train:nope" in first.detail
    assert (second.address, second.state, second.detail) == ("r50-worker-1", "running", "on ip-10-0-1-5.ec2.internal")


def test_a_worker_that_runs_has_found_its_node_whatever_was_said_before(api: FakeKube) -> None:
    case = json.loads((CASES / "no-gpu-node.json").read_text())
    pods = [thing for thing in case["things"] if thing["kind"] == "Pod"]
    pods[0]["status"]["phase"] = "Running"
    api.add(*case["things"])
    assert [host.state for host in backend_of(HANDLE).status(HANDLE).hosts] == ["running", "unschedulable"]


def test_a_job_that_lost_a_worker_says_how_many_are_left(api: FakeKube) -> None:
    filled(api, "node-lost")
    assert backend_of(HANDLE).status(HANDLE).detail == "1 of 2 workers are not ready"


def test_what_nobody_launched_is_unknown(api: FakeKube) -> None:
    status = backend_of(HANDLE).status(HANDLE)
    assert status.state is JobState.UNKNOWN
    assert "r50" in status.detail


@pytest.mark.parametrize(
    ("noted", "state"),
    [("uninstalled", "cancelled"), ("failed", "failed"), ("pending-install", "pending"), ("deployed", "lost")],
)
def test_helms_record_tells_what_became_of_a_job_without_mpijob(noted: str, state: str, api: FakeKube) -> None:
    api.add(helm_record("r50", {"image": "i"}), helm_record("r50", {"image": "i"}, status=noted, version=2))
    assert backend_of(HANDLE).status(HANDLE).state == state


def test_another_charts_release_is_no_job(api: FakeKube) -> None:
    api.add(helm_record("r50", {}, chart="notebook"))
    assert backend_of(HANDLE).status(HANDLE).state is JobState.UNKNOWN


def test_who_may_not_read_events_secrets_and_claims_still_sees_the_state(api: FakeKube) -> None:
    filled(api, "worker-oom")
    for kind in ("events", "secrets", "persistentvolumeclaims"):
        api.forbidden.add(f"/api/v1/namespaces/kubeflow/{kind}")
    api.forbidden.add("/api/v1/namespaces/default/events")
    status = backend_of(HANDLE).status(HANDLE)
    assert (status.state, status.step, status.events) == (JobState.RUNNING, 40, ())


def test_the_log_of_a_pod_on_a_dead_node_does_not_hide_the_state(api: FakeKube) -> None:
    filled(api, "node-lost")
    api.broken["/api/v1/namespaces/kubeflow/pods/r50-launcher-x7k2p/log"] = 502
    assert backend_of(HANDLE).status(HANDLE).state is JobState.RUNNING


def test_a_failed_job_whose_log_is_out_of_reach_is_explained_by_what_is_known(api: FakeKube) -> None:
    filled(api, "launcher-error")
    api.logs.clear()
    api.broken["/api/v1/namespaces/kubeflow/pods/r50-launcher-aaaaa/log"] = 502
    told = backend_of(HANDLE).explain(HANDLE)
    assert "attempt 2 ended with code 1" in told
    assert "cause: not known" in told


def test_a_cluster_out_of_reach_is_an_error_with_a_next_step(api: FakeKube) -> None:
    api.stop()
    with pytest.raises(ApiError, match="cannot be reached") as caught:
        backend_of(HANDLE).status(HANDLE)
    assert "kubeconfig" in caught.value.remedy
    api.start()


def test_a_context_that_the_kubeconfig_lacks_is_named(api: FakeKube) -> None:
    handle = JobHandle("eks", "nowhere@kubeflow", "r50")
    with pytest.raises(ApiError, match="No such context nowhere"):
        backend_of(handle).status(handle)


@pytest.mark.parametrize(
    "text", ["", "hello", "clusters: [", "[1, 2]", "clusters: 3", "{contexts: [{name: x}], current-context: x}", "\0"]
)
def test_a_damaged_kubeconfig_is_said_in_words(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(ApiError, match="no current context, or is damaged") as caught:
        backend_of(HANDLE).status(HANDLE)
    assert "KUBECONFIG" in caught.value.remedy


def test_a_context_that_is_an_arn_survives_the_handle(api: FakeKube) -> None:
    filled(api, "done")
    text = str(JobHandle("eks", "arn:aws:eks:us-west-2:1:cluster/a@kubeflow", "r50"))
    assert text == "eks://arn:aws:eks:us-west-2:1:cluster%2Fa@kubeflow/r50"
    parsed = parse_handle(text)
    assert backend_of(parsed).status(parsed).state is JobState.DONE


@pytest.mark.parametrize("text", ["eks://Kube_flow/r50", "eks://a@/r50"])
def test_a_handle_without_a_namespace_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="names no namespace"):
        backend_of(parse_handle(text))


def test_a_handle_of_a_file_is_no_job(api: FakeKube) -> None:
    with pytest.raises(LaunchError, match="names a file"):
        backend_of(HANDLE).status(parse_handle("eks://kubeflow/r50/log.txt"))


def test_no_key_or_token_stays_behind(api: FakeKube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    filled(api, "done")
    backend_of(HANDLE).status(HANDLE)
    assert list(place.iterdir()) == []


def launcher_job(kind: str) -> dict[str, Any]:
    end = {"type": kind, "status": "True", "reason": "BackoffLimitExceeded", "message": "it failed 3 times"}
    return {
        "kind": "Job",
        "metadata": {"name": "r50-launcher", "namespace": "kubeflow"},
        "status": {"conditions": [end]},
    }


@pytest.mark.parametrize(
    ("end", "state", "detail"),
    [
        ("Complete", JobState.DONE, ""),
        ("Failed", JobState.FAILED, "BackoffLimitExceeded: it failed 3 times"),
    ],
)
def test_while_the_operator_is_down_the_launchers_job_gives_the_state(
    end: str, state: JobState, detail: str, api: FakeKube
) -> None:
    api.add(mpijob("Created", "Running"), launcher(), launcher_job(end))
    status = backend_of(HANDLE).status(HANDLE)
    assert (status.state, status.detail) == (state, detail)


def test_only_a_job_without_pods_has_not_been_handled(api: FakeKube) -> None:
    api.add(mpijob())
    assert backend_of(HANDLE).status(HANDLE).detail == "the MPI operator has not handled it yet"
    api.add(launcher())
    assert backend_of(HANDLE).status(HANDLE).state is JobState.RUNNING


@pytest.mark.parametrize(("age_s", "is_named"), [(3, False), (300, True)])
def test_explain_names_an_operator_that_does_not_renew_its_lease(age_s: int, is_named: bool, api: FakeKube) -> None:
    renewed = (datetime.now(UTC) - timedelta(seconds=age_s)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    lease = {"kind": "Lease", "metadata": {"name": "mpi-operator", "namespace": "mpi"}, "spec": {"renewTime": renewed}}
    api.add(mpijob("Created", "Running"), launcher(), lease)
    told = backend_of(HANDLE).explain(HANDLE)
    assert ("cause: no operator." in told) is is_named
    assert ("its lease was renewed 30" in told) is is_named


def test_a_dead_operator_is_named_beside_what_its_pods_wait_for(api: FakeKube) -> None:
    renewed = (datetime.now(UTC) - timedelta(seconds=90)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    waits = launcher(1, phase="Pending")
    waits["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                                      "message": "0/0 nodes are available"}]  # fmt: skip
    lease = {"kind": "Lease", "metadata": {"name": "mpi-operator", "namespace": "mpi"}, "spec": {"renewTime": renewed}}
    api.add(mpijob("Created"), waits, lease)
    told = backend_of(HANDLE).explain(HANDLE)
    assert "The MPI operator does not run" in told
    assert "no node" in told
    assert told.index("no node") < told.index("The MPI operator does not run")
