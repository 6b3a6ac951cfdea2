"""What users rely on when something is wrong: exactly the documented rights, dead nodes, an operator that is down."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from kube import Kube, Manifest, eventually
from kubelet import Kubelet
from test_cli_eks import NAME, Fleet, ended, fleet, launcher_pod, run_workers
from test_cli_logs import expect_logs

from maskfleet.config.launch import EksLaunch
from maskfleet.errors import LaunchError
from maskfleet.launch.eks import backend as eks_backend
from maskfleet.launch.eks.backend import EksBackend
from maskfleet.launch.job import JobHandle
from maskfleet.system.deploy_files import deploy_path
from tools import run_tool

__all__ = ["fleet"]
DOC = Path(__file__).parents[2] / "docs" / "run-anywhere" / "eks" / "index.md"
GROUPS = {"mpijobs": "kubeflow.org", "jobs": "batch", "poddisruptionbudgets": "policy",
          "networkpolicies": "networking.k8s.io"}  # fmt: skip


def documented_rules() -> list[Manifest]:
    """The table of permissions as rules of a Role."""
    table = DOC.read_text(encoding="utf-8").split("## Permissions")[1].split("Useful but not required")[0]
    rows = re.findall(r"^\| ([a-z].*?) \| ([a-z, ]+) \|", table, re.MULTILINE)
    assert len(rows) >= 6
    return [
        {"apiGroups": [GROUPS.get(kind.split("/")[0], "")], "resources": [kind], "verbs": verbs.split(", ")}
        for kinds, verbs in rows
        for kind in (re.sub(r" \(.*\)", "", one) for one in kinds.split(", "))
    ]


def with_documented_rights(kube: Kube, folder: Path) -> Fleet:
    """The command line for a user who has the documented rights and no other."""
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "person"}}
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "person"},
            "rules": documented_rules()}  # fmt: skip
    binding = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": {"name": "person"},
               "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "person"},
               "subjects": [{"kind": "ServiceAccount", "name": "person", "namespace": kube.namespace}]}  # fmt: skip
    made = kube.create(account, role, binding)
    assert made.returncode == 0, made.stderr
    config = json.loads(run_tool("kubectl", "config", "view", "--minify", "--flatten", "-o", "json"))
    config["users"][0]["user"] = {"token": kube.kubectl("create", "token", "person").strip()}
    path = folder / "person.kubeconfig"
    path.write_text(json.dumps(config))
    other = Fleet(kube)
    other.environment["KUBECONFIG"] = str(path)
    return other


@pytest.fixture
def user(fleet: Fleet, tmp_path: Path) -> Fleet:
    return with_documented_rights(fleet.kube, tmp_path)


def test_the_documented_rights_are_enough_from_launch_to_cancel(user: Fleet) -> None:
    asked = ("doctor", "--on", "eks", "--namespace", user.kube.namespace, "--launch-set", "shared_claim=runs", "--json")
    found = {one["name"]: one for one in json.loads(user(*asked).stdout)}
    assert found["rights"]["verdict"] == "ok", found
    for name in ("MPI operator", "NVIDIA device plugin"):
        assert found[name]["verdict"] == "warn", "it may not look"
    done = user.launch()
    assert done.returncode == 0, done.stderr
    run_workers(user.kube)
    pod = launcher_pod(user.kube)
    user.kube.pod_runs(pod)
    eventually(lambda: user.status()["state"] == "running", what="the job runs")
    assert user("explain", user.handle).returncode == 0
    done = user("cancel", user.handle)
    assert done.returncode == 0, done.stderr
    assert user.status()["state"] == "cancelled"


def test_a_run_is_not_removed_as_the_notebook_of_another_one(fleet: Fleet) -> None:
    name = f"{NAME}-notebook"
    argv = [name if word == NAME else word for word in fleet.arguments("--detach")]
    assert fleet(*argv).returncode == 0
    done = fleet("notebook", fleet.handle, "--stop")
    assert done.returncode == 2, done.stdout
    assert "it belongs to the chart train" in done.stderr
    assert fleet.kube.find("mpijob", name)


@pytest.fixture
def kubelets(fleet: Fleet, tmp_path: Path) -> Iterator[tuple[Kubelet, Kubelet]]:
    both = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        both.append(Kubelet(tmp_path / name))
    yield both[0], both[1]
    for node in both:
        node.leave()


def test_logs_show_what_is_readable_when_the_node_of_one_attempt_is_dead(
    fleet: Fleet, kubelets: tuple[Kubelet, Kubelet]
) -> None:
    dead, alive = kubelets
    assert fleet.launch(nodes=1).returncode == 0
    run_workers(fleet.kube, 1)
    pods = []
    for node in kubelets:
        pods.append(launcher_pod(fleet.kube))
        node.take(fleet.kube, pods[-1])
        fleet.kube.pod_runs(pods[-1])
        node.say(pods[-1], f"[1,0]<stdout>:attempt {len(pods)}")
        expect_logs(fleet, pods[-1])
        if node is dead:
            node.die()
            fleet.kube.set_pod_status(pods[-1], phase="Failed", containerStatuses=ended(1))
            eventually(lambda: pods[0] != launcher_pod(fleet.kube), what="the next attempt", within_s=90)
    done = fleet("logs", fleet.handle)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith(f"[launch]: the log of pod {pods[0]} cannot be read: ")
    assert re.search(r"refused|EOF|closed", first), "what the API server says is kept"
    assert second == "[rank0]: attempt 2"
    alive.open.discard(pods[1])


def test_a_cancel_names_the_pods_that_a_dead_node_keeps_every_time(
    fleet: Fleet, kubelets: tuple[Kubelet, Kubelet], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PATH", "HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"):
        monkeypatch.setenv(name, fleet.environment[name])
    monkeypatch.setattr(eks_backend, "STOP_S", 5)
    monkeypatch.setattr(eks_backend, "LEFT_S", 2.0)
    assert fleet.launch(nodes=1).returncode == 0
    run_workers(fleet.kube, 1)
    worker = f"{NAME}-worker-0"
    kubelets[0].take(fleet.kube, worker)
    backend = EksBackend(EksLaunch(namespace=fleet.kube.namespace))
    handle = JobHandle("eks", fleet.kube.namespace, NAME)
    for _ in range(2):
        with pytest.raises(LaunchError) as caught:
            backend.cancel(handle)
        assert "could not remove" in caught.value.what or worker in caught.value.what
    # helm gave up after its limit; once the MPIJob itself is gone, the pod on the dead node is what is left.
    fleet.kube.kubectl("delete", "mpijob", NAME, "--cascade=orphan", "--ignore-not-found", "--wait=false")
    patch = json.dumps({"metadata": {"finalizers": None}})
    fleet.kube.try_kubectl("patch", "mpijob", NAME, "--type=merge", "-p", patch)
    eventually(lambda: fleet.kube.find("mpijob", NAME) is None, what="no MPIJob")
    for _ in range(2):
        with pytest.raises(LaunchError, match=rf"is cancelled, but its pods are not deleted yet: {worker} on "):
            backend.cancel(handle)
    assert worker in fleet.status()["detail"]


def test_the_state_comes_from_the_launchers_job_while_the_operator_is_down(fleet: Fleet) -> None:
    kube = fleet.kube
    values = kube.values_file({"image": "registry.example/train:1", "gpu_nodes": 1, "shared_pvc": "runs"})
    rendered = kube.helm("template", NAME, deploy_path("helm", "train"), "-f", values)
    [job] = [one for one in yaml.safe_load_all(rendered) if one and one["kind"] == "MPIJob"]
    # The operator leaves a job alone that another controller manages, as if it were down.
    job["spec"]["runPolicy"]["managedBy"] = "kueue.x-k8s.io/multikueue"
    template = {**job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]}
    template["spec"] = {**template["spec"], "restartPolicy": "Never", "serviceAccountName": "default"}
    batch = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": f"{NAME}-launcher"},
             "spec": {"backoffLimit": 0, "template": template}}  # fmt: skip
    made = kube.create(job, batch)
    assert made.returncode == 0, made.stderr
    pod = eventually(lambda: kube.list("pods", f"job-name={NAME}-launcher"), what="the launcher")[0]
    assert fleet.status()["state"] == "pending"
    kube.set_pod_status(pod["metadata"]["name"], phase="Failed", containerStatuses=ended(3))
    eventually(lambda: fleet.status()["state"] == "failed", what=lambda: str(fleet.status()))
    assert "BackoffLimitExceeded" in fleet.status()["detail"]
