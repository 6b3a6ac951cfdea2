"""How long Kubernetes takes to replace the worker of a node that dies without notice, in an MPIJob and an Indexed Job.

    KUBECONFIG=... python benchmarks/node_loss.py [--keep-node]

It needs a test cluster without nodes of its own, with the MPI operator, a scheduler and a controller manager; kubectl
and helm. This program acts as the kubelets: nodes are objects whose leases it renews, and pods run as soon as they are
scheduled. Then one node of each job stops renewing its lease. When its node is Unknown, the program deletes it, as the
cloud controller of AWS does with a terminated instance; with --keep-node the node stays, as when only its network is
gone. A spare node is ready all the time, so the figures leave out what a new node and its image need.

The supervisors' part of the elastic way is measured elsewhere (scripts/test_cluster.py, benchmarks/results/chaos.json).
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from machine import machine_facts
from maskfleet.system.deploy_files import deploy_path

RESULTS = Path(__file__).parent / "results" / "node_loss.json"
NAMESPACE = f"maskfleet-node-loss-{secrets.token_hex(2)}"
IMAGE = "registry.example/maskfleet@sha256:" + "ab" * 32
JOBS = {"mpijob": {}, "elastic": {"min_nodes": 2}}
VALUES = {"image": IMAGE, "gpu_nodes": 3, "gpu_instance_type": "", "gpus_per_node": 0, "cpus_per_node": 3,
          "memory_gib_per_node": 4, "launcher_on_demand": "any", "shared_pvc": "runs", "single_zone": "any",
          "system_node_selector": {"maskfleet-test": "system"}}  # fmt: skip
RENEW_S = 5.0
GIVE_UP_S = 600.0
Json = dict[str, Any]


def kubectl(*arguments: str, sent: Json | None = None) -> str:
    """What kubectl prints; it must succeed."""
    stdin = None if sent is None else json.dumps(sent)
    done = subprocess.run(["kubectl", *arguments], input=stdin, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode != 0:
        raise SystemExit(f"kubectl {' '.join(arguments)}: {done.stderr}")
    return done.stdout


def got(*arguments: str) -> Json:
    found: Json = json.loads(kubectl("get", *arguments, "-o", "json"))
    return found


class Nodes:
    """Nodes that are only objects; `dead` ones no longer renew their lease."""

    def __init__(self, names: list[str], labels: dict[str, str]) -> None:
        self.names, self.dead, self._renewed = names, set[str](), -RENEW_S
        for name in names:
            meta = {"name": name, "labels": {"maskfleet-test": "", **labels}}
            kubectl("create", "-f", "-", sent={"apiVersion": "v1", "kind": "Node", "metadata": meta})
            lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
                     "metadata": {"name": name, "namespace": "kube-node-lease"},
                     "spec": {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": _now()}}  # fmt: skip
            kubectl("apply", "-f", "-", sent=lease)
            size = {"cpu": "4", "memory": "16Gi", "pods": "10", "ephemeral-storage": "100Gi"}
            ready = {
                "type": "Ready",
                "status": "True",
                "reason": "KubeletReady",
                "lastHeartbeatTime": _now()[:19] + "Z",
            }
            status = {"status": {"conditions": [ready], "capacity": size, "allocatable": size}}
            kubectl("patch", "node", name, "--subresource=status", "--type=merge", "-p", json.dumps(status))

    def renew(self) -> None:
        """Renew the leases of those alive, if it is time."""
        if time.monotonic() - self._renewed < RENEW_S:
            return
        self._renewed = time.monotonic()
        patch = json.dumps({"spec": {"renewTime": _now()}})
        for name in self.names:
            if name not in self.dead:
                kubectl("patch", "lease", name, "-n", "kube-node-lease", "--type=merge", "-p", patch)

    def remove(self) -> None:
        for name in self.names:
            kubectl("delete", "node", name, "--ignore-not-found", "--wait=false")
            kubectl("delete", "lease", name, "-n", "kube-node-lease", "--ignore-not-found", "--wait=false")


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def prepare() -> None:
    """A namespace with a bound claim, and both jobs."""
    kubectl("create", "namespace", NAMESPACE)
    size = {"storage": "1Gi"}
    volume = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": NAMESPACE},
              "spec": {"accessModes": ["ReadWriteMany"], "capacity": size, "storageClassName": "",
                       "nfs": {"server": "192.0.2.1", "path": "/"},
                       "claimRef": {"namespace": NAMESPACE, "name": "runs"}}}  # fmt: skip
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "runs", "namespace": NAMESPACE},
             "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": size}, "storageClassName": "",
                      "volumeName": NAMESPACE}}  # fmt: skip
    kubectl("create", "-f", "-", sent=volume)
    kubectl("create", "-f", "-", sent=claim)
    for name, more in JOBS.items():
        helm = ["helm", "install", name, str(deploy_path("helm", "train")), "-n", NAMESPACE, "-f", "-"]
        subprocess.run(helm, input=json.dumps({**VALUES, **more}), text=True, check=True, capture_output=True)


def run_scheduled_pods(nodes: Nodes) -> list[Json]:
    """As the kubelets: pods that are scheduled run, and pods that are being deleted on live nodes end."""
    pods: list[Json] = got("pods", "-n", NAMESPACE)["items"]
    for pod in pods:
        node, name = pod["spec"].get("nodeName"), pod["metadata"]["name"]
        if node in (None, *nodes.dead):
            continue
        if pod["metadata"].get("deletionTimestamp"):
            kubectl("delete", "pod", name, "-n", NAMESPACE, "--force", "--grace-period=0", "--ignore-not-found")
        elif pod["status"].get("phase") == "Pending":
            status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
            kubectl("patch", "pod", name, "-n", NAMESPACE, "--subresource=status", "--type=merge", "-p",
                    json.dumps({"status": status}))  # fmt: skip
    return pods


def workers_of(pods: list[Json], job: str) -> list[Json]:
    """Running or starting workers of a job, by their number."""
    index = ("training.kubeflow.org/replica-index", "batch.kubernetes.io/job-completion-index")
    found = [pod for pod in pods if pod["metadata"]["labels"].get("app.kubernetes.io/instance") == job
             and pod["metadata"]["labels"].get("app.kubernetes.io/component") == "worker"]  # fmt: skip
    return sorted(
        found, key=lambda pod: next(pod["metadata"]["labels"][one] for one in index if one in pod["metadata"]["labels"])
    )


def measure(nodes: Nodes, *, keep_node: bool) -> Json:
    """Seconds after the death of a node until each thing that follows, by job."""
    while True:
        nodes.renew()
        pods = run_scheduled_pods(nodes)
        runs = {job: [one for one in workers_of(pods, job) if one["status"].get("phase") == "Running"] for job in JOBS}
        if all(len(found) == 3 for found in runs.values()):
            break
        time.sleep(0.5)
    victims = {job: found[1] for job, found in runs.items()}
    nodes.dead |= {pod["spec"]["nodeName"] for pod in victims.values()}
    died = time.monotonic()
    found: dict[str, Json] = {job: {} for job in JOBS}

    def note(job: str, what: str) -> None:
        if what not in found[job]:
            found[job][what] = round(time.monotonic() - died, 1)
            print(f"{found[job][what]:6.1f} s  {job}: {what}", flush=True)

    while time.monotonic() - died < GIVE_UP_S and not all("replacement scheduled" in one for one in found.values()):
        nodes.renew()
        pods = run_scheduled_pods(nodes)
        for job, victim in victims.items():
            _observe(job, victim, pods, note)
            if "node unknown" in found[job] and not keep_node and "node deleted" not in found[job]:
                kubectl("delete", "node", victim["spec"]["nodeName"], "--wait=false")
                note(job, "node deleted")
        time.sleep(0.5)
    status = got("mpijob", "mpijob", "-n", NAMESPACE).get("status", {})
    found["mpijob"]["conditions"] = [
        f"{one['type']}={one['status']}: {one.get('reason')}" for one in status["conditions"]
    ]
    return found


def _observe(job: str, victim: Json, pods: list[Json], note: Any) -> None:
    nodes = {one["metadata"]["name"]: one for one in got("nodes")["items"]}
    node = nodes.get(victim["spec"]["nodeName"])
    if node is not None and any(
        one["type"] == "Ready" and one["status"] == "Unknown" for one in node["status"]["conditions"]
    ):
        note(job, "node unknown")
    old = next((pod for pod in pods if pod["metadata"]["uid"] == victim["metadata"]["uid"]), None)
    if old is None or old["metadata"].get("deletionTimestamp"):
        note(job, "pod evicted")
    index = next(
        value
        for key, value in victim["metadata"]["labels"].items()
        if key.endswith(("replica-index", "completion-index"))
    )
    for pod in workers_of(pods, job):
        if pod["metadata"]["uid"] != victim["metadata"]["uid"] and index in (
            pod["metadata"]["labels"].get("training.kubeflow.org/replica-index"),
            pod["metadata"]["labels"].get("batch.kubernetes.io/job-completion-index"),
        ):
            note(job, "replacement created")
            if pod["spec"].get("nodeName"):
                note(job, "replacement scheduled")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--keep-node", action="store_true", help="the node stays in the API, as when its network is gone"
    )
    asked = parser.parse_args()
    if not os.environ.get("KUBECONFIG"):
        raise SystemExit("set KUBECONFIG to a test cluster")
    prefix = NAMESPACE
    system = Nodes([f"{prefix}-system"], {"maskfleet-test": "system"})
    workers = Nodes([f"{prefix}-{number}" for number in range(8)], {})
    workers.names += system.names
    try:
        prepare()
        found = measure(workers, keep_node=asked.keep_node)
        version = json.loads(kubectl("version", "-o", "json"))["serverVersion"]["gitVersion"]
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        known |= {
            **machine_facts(()),
            "kubernetes": version,
            "node stays" if asked.keep_node else "node deleted": found,
        }
        RESULTS.write_text(json.dumps(known, indent=2) + "\n")
    finally:
        for job in JOBS:
            subprocess.run(["helm", "uninstall", job, "-n", NAMESPACE], check=False, capture_output=True)
        kubectl("delete", "pods", "--all", "-n", NAMESPACE, "--force", "--grace-period=0", "--wait=false")
        kubectl("delete", "namespace", NAMESPACE, "--wait=false")
        kubectl("delete", "pv", NAMESPACE, "--ignore-not-found", "--wait=false")
        workers.remove()


if __name__ == "__main__":
    main()
