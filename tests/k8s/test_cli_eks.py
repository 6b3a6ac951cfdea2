"""`maskfleet launch --on eks` and what its handle is good for, on a real API with an MPI operator and real helm.

There is no node: pods are moved on by patching their status. Logs, which a kubelet keeps, are tests/launch's affair.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml
from kube import Kube, eventually

from tools import tool

NAME = "r50-cli"
IMAGE = "repo/train@sha256:" + "ab" * 32


class Fleet:
    """The command line as a user of the namespace types it."""

    def __init__(self, kube: Kube) -> None:
        self.kube = kube
        self.handle = f"eks://{kube.namespace}/{NAME}"
        folders = {f"HELM_{kind}_HOME": str(kube.home / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}
        path = os.pathsep.join([str(Path(tool("helm")).parent), os.environ["PATH"]])
        self.environment = {**os.environ, **folders, "PATH": path}

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "maskfleet", *arguments]
        return subprocess.run(argv, env=self.environment, capture_output=True, text=True, check=False, timeout=420)

    def arguments(self, *more: str, nodes: int = 2) -> list[str]:
        """What launches the job of these tests."""
        return ["launch", "--on", "eks", "--recipe", "standard", "--image", IMAGE, "--name", NAME,
                "--namespace", self.kube.namespace, "--nodes", str(nodes), "--launch-set", "shared_claim=runs",
                *more]  # fmt: skip

    def launch(self, *more: str, nodes: int = 2) -> subprocess.CompletedProcess[str]:
        return self(*self.arguments("--detach", *more, nodes=nodes))

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self("status", self.handle, "--json").stdout))


@contextmanager
def bound_claim(kube: Kube) -> Iterator[None]:
    """A claim `runs` with a volume."""
    size = {"storage": "1Gi"}
    claim_spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": size}, "storageClassName": ""}
    volume = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": kube.namespace},
              "spec": {"accessModes": ["ReadWriteMany"], "capacity": size, "storageClassName": "",
                       "persistentVolumeReclaimPolicy": "Retain", "nfs": {"server": "192.0.2.1", "path": "/"},
                       "claimRef": {"namespace": kube.namespace, "name": "runs"}}}  # fmt: skip
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "runs"},
             "spec": {**claim_spec, "volumeName": kube.namespace}}  # fmt: skip
    assert kube.create(volume).returncode == 0
    assert kube.create(claim).returncode == 0
    eventually(lambda: kube.get("pvc", "runs")["status"]["phase"] == "Bound", what="the claim is bound")
    yield
    kube.kubectl("delete", "pv", kube.namespace, "--wait=false")


@pytest.fixture
def fleet(kube: Kube, operator: None) -> Iterator[Fleet]:
    """A namespace with a bound claim."""
    with bound_claim(kube):
        yield Fleet(kube)


def run_workers(kube: Kube, count: int = 2) -> None:
    for index in range(count):
        name = f"{NAME}-worker-{index}"
        eventually(lambda name=name: kube.find("pod", name), what=name)  # type: ignore[misc]
        kube.pod_runs(name)


def launcher_pod(kube: Kube, name: str = NAME) -> str:
    selector = f"training.kubeflow.org/job-name={name},training.kubeflow.org/job-role=launcher"

    def alive() -> list[str]:
        pods = kube.list("pods", selector)
        return [pod["metadata"]["name"] for pod in pods if pod["status"].get("phase") in ("Pending", "Running")]

    return eventually(alive, what="a pod of the launcher")[0]


def ended(code: int) -> list[dict[str, Any]]:
    state = {"terminated": {"exitCode": code, "reason": "Completed" if code == 0 else "Error"}}
    return [{"name": "launcher", "image": "i", "imageID": "", "ready": False, "restartCount": 0, "state": state}]


def test_a_job_goes_from_pending_to_running_to_done(fleet: Fleet) -> None:
    done = fleet.launch()
    assert (done.returncode, done.stdout.strip()) == (0, fleet.handle), done.stderr
    eventually(lambda: fleet.status()["hosts"], what="workers in the status")
    # The operator writes that it took the job up after it has made the workers.
    eventually(
        lambda: fleet.status()["detail"].startswith("0 of 2 workers are ready"), what=lambda: str(fleet.status())
    )
    assert fleet.status()["state"] == "pending"
    run_workers(fleet.kube)
    pod = launcher_pod(fleet.kube)
    fleet.kube.pod_runs(pod)
    eventually(lambda: fleet.status()["state"] == "running", what="the job runs")
    assert [host["state"] for host in fleet.status()["hosts"]] == ["running", "running"]
    fleet.kube.set_pod_status(pod, phase="Succeeded", containerStatuses=ended(0))
    eventually(lambda: fleet.status()["state"] == "done", what="the job is done")
    assert "nothing to explain" in fleet("explain", fleet.handle).stdout
    context = quote(fleet.kube.kubectl("config", "current-context").strip(), safe="")
    assert fleet("status", f"eks://{context}@{fleet.kube.namespace}/{NAME}").stdout.startswith("done")


def test_what_dry_run_prints_is_what_helm_gets(fleet: Fleet) -> None:
    printed = fleet.launch("--dry-run").stdout
    values, command = printed.split("\n# command\n")
    assert fleet.launch().returncode == 0
    noted = yaml.safe_load(fleet.kube.helm("get", "values", NAME, "-o", "yaml"))
    assert noted == yaml.safe_load(values)
    assert json.loads(command)[:3] == ["helm", "install", NAME]


def test_a_running_job_is_not_launched_again_and_cancel_is_idempotent(fleet: Fleet) -> None:
    assert fleet.launch().returncode == 0
    again = fleet.launch()
    assert again.returncode == 2
    assert f"{fleet.handle} is pending already" in again.stderr
    run_workers(fleet.kube)
    for _ in range(2):
        assert fleet("cancel", fleet.handle).returncode == 0
    assert fleet.status()["state"] == "cancelled"
    # An operator that had not heard of it yet may have made one thing more, which has no owner and goes, too.
    eventually(lambda: not of_job(fleet.kube), what=lambda: f"nothing left, not {of_job(fleet.kube)}", within_s=30)
    assert fleet("cancel", f"eks://{fleet.kube.namespace}/never-was").returncode == 0


def of_job(kube: Kube) -> set[tuple[str, str]]:
    return {pair for pair in kube.everything() if pair[0] in ("MPIJob", "Pod", "Job", "Service", "ConfigMap")}


def test_a_cancelled_run_is_resumed_and_a_different_one_is_rejected(fleet: Fleet) -> None:
    assert fleet.launch().returncode == 0
    assert fleet("cancel", fleet.handle).returncode == 0
    other = fleet.launch("--set", "train.base_lr=0.5")
    assert other.returncode == 2
    assert "holds another run" in other.stderr
    assert "base_lr" in other.stderr
    assert fleet.launch().returncode == 0
    eventually(lambda: fleet.status()["state"] == "pending", what="the run is back")


def test_a_failed_run_says_so_and_is_resumed_under_its_name(fleet: Fleet) -> None:
    assert fleet.launch("--max-restarts", "0", nodes=1).returncode == 0
    run_workers(fleet.kube, 1)
    pod = launcher_pod(fleet.kube)
    fleet.kube.set_pod_status(pod, phase="Failed", containerStatuses=ended(3))
    eventually(lambda: fleet.status()["state"] == "failed", what="the job has failed")
    assert fleet.status()["exit_code"] == 3
    explained = fleet("explain", fleet.handle).stdout
    assert "attempt 1 ended with code 3" in explained
    again = fleet.launch("--max-restarts", "0", nodes=1)
    assert again.returncode == 0, again.stderr
    eventually(lambda: fleet.status()["state"] == "pending", what="the run is back")
    assert launcher_pod_is_gone(fleet.kube, pod)


def launcher_pod_is_gone(kube: Kube, name: str) -> bool:
    return kube.find("pod", name) is None


def test_a_deleted_worker_and_a_killed_launcher_are_reported(fleet: Fleet) -> None:
    assert fleet.launch().returncode == 0
    run_workers(fleet.kube)
    first = launcher_pod(fleet.kube)
    fleet.kube.pod_runs(first)
    eventually(lambda: fleet.status()["state"] == "running", what="the job runs")
    fleet.kube.kubectl("delete", "pod", f"{NAME}-worker-1", "--wait=true")
    eventually(lambda: fleet.status()["detail"] == "1 of 2 workers are not ready", what="a worker is missed")
    fleet.kube.set_pod_status(first, phase="Failed", containerStatuses=ended(1))
    eventually(lambda: fleet.status()["restarts"] >= 1, what="the launcher is started again", within_s=120)


def test_a_release_of_another_chart_is_neither_replaced_nor_removed(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "templates").mkdir()
    (tmp_path / "Chart.yaml").write_text("apiVersion: v2\nname: stranger\nversion: 0.1.0\n")
    (tmp_path / "templates/map.yaml").write_text("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: theirs}\n")
    for release, act in (
        (NAME, fleet.launch),
        (NAME, lambda: fleet("cancel", fleet.handle)),
        (f"{NAME}-notebook", lambda: fleet("notebook", fleet.handle, "--stop")),
    ):
        fleet.kube.helm("install", release, tmp_path)
        done = act()
        assert done.returncode == 2, done.stdout
        assert f"the helm release {release} is not maskfleet's" in done.stderr
        assert "STATUS: deployed" in fleet.kube.helm("status", release)
        assert fleet.kube.find("configmap", "theirs")
        fleet.kube.helm("uninstall", release)


def test_of_two_launches_at_once_one_is_refused(fleet: Fleet) -> None:
    argv = [sys.executable, "-m", "maskfleet", *fleet.arguments("--detach")]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(argv, env=fleet.environment, **pipes) for _ in range(2)]
    said = [process.communicate(timeout=420)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], said
    assert "REVISION: 1" in fleet.kube.helm("status", NAME)


def test_cancelling_a_run_that_is_done_leaves_its_state_and_its_pods(fleet: Fleet) -> None:
    assert fleet.launch(nodes=1).returncode == 0
    run_workers(fleet.kube, 1)
    pod = launcher_pod(fleet.kube)
    fleet.kube.set_pod_status(pod, phase="Succeeded", containerStatuses=ended(0))
    eventually(lambda: fleet.status()["state"] == "done", what="the job is done")
    done = fleet("cancel", fleet.handle)
    assert (done.returncode, done.stdout.strip()) == (0, "nothing to cancel: it is done")
    assert fleet.status()["state"] == "done"
    assert fleet.kube.find("pod", pod)


def test_a_queue_without_kueue_is_refused(fleet: Fleet) -> None:
    done = fleet.launch("--launch-set", "queue=gpu")
    assert done.returncode == 2
    assert "the cluster has no Kueue" in done.stderr
    assert not fleet.kube.find("mpijob", NAME)


def test_a_missing_claim_is_named_before_anything_is_sent(fleet: Fleet) -> None:
    done = fleet.launch("--launch-set", "shared_claim=nope")
    assert done.returncode == 2
    assert "no volume claim nope" in done.stderr
    assert not fleet.kube.find("mpijob", NAME)


def test_a_value_that_the_chart_rejects_is_named(fleet: Fleet) -> None:
    done = fleet.launch("--launch-set", "chart_values={nccl_debug: [1]}")
    assert done.returncode == 2
    assert "nccl_debug" in done.stderr
    assert not fleet.kube.find("mpijob", NAME)


def test_the_pod_that_reads_files_is_admitted_and_removed_after_ctrl_c(fleet: Fleet) -> None:
    assert fleet.launch().returncode == 0
    argv = [sys.executable, "-m", "maskfleet", "ls", fleet.handle]
    process = subprocess.Popen(argv, env=fleet.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    selector = "app.kubernetes.io/name=maskfleet-files"
    try:
        (pod,) = eventually(lambda: fleet.kube.list("pods", selector), what="the pod that reads files")
        assert pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == "runs"
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    eventually(lambda: not fleet.kube.list("pods", selector), what="the pod is gone")


def test_a_pod_that_reads_files_and_cannot_start_says_why(fleet: Fleet) -> None:
    assert fleet.launch().returncode == 0
    argv = [sys.executable, "-m", "maskfleet", "ls", fleet.handle]
    process = subprocess.Popen(argv, env=fleet.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    selector = "app.kubernetes.io/name=maskfleet-files"
    (pod,) = eventually(lambda: fleet.kube.list("pods", selector), what="the pod that reads files")
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}}
    status = {"name": "files", "image": "i", "imageID": "", "ready": False, "restartCount": 0, "state": waiting}
    fleet.kube.set_pod_status(pod["metadata"]["name"], phase="Pending", containerStatuses=[status])
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "image cannot be pulled" in printed
    assert not fleet.kube.list("pods", selector)
