"""kubectl and helm for the cluster that KUBECONFIG names, and waiting with a timeout."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, TypeVar

import yaml

from maskfleet.system.deploy_files import deploy_path
from tools import FOLDERS, run_tool, try_tool

Manifest = dict[str, Any]
Manifests = list[Manifest]
Found = TypeVar("Found")

# Every cluster creates these in a namespace by itself.
NOT_OURS = ("Event", "Endpoints", "EndpointSlice", "PodMetrics")
SERVICE_ACCOUNT_TOKEN = "kubernetes.io/service-account-token"
CONTROL_PLANE_MADE = {("ConfigMap", "kube-root-ca.crt"), ("ServiceAccount", "default")}


@dataclass(frozen=True)
class Kube:
    """One namespace of a cluster; `home` is where helm keeps its own files."""

    namespace: str
    home: Path

    def kubectl(self, *arguments: str | Path) -> str:
        """Standard output of kubectl, which must succeed."""
        return run_tool("kubectl", f"--namespace={self.namespace}", *arguments)

    def try_kubectl(self, *arguments: str | Path) -> CompletedProcess[str]:
        """The result of kubectl, which may fail."""
        return try_tool("kubectl", f"--namespace={self.namespace}", *arguments)

    def try_helm(self, *arguments: str | Path) -> CompletedProcess[str]:
        """The result of helm, which may fail."""
        folders = {f"HELM_{kind}_HOME": str(self.home / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}
        return try_tool("helm", f"--namespace={self.namespace}", *arguments, **folders)

    def helm(self, *arguments: str | Path) -> str:
        """Standard output of helm, which must succeed."""
        done = self.try_helm(*arguments)
        assert done.returncode == 0, f"helm {' '.join(map(str, arguments))}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def values_file(self, values: Manifest) -> Path:
        """A values file for helm, for what `--set` would have to quote."""
        path = self.home / f"values-{secrets.token_hex(4)}.yaml"
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        return path

    def install(self, release: str, chart: str, values: Manifest, *flags: str) -> str:
        """Install a chart of ours, which must succeed."""
        return self.helm("install", release, deploy_path("helm", chart), "-f", self.values_file(values), *flags)

    def try_install(self, release: str, chart: str, values: Manifest, *flags: str) -> CompletedProcess[str]:
        """Install a chart of ours, which may fail."""
        return self.try_helm("install", release, deploy_path("helm", chart), "-f", self.values_file(values), *flags)

    def upgrade(self, release: str, chart: str, values: Manifest) -> str:
        """Upgrade a release to these values alone."""
        return self.helm("upgrade", release, deploy_path("helm", chart), "-f", self.values_file(values))

    def released(self, release: str) -> Manifests:
        """The objects of a release as helm sent them."""
        return documents(self.helm("get", "manifest", release))

    def find(self, kind: str, name: str) -> Manifest | None:
        """One object, or None."""
        done = self.try_kubectl("get", kind, name, "-o", "json")
        if done.returncode == 0:
            return dict(json.loads(done.stdout))
        assert "NotFound" in done.stderr or "not found" in done.stderr, done.stderr
        return None

    def get(self, kind: str, name: str) -> Manifest:
        """One object that must exist."""
        found = self.find(kind, name)
        assert found is not None, f"no {kind} {name} in {self.namespace}"
        return found

    def list(self, kinds: str, selector: str = "") -> Manifests:
        """Objects of one kind or of several with commas between, chosen by their labels."""
        chosen = (f"--selector={selector}",) if selector else ()
        return Manifests(json.loads(self.kubectl("get", kinds, *chosen, "-o", "json"))["items"])

    def create(self, *manifests: Manifest, flags: tuple[str, ...] = ()) -> CompletedProcess[str]:
        """Send objects; the API may reject them."""
        path = self.home / f"objects-{secrets.token_hex(4)}.yaml"
        path.write_text(yaml.safe_dump_all(manifests), encoding="utf-8")
        return self.try_kubectl("create", "-f", path, *flags)

    def rehearse(self, *manifests: Manifest) -> CompletedProcess[str]:
        """Send objects through validation and admission, and keep none."""
        return self.create(*manifests, flags=("--dry-run=server",))

    def install_rehearsed(self, release: str, chart: str, values: Manifest) -> Manifests:
        """The objects of a release that helm would make here, with the cluster's own kinds and lookups."""
        done = self.try_install(release, chart, values, "--dry-run=server", "-o", "json")
        assert done.returncode == 0, done.stderr
        return documents(json.loads(done.stdout)["manifest"])

    def set_pod_status(self, name: str, **status: Any) -> None:
        """Set the status of a pod as its kubelet would: there is no node."""
        patch = json.dumps({"status": status})
        self.kubectl("patch", "pod", name, "--subresource=status", "--type=merge", "-p", patch)

    def pod_runs(self, name: str) -> None:
        """Set a pod's status to running and ready."""
        self.set_pod_status(name, phase="Running", conditions=[{"type": "Ready", "status": "True"}])

    def everything(self) -> set[tuple[str, str]]:
        """Kind and name of all that is in the namespace, but for what a cluster puts there by itself."""
        kinds = self.kubectl("api-resources", "--namespaced=true", "--verbs=list,get", "-o", "name").split()
        chosen = [kind for kind in kinds if not kind.startswith(("events", "endpoint", "pods.metrics"))]
        items = [item for item in self.list(",".join(chosen)) if item.get("type") != SERVICE_ACCOUNT_TOKEN]
        found = {(item["kind"], item["metadata"]["name"]) for item in items}
        return {(kind, name) for kind, name in found if kind not in NOT_OURS} - CONTROL_PLANE_MADE

    def cluster_wide(self, release: str) -> set[tuple[str, str]]:
        """Kind and name of the release's objects outside namespaces."""
        kinds = self.kubectl("api-resources", "--namespaced=false", "--verbs=list,get", "-o", "name").split()
        chosen = ",".join(kind for kind in kinds if not kind.startswith(("componentstatuses", "nodes.metrics")))
        labels = f"app.kubernetes.io/part-of=maskfleet,app.kubernetes.io/instance={release}"
        return {(item["kind"], item["metadata"]["name"]) for item in self.list(chosen, labels)}


