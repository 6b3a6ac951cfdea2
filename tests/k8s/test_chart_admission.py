"""A namespace that enforces Pod Security "restricted" accepts every pod of ours."""

from __future__ import annotations

import pytest
from chart_cases import DOCUMENTED, IMAGE, NOTEBOOK, STAGE_DATA, filled
from kube import Kube, Manifest, as_pod, eventually, pod_templates, random_name

pytestmark = pytest.mark.usefixtures("mpijobs", "other_kinds")
WITH_PODS = ("train", "notebook", "stage-data", "mpi-operator")
CASES = [(chart, label) for chart in WITH_PODS for label in DOCUMENTED[chart]]


@pytest.mark.parametrize(("chart", "label"), CASES, ids=lambda part: part)
def test_restricted_accepts_the_pods_of_documented_values(shared_kube: Kube, chart: str, label: str) -> None:
    values = filled(DOCUMENTED[chart][label], shared_kube.namespace)
    objects = shared_kube.install_rehearsed(random_name("it"), chart, values)
    templates = list(pod_templates(objects))
    assert len(templates) == (2 if chart == "train" and "min_nodes" not in values else 1)

    for of, template in templates:
        template["spec"]["serviceAccountName"] = "default"  # the release's own does not exist in a dry run
        done = shared_kube.rehearse(as_pod(template, random_name("pod")))
        assert done.returncode == 0, f"{of}: {done.stderr}"


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("privileged", {"privileged": True, "allowPrivilegeEscalation": True}),
        ("allowPrivilegeEscalation", {"allowPrivilegeEscalation": True}),
        ("capabilities", {"capabilities": {"drop": ["ALL"], "add": ["NET_ADMIN"]}}),
        ("runAsUser", {"runAsUser": 0}),
    ],
)
def test_restricted_rejects_our_own_pod_with_more_privileges(shared_kube: Kube, rule: str, change: Manifest) -> None:
    objects = shared_kube.install_rehearsed("it", "train", DOCUMENTED["train"]["cpu"])
    template = dict(pod_templates(objects))["MPIJob it Worker"]
    template["spec"]["serviceAccountName"] = "default"
    container = template["spec"]["containers"][0]
    container["securityContext"] = {**container["securityContext"], **change}

    done = shared_kube.rehearse(as_pod(template, "greedy"))

    assert done.returncode != 0
    assert 'violates PodSecurity "restricted' in done.stderr
    assert rule in done.stderr


def test_restricted_rejects_a_host_path(shared_kube: Kube) -> None:
    objects = shared_kube.install_rehearsed("it", "train", DOCUMENTED["train"]["cpu"])
    template = dict(pod_templates(objects))["MPIJob it Worker"]
    template["spec"]["serviceAccountName"] = "default"
    template["spec"]["volumes"].append({"name": "node", "hostPath": {"path": "/dev/shm"}})

    done = shared_kube.rehearse(as_pod(template, "greedy"))

    assert done.returncode != 0
    assert "hostPath" in done.stderr


def test_the_control_plane_makes_the_pods_of_notebook_and_staging(kube: Kube) -> None:
    kube.install("book", "notebook", NOTEBOOK)
    kube.install("stage", "stage-data", {**STAGE_DATA, "service_account": ""})

    for release in ("book", "stage"):
        [pod] = eventually(
            lambda name=release: kube.list("pods", f"app.kubernetes.io/instance={name}"),
            what=lambda name=release: f"a pod of {name}: {[event['message'] for event in kube.list('events')]}",
        )
        assert {container["image"] for container in pod["spec"]["containers"]} == {IMAGE}


def test_the_operators_account_can_do_its_work_in_its_namespace_and_nothing_elsewhere(kube: Kube) -> None:
    kube.install("operator", "mpi-operator", {"watch_namespace": kube.namespace})
    try:
        account = f"--as=system:serviceaccount:{kube.namespace}:operator"
        eventually(lambda: may(kube, account, *NEEDED[0], kube.namespace), what="the operator's role in force")
        for verb, kind in NEEDED:
            assert may(kube, account, verb, kind, kube.namespace), f"may not {verb} {kind}"
            assert not may(kube, account, verb, kind, "kube-system"), f"may {verb} {kind} elsewhere"
        for verb, kind in NOT_NEEDED:
            assert not may(kube, account, verb, kind, kube.namespace), f"may {verb} {kind}"
    finally:
        kube.helm("uninstall", "operator")


# What its controller does, according to its source.
NEEDED = (
    *((verb, kind) for verb in ("list", "watch", "create") for kind in ("pods", "services", "secrets", "jobs.batch")),
    *(("list", kind) for kind in ("configmaps", "mpijobs.kubeflow.org")),
    *(("create", kind) for kind in ("configmaps", "events")),
    ("update", "configmaps"),
    ("update", "jobs.batch"),
    ("update", "jobs.batch/status"),
    ("delete", "pods"),
    ("update", "mpijobs.kubeflow.org/status"),
)
NOT_NEEDED = (
    ("delete", "nodes"),
    ("get", "clusterroles.rbac.authorization.k8s.io"),
    ("create", "namespaces"),
    ("delete", "secrets"),
)


def may(kube: Kube, account: str, verb: str, kind: str, namespace: str) -> bool:
    """Whether the API allows this account to do it."""
    kind, _, part = kind.partition("/")
    subresource = (f"--subresource={part}",) if part else ()
    done = kube.try_kubectl("auth", "can-i", verb, kind, *subresource, account, f"--namespace={namespace}")
    # A refusal may have its reason behind it.
    answer = done.stdout.split(maxsplit=1)[:1]
    assert answer in (["yes"], ["no"]), done.stderr
    return answer == ["yes"]
