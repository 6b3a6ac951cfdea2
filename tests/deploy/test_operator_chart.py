"""The mpi-operator chart: what it sends, who may do what, and which values it rejects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_charts import (
    checkov_findings,
    kubernetes_complaints,
    lint,
    of_kind,
    refusal,
    rendered,
    written,
)
from jsonschema import Draft202012Validator

from maskfleet.system.deploy_files import deploy_path

# Calls in the operator's controller and server: (group, resource) -> verbs. Its informers need list and watch.
CALLS = {
    ("", "configmaps"): {"list", "watch", "create", "update"},
    ("", "secrets"): {"list", "watch", "create", "update"},
    ("", "services"): {"list", "watch", "create", "update"},
    ("", "pods"): {"list", "watch", "create", "delete"},
    ("", "events"): {"create", "patch"},
    ("batch", "jobs"): {"list", "watch", "create", "update"},
    ("batch", "jobs/status"): {"update"},
    ("kubeflow.org", "mpijobs"): {"list", "watch"},
    ("kubeflow.org", "mpijobs/status"): {"update"},
    ("kubeflow.org", "mpijobs/finalizers"): {"update"},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "one namespace": {"watch_namespace": "training", "lock_namespace": "locks"},
    "everything": {
        "image": {"digest": "sha256:" + "a" * 64, "pull_policy": "Always"},
        "image_pull_secrets": ["registry"],
        "replicas": 2,
        "monitoring_port": 9090,
        "grafana_dashboard": True,
        "node_selector": {"maskfleet.io/system": "true"},
        "tolerations": [{"key": "CriticalAddonsOnly", "operator": "Exists"}],
        "priority_class_name": "system-cluster-critical",
    },
    "bare": {"network_policy": False, "aggregate_user_roles": False},
}
# CKV_K8S_15: a release's tag does not move, so it is pulled once. CKV_K8S_38: the operator talks to the API.
# CKV_K8S_43: a digest is a value; which one is right depends on the mirror.
SKIPS = ("CKV_K8S_15", "CKV_K8S_38", "CKV_K8S_43")


def granted(role: dict[str, Any]) -> dict[tuple[str, str], set[str]]:
    verbs: dict[tuple[str, str], set[str]] = {}
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                verbs.setdefault((group, resource), set()).update(rule["verbs"])
    return verbs


def container(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    (deployment,) = of_kind(manifests, "Deployment")
    (only,) = deployment["spec"]["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def named(manifests: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [one for one in of_kind(manifests, kind) if one["metadata"]["name"] == name]
    return found


def test_helm_lint_passes_for_the_operator_chart(tmp_path: Path) -> None:
    assert "0 chart(s) failed" in lint("mpi-operator", {}, tmp_path)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_object_of_the_operator_is_valid(variant: str, tmp_path: Path) -> None:
    manifests = rendered("mpi-operator", values=VARIANTS[variant], crds=True)
    assert kubernetes_complaints(manifests, tmp_path / "objects") == []


def test_the_operator_may_do_what_it_calls_and_nothing_else() -> None:
    manifests = rendered("mpi-operator", release="op")
    assert granted(named(manifests, "ClusterRole", "kubeflow-op")) == CALLS
    assert granted(named(manifests, "ClusterRole", "kubeflow-op-priority-classes")) == {
        ("scheduling.k8s.io", "priorityclasses"): {"list", "watch"}
    }
    lease = named(manifests, "Role", "op-leader-election")
    assert lease["metadata"]["namespace"] == "kubeflow"
    assert granted(lease) == {
        ("coordination.k8s.io", "leases"): {"create", "get", "update"},
        ("", "events"): {"create", "patch"},
    }


def test_one_watched_namespace_gets_a_role_there_and_none_for_the_cluster() -> None:
    manifests = rendered("mpi-operator", values=VARIANTS["one namespace"], release="op")
    role = named(manifests, "Role", "kubeflow-op")
    assert role["metadata"]["namespace"] == "training"
    assert granted(role) == CALLS
    cluster_wide = {one["metadata"]["name"] for one in of_kind(manifests, "ClusterRole")}
    assert cluster_wide == {"kubeflow-op-priority-classes", "kubeflow-op-view", "kubeflow-op-edit"}
    (bound,) = of_kind(manifests, "ClusterRoleBinding")
    assert bound["roleRef"]["name"] == "kubeflow-op-priority-classes"
    assert named(manifests, "Role", "op-leader-election")["metadata"]["namespace"] == "locks"
    assert {"--namespace=training", "--lock-namespace=locks"} <= set(container(manifests)["args"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_binding_names_a_role_of_the_chart_and_its_service_account(variant: str) -> None:
    manifests = rendered("mpi-operator", values=VARIANTS[variant], release="op", namespace="ops")
    roles = {
        (one["kind"], one["metadata"]["name"], one["metadata"].get("namespace"))
        for one in manifests
        if one["kind"] in ("Role", "ClusterRole")
    }
    for binding in of_kind(manifests, "RoleBinding") + of_kind(manifests, "ClusterRoleBinding"):
        target = binding["roleRef"]
        assert (target["kind"], target["name"], binding["metadata"].get("namespace")) in roles
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "op", "namespace": "ops"}]
    assert named(manifests, "ServiceAccount", "op")["metadata"]["namespace"] == "ops"


def test_the_leader_lock_is_in_the_namespace_of_the_release_by_default() -> None:
    assert "--lock-namespace=ops" in container(rendered("mpi-operator", namespace="ops"))["args"]
    watches_all = container(rendered("mpi-operator"))["args"]
    assert not [argument for argument in watches_all if argument.startswith("--namespace")]


def test_the_operators_pod_meets_restricted_pod_security() -> None:
    manifests = rendered("mpi-operator")
    (deployment,) = of_kind(manifests, "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert "volumes" not in pod
    assert "hostNetwork" not in pod
    assert container(manifests)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_probes_use_the_port_that_the_operator_listens_on() -> None:
    operator = container(rendered("mpi-operator"))
    ports = {port["name"]: port["containerPort"] for port in operator["ports"]}
    assert ports == {"health": 8080}
    for probe in ("livenessProbe", "readinessProbe"):
        assert operator[probe]["httpGet"] == {"path": "/healthz", "port": "health"}


def test_the_image_has_the_version_of_the_release_and_a_digest_overrides_it() -> None:
    assert container(rendered("mpi-operator"))["image"] == "docker.io/mpioperator/mpi-operator:0.8.2"
    pinned = container(rendered("mpi-operator", values=VARIANTS["everything"]))["image"]
    assert pinned == "docker.io/mpioperator/mpi-operator@sha256:" + "a" * 64
    mirror = {"image": {"repository": "1.dkr.ecr.us-west-2.amazonaws.com/mpi", "tag": "v0.8.1"}}
    assert container(rendered("mpi-operator", values=mirror))["image"].endswith("amazonaws.com/mpi:v0.8.1")


def test_metrics_are_reachable_only_if_enabled() -> None:
    (closed,) = of_kind(rendered("mpi-operator"), "NetworkPolicy")
    assert closed["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in closed["spec"]
    manifests = rendered("mpi-operator", values={"monitoring_port": 9090})
    (opened,) = of_kind(manifests, "NetworkPolicy")
    assert opened["spec"]["ingress"] == [{"ports": [{"protocol": "TCP", "port": 9090}]}]
    assert "--monitoring-port=9090" in container(manifests)["args"]


def test_names_that_yaml_reads_as_numbers_stay_strings(tmp_path: Path) -> None:
    manifests = rendered("mpi-operator", values={"watch_namespace": "789"}, release="1e3", namespace="456")
    assert kubernetes_complaints(manifests, tmp_path / "objects") == []
    assert {one["metadata"]["labels"]["app.kubernetes.io/instance"] for one in manifests} == {"1e3"}


def crd() -> dict[str, Any]:
    (file,) = deploy_path("helm", "mpi-operator", "crds").iterdir()
    loaded = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def test_the_crd_is_mpijob_v2beta1_with_a_status_subresource() -> None:
    definition = crd()
    assert definition["metadata"]["name"] == "mpijobs.kubeflow.org"
    spec = definition["spec"]
    assert (spec["group"], spec["scope"]) == ("kubeflow.org", "Namespaced")
    assert spec["names"] == {"kind": "MPIJob", "listKind": "MPIJobList", "plural": "mpijobs", "singular": "mpijob"}
    (version,) = spec["versions"]
    assert (version["name"], version["served"], version["storage"]) == ("v2beta1", True, True)
    assert version["subresources"] == {"status": {}}
    assert {column["name"] for column in version["additionalPrinterColumns"]} == {"State", "Workers", "Active", "Age"}


def test_the_crd_fits_into_the_annotation_of_a_plain_kubectl_apply() -> None:
    assert len(json.dumps(crd())) < 262_144


def test_the_crds_schema_rejects_a_bad_mpijob() -> None:
    schema = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    validator = Draft202012Validator(schema)
    template = {"spec": {"containers": [{"name": "worker", "image": "i"}]}}
    job: dict[str, Any] = {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": {"name": "r50"},
        "spec": {
            "launcherCreationPolicy": "WaitForWorkersReady",
            "slotsPerWorker": 8,
            "mpiReplicaSpecs": {"Worker": {"replicas": 2, "template": template}},
        },
    }
    assert list(validator.iter_errors(job)) == []
    job["spec"]["slotsPerWorker"] = "8"
    job["spec"]["mpiImplementation"] = "LAM"
    assert len(list(validator.iter_errors(job))) == 2


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"watch_namespace": "Not_A_Namespace"}, "watch_namespace"),
        ({"watch_namespace": "a" * 64}, "watch_namespace"),
        ({"lock_namespace": 'x"\n- --kubeConfig=/etc'}, "lock_namespace"),
        ({"image": {"digest": "sha256:abc"}}, "digest"),
        ({"image": {"tag": "{{ .Values }}"}}, "tag"),
        ({"image": {"repository": "a b"}}, "repository"),
        ({"replicas": 0}, "replicas"),
        ({"replicas": "two"}, "replicas"),
        ({"monitoring_port": 8080}, "monitoring_port"),
        ({"resources": {"limits": {"cpu": "lots"}}}, "cpu"),
        ({"replica": 2}, "replica"),
    ],
)
def test_a_bad_value_of_the_operator_is_rejected_by_name(values: dict[str, Any], field: str) -> None:
    assert field in refusal("mpi-operator", values=values)


def test_a_release_name_of_the_operator_that_is_too_long_is_rejected_by_name() -> None:
    assert "release name" in refusal("mpi-operator", values={}, release="o" * 41)


@pytest.mark.slow
def test_checkov_finds_nothing_in_the_operators_objects(tmp_path: Path) -> None:
    guarded = [values for name, values in VARIANTS.items() if name != "bare"]
    manifests = [one for values in guarded for one in rendered("mpi-operator", values=values)]
    assert checkov_findings(written(manifests, tmp_path / "all.yaml"), "kubernetes", SKIPS) == []
    (deployment,) = of_kind(rendered("mpi-operator"), "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["securityContext"]["privileged"] = True
    (found,) = checkov_findings(written([deployment], tmp_path / "bad.yaml"), "kubernetes", (*SKIPS, "CKV2_K8S_6"))
    assert "CKV_K8S_16" in found


def test_the_dashboard_is_created_only_if_asked_and_reaches_grafana_unchanged() -> None:
    assert of_kind(rendered("mpi-operator"), "ConfigMap") == []
    [found] = of_kind(rendered("mpi-operator", values={"grafana_dashboard": True}), "ConfigMap")
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    file = deploy_path("helm", "mpi-operator", "files", "dashboard.json")
    assert json.loads(found["data"]["maskfleet.json"]) == json.loads(file.read_text(encoding="utf-8"))
