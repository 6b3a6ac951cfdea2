"""What status and explain say of a job, for each way in which a cluster shows that it waits or failed.

Each file in eks/ holds objects as the API gives them. They were written after the messages that Kubernetes, the MPI
operator, Karpenter and Kueue send, and served by the fake API.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from eks_world import helm_record

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
