"""What an mpi-operator does with our MPIJob. There is no node: the tests set the pod status as a kubelet would."""

from __future__ import annotations

import re

import pytest
from chart_cases import IMAGE, Values
from kube import Kube, Manifest, eventually, stays

from tools import try_tool

pytestmark = pytest.mark.usefixtures("operator")
# No node of the cluster matches this: a real kubelet would overwrite the status that the tests set.
NOWHERE: Values = {"system_node_selector": {"maskfleet-test": "no-such-node"}}
VALUES: Values = {"image": IMAGE, "gpu_nodes": 2, "slots_per_node": 3, "backoff_limit": 2, **NOWHERE}


@pytest.fixture
def run(kube: Kube) -> Kube:
    """A namespace with the release `run`, whose two workers exist."""
    kube.install("run", "train", VALUES)
    eventually(lambda: len(workers(kube)) == 2, what="two workers", within_s=60)
    return kube


def test_workers_get_a_service_a_hostfile_and_keys(run: Kube) -> None:
    assert [pod["metadata"]["name"] for pod in workers(run)] == ["run-worker-0", "run-worker-1"]
    service = run.get("service", "run")
    assert service["spec"]["clusterIP"] == "None"
    for pod in workers(run):
        labels = pod["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()
        assert labels["app.kubernetes.io/instance"] == "run"
        assert pod["spec"]["subdomain"] == "run"
    hosts = [f"run-worker-{index}.run.{run.namespace}.svc" for index in range(2)]
    # An operator may be configured with the cluster's domain and appends it.
    assert re.sub(r"\.svc\.\S+ ", ".svc ", hostfile(run)).splitlines() == [f"{host} slots=3" for host in hosts]
    secret = run.get("secret", "run-ssh")
    assert secret["type"] == "kubernetes.io/ssh-auth"
    assert {"ssh-privatekey", "ssh-publickey"} == secret["data"].keys()
    mounts = {mount["mountPath"] for mount in workers(run)[0]["spec"]["containers"][0]["volumeMounts"]}
    assert {"/home/fleet/.ssh", "/etc/maskfleet", "/dev/shm", "/fsx"} <= mounts


def test_the_launcher_waits_for_its_workers_in_an_init_container(run: Kube) -> None:
    job = eventually(lambda: run.find("job", "run-launcher"), what="the launcher's Job without a ready worker")
    [waits] = launched(run, 1)["spec"]["initContainers"]
    assert waits["name"] == "wait-for-workers"
    run.pod_runs("run-worker-0")
    stays(lambda: condition(run, "Running") is None, what="the MPIJob not running with one of two workers")

    run.pod_runs("run-worker-1")

    assert job["spec"]["backoffLimit"] == 2
    pod = launched(run, 1)
    assert [container["name"] for container in pod["spec"]["containers"]] == ["launcher"]
    assert pod["spec"]["restartPolicy"] == "Never"
    command = " ".join(pod["spec"]["containers"][0]["command"])
    for index in range(2):
        assert f"run-worker-{index}.run.{run.namespace}.svc" in command + hostfile(run)
    run.pod_runs(pod["metadata"]["name"])
    eventually(lambda: condition(run, "Running"), what="the MPIJob running")


def test_a_deleted_worker_is_created_again(run: Kube) -> None:
    before = run.get("pod", "run-worker-1")["metadata"]["uid"]

    run.kubectl("delete", "pod", "run-worker-1", "--wait=false")

    eventually(
        lambda: (pod := run.find("pod", "run-worker-1")) and pod["metadata"]["uid"] != before, what="another worker 1"
    )
    assert run.get("mpijob", "run")["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] == 2


def test_the_longest_name_that_the_chart_accepts_is_valid_for_pods_too(kube: Kube) -> None:
    release = "r" * 40
    kube.install(release, "train", {**VALUES, "gpu_nodes": 11})

    eventually(lambda: kube.find("pod", f"{release}-worker-10"), what="the eleventh worker")


@pytest.mark.slow
def test_a_node_that_cannot_be_had_ends_the_job_and_releases_the_others(kube: Kube) -> None:
    kube.install("run", "train", {**VALUES, "backoff_limit": 0})
    eventually(lambda: len(workers(kube)) == 2, what="two workers", within_s=60)
    kube.pod_runs("run-worker-0")

    # As the kubelet reports an init container that waited in vain for worker 1, which stays pending.
    kube.set_pod_status(launched(kube, 1)["metadata"]["name"], phase="Failed")

    eventually(lambda: condition(kube, "Failed"), what="the MPIJob failed", within_s=60)
    eventually(lambda: not workers(kube), what="both workers removed")


@pytest.mark.slow
def test_a_failing_launcher_is_retried_up_to_the_limit(run: Kube) -> None:
    ready(run)
    # The control plane waits ten seconds before the second attempt and twenty before the third.
    for attempt in (1, 2):
        fail(run, launched(run, attempt))
        assert condition(run, "Failed") is None
        eventually(lambda number=attempt: len(launchers(run)) > number, what=f"attempt {attempt + 1}", within_s=90)
    assert condition(run, "Failed") is None

    fail(run, launched(run, 3))

    found = eventually(lambda: condition(run, "Failed"), what="the MPIJob failed")
    assert found["reason"].startswith("BackoffLimitExceeded")
    assert len(launchers(run)) == 3, "the pods, and so the logs, of all attempts"
    eventually(lambda: not workers(run), what="the running workers removed")


def test_a_launcher_that_succeeds_stops_the_workers(run: Kube) -> None:
    ready(run)

    end(run, launched(run, 1), "Succeeded", 0)

    eventually(lambda: condition(run, "Succeeded"), what="the MPIJob succeeded")
    eventually(lambda: not workers(run), what="the running workers removed")
    assert len(launchers(run)) == 1


def test_a_queued_run_starts_no_pod_until_it_is_admitted(kube: Kube) -> None:
    if try_tool("kubectl", "explain", "job.spec.suspend").returncode != 0:
        pytest.skip("this API has no suspended Jobs: it is older than any that the chart is for")
    kube.install("run", "train", {**VALUES, "queue": "gpu-queue"})
    eventually(lambda: kube.find("service", "run"), what="the operator's answer")
    stays(lambda: not kube.list("pods"), what="a pod of a run that waits in its queue")

    kube.kubectl("patch", "mpijob", "run", "--type=merge", "-p", '{"spec":{"runPolicy":{"suspend":false}}}')

    eventually(lambda: len(workers(kube)) == 2, what="two workers")


def test_uninstalling_a_release_removes_all_that_the_operator_made(run: Kube) -> None:
    ready(run)
    launched(run, 1)

    run.helm("uninstall", "run")

    eventually(lambda: not run.everything(), what=lambda: f"an empty namespace, not {run.everything()}")


def test_a_budget_keeps_running_workers_from_being_drained(run: Kube) -> None:
    ready(run)
    found = eventually(
        lambda: (budget := run.get("pdb", "run-workers"))["status"].get("currentHealthy") == 2 and budget,
        what="a budget that counts both workers",
    )
    assert found["status"]["desiredHealthy"] == 2
    assert found["status"]["disruptionsAllowed"] == 0


def workers(kube: Kube) -> list[Manifest]:
    pods = kube.list("pods", "training.kubeflow.org/job-name=run,training.kubeflow.org/job-role=worker")
    return sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))