def documents(text: str) -> Manifests:
    """The objects in YAML text."""
    return [document for document in yaml.safe_load_all(text) if document]


def eventually(look: Callable[[], Found], *, what: str | Callable[[], str], within_s: float = 60.0) -> Found:
    """What `look` returns once that is true; a failure that names `what` after `within_s`."""
    end = time.monotonic() + within_s
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() >= end:
            raise AssertionError(f"not within {within_s:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.5)


def stays(look: Callable[[], object], *, what: str, for_s: float = 4.0) -> None:
    """Assert that `look` is true for a while."""
    end = time.monotonic() + for_s
    while time.monotonic() < end:
        assert look(), what
        time.sleep(0.5)


def random_name(prefix: str) -> str:
    """A name that no other run of these tests uses."""
    return f"{prefix}-{secrets.token_hex(4)}"


SESSION = random_name("session")


@contextmanager
def namespace_of_our_own(home: Path, level: str = "restricted") -> Iterator[Kube]:
    """A namespace with Pod Security enforced; removed afterwards with all that is in it."""
    kube = Kube(random_name("maskfleet-test"), home)
    labels = {"pod-security.kubernetes.io/enforce": level, "maskfleet-test": SESSION}
    made = kube.create(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": kube.namespace, "labels": labels}}
    )
    assert made.returncode == 0, made.stderr
    try:
        # Pods are rejected until the control plane has created it.
        eventually(lambda: kube.find("serviceaccount", "default"), what="the namespace's default service account")
        yield kube
    finally:
        run_tool("kubectl", "delete", "namespace", kube.namespace, "--wait=false")


def wait_until_our_namespaces_are_gone() -> None:
    """Fail if the control plane cannot empty one of them."""
    chosen = ("namespaces", f"--selector=maskfleet-test={SESSION}")
    eventually(
        lambda: not run_tool("kubectl", "get", *chosen, "-o", "name"), what="the tests' namespaces gone", within_s=300
    )


def why_no_cluster() -> str | None:
    """Why these tests cannot run, or None."""
    if not os.environ.get("KUBECONFIG"):
        return "KUBECONFIG names no cluster: it is not set (the default kubeconfig is left alone)"
    path = os.pathsep.join([*map(str, FOLDERS), os.environ.get("PATH", "")])
    missing = [name for name in ("kubectl", "helm") if shutil.which(name, path=path) is None]
    if missing:
        return f"there is no {' and no '.join(missing)} here (make test-tools has helm)"
    done = try_tool("kubectl", "get", "--raw", "/readyz", "--request-timeout=10s")
    if done.returncode != 0:
        return f"KUBECONFIG names no cluster: {(done.stderr or done.stdout).strip().splitlines()[-1]}"
    return None


def pod_templates(objects: Manifests) -> Iterator[tuple[str, Manifest]]:
    """Every pod that these objects would start: what it is of, and its template."""
    for item in objects:
        label = f"{item['kind']} {item['metadata']['name']}"
        match item["kind"]:
            case "Pod":
                yield label, item
            case "MPIJob":
                for role, replica in item["spec"]["mpiReplicaSpecs"].items():
                    template = dict(replica["template"])
                    template["spec"] = {**template["spec"], "restartPolicy": replica.get("restartPolicy", "Never")}
                    yield f"{label} {role}", template
            case "CronJob":
                yield label, item["spec"]["jobTemplate"]["spec"]["template"]
            case "Deployment" | "StatefulSet" | "DaemonSet" | "Job" | "ReplicaSet":
                yield label, item["spec"]["template"]


def as_pod(template: Manifest, name: str) -> Manifest:
    """A bare pod of a template."""
    metadata = {**template.get("metadata", {}), "name": name}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
