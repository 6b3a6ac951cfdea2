"""Elastic jobs, `maskfleet launch --on eks --min-nodes`, on a real API with real helm; they need no MPI operator.

There is no node: the tests set the status of pods as a kubelet would.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kube import Kube, Manifest, eventually, stays
from kubelet import Kubelet
from test_cli_eks import NAME, Fleet, bound_claim
from test_cli_logs import expect_logs
from test_cli_strict import with_documented_rights

from maskfleet.system.deploy_files import deploy_path

INDEX = "batch.kubernetes.io/job-completion-index"


@pytest.fixture
def elastic(kube: Kube) -> Iterator[Fleet]:
    """A namespace with a bound claim, and an elastic job of three workers that needs two."""
    with bound_claim(kube):
        fleet = Fleet(kube)
        done = fleet.launch("--min-nodes", "2", nodes=3)
        assert (done.returncode, done.stdout.strip()) == (0, fleet.handle), done.stderr
        try:
            yield fleet
        finally:
            # Without kubelets the pods of a Job would keep the namespace.
            kube.try_helm("uninstall", NAME)
            kube.try_kubectl("delete", "pods", "--all", "--force", "--grace-period=0", "--wait=false")


def workers(kube: Kube) -> dict[int, Manifest]:
    """The newest pod of each worker that has not ended and is not being deleted."""
    pods = [
        pod
        for pod in kube.list("pods", f"batch.kubernetes.io/job-name={NAME}")
        if pod["status"].get("phase") in ("Pending", "Running") and not pod["metadata"].get("deletionTimestamp")
    ]
    return {int(pod["metadata"]["labels"][INDEX]): pod for pod in pods}


def run_all(kube: Kube) -> dict[int, Manifest]:
    eventually(lambda: len(workers(kube)) == 3, what="three workers")
    for pod in workers(kube).values():
        kube.pod_runs(pod["metadata"]["name"])
    return workers(kube)


def ends(kube: Kube, pod: Manifest, code: int, reason: str = "Error", **more: Any) -> None:
    """The container of `pod` ends with `code`."""
    state = {"terminated": {"exitCode": code, "reason": reason if code else "Completed"}}
    status = {"name": "worker", "image": "i", "imageID": "", "ready": False, "restartCount": 0, "state": state}
    kube.set_pod_status(
        pod["metadata"]["name"], phase="Failed" if code else "Succeeded", containerStatuses=[status], **more
    )


def evict(kube: Kube, pod: Manifest) -> bool:
    """As Karpenter drains the node of a Spot instance that is reclaimed; False if the budget refuses."""
    name = pod["metadata"]["name"]
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": kube.namespace}}
    file = kube.home / "eviction.json"
    file.write_text(json.dumps(eviction))
    path = f"/api/v1/namespaces/{kube.namespace}/pods/{name}/eviction"
    done = kube.try_kubectl("create", "--raw", path, "-f", file)
    assert done.returncode == 0 or "disruption budget" in done.stderr, done.stderr
    return done.returncode == 0


def job(kube: Kube) -> Manifest:
    return kube.get("job", NAME)


def test_an_elastic_job_runs_with_enough_workers_and_is_done_without_the_rest(elastic: Fleet) -> None:
    kube = elastic.kube
    eventually(lambda: len(elastic.status()["hosts"]) == 3, what="three workers in the status")
    assert elastic.status()["detail"].startswith("0 of 3 workers run, and it needs 2")
    pods = workers(kube)
    assert sorted(pods) == [0, 1, 2]
    kube.pod_runs(pods[0]["metadata"]["name"])
    assert elastic.status()["state"] == "pending"
    kube.pod_runs(pods[2]["metadata"]["name"])
    eventually(lambda: elastic.status()["state"] == "running", what="running")
    assert elastic.status()["detail"] == "continues with 2 of 3 workers"
    again = elastic.launch("--min-nodes", "2", nodes=3)
    assert again.returncode == 2
    assert "is running already" in again.stderr
    for index in (0, 2):
        ends(kube, pods[index], 0)
    eventually(lambda: elastic.status()["state"] == "done", what=lambda: str(elastic.status()))
    eventually(lambda: not workers(kube), what="no pod that waits for a node")
    assert "nothing to explain" in elastic("explain", elastic.handle).stdout


def test_an_evicted_worker_is_replaced_and_no_attempt_is_spent(elastic: Fleet) -> None:
    kube = elastic.kube
    pods = run_all(kube)
    eventually(lambda: evict(kube, pods[1]), what="the budget allows one eviction")
    assert not evict(kube, pods[2]), "a drain may not take the run below two workers"
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    ends(kube, pods[1], 143, conditions=[condition])
    new = eventually(lambda: workers(kube).get(1), what="another pod for worker 1")
    assert new["metadata"]["name"] != pods[1]["metadata"]["name"]
    assert job(kube)["status"].get("failed", 0) == 0
    assert elastic.status()["detail"] == "continues with 2 of 3 workers"
    kube.pod_runs(new["metadata"]["name"])
    eventually(lambda: elastic.status()["detail"] == "", what="all workers run again")


def test_a_run_that_failed_fails_the_job_at_once(elastic: Fleet) -> None:
    kube = elastic.kube
    pods = run_all(kube)
    ends(kube, pods[0], 10)
    eventually(lambda: elastic.status()["state"] == "failed", what=lambda: str(elastic.status()))
    assert elastic.status()["exit_code"] == 10
    eventually(lambda: not workers(kube), what="no worker is left to be billed")
    assert (
        f"worker 0 ended with code 10, pod {pods[0]['metadata']['name']}" in elastic("explain", elastic.handle).stdout
    )


def test_a_worker_that_was_oomkilled_is_replaced_and_explained_after_the_end(elastic: Fleet) -> None:
    kube = elastic.kube
    pods = run_all(kube)
    ends(kube, pods[2], 137, "OOMKilled")
    eventually(lambda: workers(kube).get(2), what="another pod for worker 2, after a delay")
    eventually(lambda: job(kube)["status"].get("failed") == 1, what="one attempt is spent")
    ends(kube, pods[0], 10)
    eventually(lambda: elastic.status()["state"] == "failed", what="failed")
    said = elastic("explain", elastic.handle).stdout
    assert "host memory" in said
    assert "The worker was killed: it exceeded its memory limit (" in said


def test_cancel_removes_it_and_the_same_name_can_be_launched_again(elastic: Fleet) -> None:
    kube = elastic.kube
    eventually(lambda: len(workers(kube)) == 3, what="three workers")
    assert elastic("cancel", elastic.handle).returncode == 0
    assert elastic.status()["state"] == "cancelled"
    eventually(lambda: kube.find("job", NAME) is None, what="no Job")
    assert elastic.launch("--min-nodes", "1", nodes=3).returncode == 0
    assert job(kube)["spec"]["successPolicy"] == {"rules": [{"succeededCount": 1}]}


def test_the_documented_rights_are_enough_from_launch_to_cancel(elastic: Fleet, tmp_path: Path) -> None:
    assert elastic("cancel", elastic.handle).returncode == 0
    user = with_documented_rights(elastic.kube, tmp_path)
    done = user.launch("--min-nodes", "2", nodes=3)
    assert done.returncode == 0, done.stderr
    run_all(user.kube)
    eventually(lambda: user.status()["state"] == "running", what="the job runs")
    assert user("explain", user.handle).returncode == 0
    done = user("cancel", user.handle)
    assert done.returncode == 0, done.stderr


def test_logs_of_all_workers_come_in_the_order_of_time(elastic: Fleet, tmp_path: Path) -> None:
    kube = elastic.kube
    pods = run_all(kube)
    names = [pods[index]["metadata"]["name"] for index in range(3)]
    node = Kubelet(tmp_path)
    try:
        for name in names:
            node.take(kube, name)
        for second, (index, line) in enumerate([(2, "[rank4]: a"), (0, "[rank0]: step: 7/10"), (1, "[rank2]: b")]):
            node.logs.setdefault(names[index], []).append((f"2026-11-16T10:00:0{second}.000000000Z", line))
        for name in names:
            expect_logs(elastic, name, "worker")
        shown = elastic("logs", elastic.handle)
        assert shown.stdout.splitlines() == ["[rank4]: a", "[rank0]: step: 7/10", "[rank2]: b"], shown.stderr
        assert elastic("logs", elastic.handle, "--rank", "2").stdout == "[rank2]: b\n"
        assert elastic.status()["step"] == 7
    finally:
        node.leave()


def test_a_queue_that_is_missing_keeps_no_pod(elastic: Fleet) -> None:
    kube = elastic.kube
    assert elastic("cancel", elastic.handle).returncode == 0
    values = {**json.loads(kube.helm("get", "values", NAME, "-o", "json", "--revision", "1")), "queue": "gpus"}
    kube.helm("install", NAME, "--replace", deploy_path("helm", "train"), "-f", kube.values_file(values))
    stays(lambda: not workers(kube), what="a suspended job starts no pod", for_s=2)
    assert elastic.status()["detail"] == "waits in queue gpus"
    assert "queued" in elastic("explain", elastic.handle).stdout