def launchers(kube: Kube) -> list[Manifest]:
    pods = kube.list("pods", "training.kubeflow.org/job-name=run,training.kubeflow.org/job-role=launcher")
    return sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))


def hostfile(kube: Kube) -> str:
    return str(kube.get("configmap", "run-config")["data"]["hostfile"])


def ready(kube: Kube) -> None:
    for pod in workers(kube):
        kube.pod_runs(pod["metadata"]["name"])


def launched(kube: Kube, attempt: int) -> Manifest:
    """The pod of the newest attempt, of so many."""
    eventually(lambda: len(launchers(kube)) == attempt, what=f"launcher pod {attempt}", within_s=90)
    return launchers(kube)[-1]


def fail(kube: Kube, pod: Manifest) -> None:
    end(kube, pod, "Failed", 1)


def end(kube: Kube, pod: Manifest, phase: str, code: int) -> None:
    """Set the status of a launcher's pod as a kubelet does when its container has exited."""
    name = pod["metadata"]["name"]
    kube.pod_runs(name)
    status = {
        "name": "launcher",
        "image": IMAGE,
        "imageID": "",
        "ready": False,
        "restartCount": 0,
        "state": {"terminated": {"exitCode": code, "reason": "Completed" if code == 0 else "Error"}},
    }
    kube.set_pod_status(name, phase=phase, containerStatuses=[status])


def condition(kube: Kube, kind: str) -> Manifest | None:
    """The MPIJob's condition of that kind, if it is true."""
    conditions = kube.get("mpijob", "run").get("status", {}).get("conditions", [])
    return next((item for item in conditions if item["type"] == kind and item["status"] == "True"), None)
