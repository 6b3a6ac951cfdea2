"""`maskfleet doctor --on eks`: what a cluster has and lacks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from eks_world import fit_cluster
from typer.testing import CliRunner

from maskfleet.cli.doctor import _print_table
from maskfleet.cli.main import app
from maskfleet.config.launch import EksLaunch
from maskfleet.launch.eks.doctor import OF_ELASTIC_JOB, OF_MPIJOB, PERMISSIONS, amount, examine_eks
from maskfleet.launch.findings import Finding, Verdict
from maskfleet.system.deploy_files import deploy_path
from maskfleet.system.kube.fake import VERSION, FakeKube
from ports import free_port

LAUNCH = EksLaunch(nodes=2, instance="p4d.24xlarge")


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKube]:
    fake = fit_cluster(FakeKube(tmp_path, port=free_port()))
    monkeypatch.setenv("KUBECONFIG", str(fake.kubeconfig))
    yield fake
    fake.stop()


def pool(*types: str) -> dict[str, Any]:
    requirement = {"key": "node.kubernetes.io/instance-type", "operator": "In", "values": list(types)}
    spec = {"template": {"spec": {"requirements": [requirement]}}}
    return {"kind": "NodePool", "metadata": {"name": "gpu-efa"}, "spec": spec}


def plugin() -> dict[str, Any]:
    return {"kind": "DaemonSet", "metadata": {"name": "nvidia-device-plugin", "namespace": "kube-system"}}


def quota(used: str, hard: str) -> dict[str, Any]:
    key = "requests.nvidia.com/gpu"
    return {"kind": "ResourceQuota", "metadata": {"name": "gpus", "namespace": "kubeflow"},
            "status": {"hard": {key: hard}, "used": {key: used}}}  # fmt: skip


def by_name(findings: list[Finding]) -> dict[str, tuple[Verdict, str]]:
    return {one.name: (one.verdict, one.found) for one in findings}


def test_a_cluster_that_can_train_has_nothing_that_fails(api: FakeKube) -> None:
    api.add(pool("p4d.24xlarge", "p5.48xlarge"), plugin(), quota("8", "32"))
    found = examine_eks(LAUNCH, which=lambda name: f"/usr/bin/{name}")
    assert {one.verdict for one in found} == {Verdict.OK}
    assert by_name(found)["nodes p4d.24xlarge"][1] == "0 now; pool gpu-efa provisions more"
    assert by_name(found)["quota"][1] == "gpus: 8 of 32 GPUs used, 16 wanted"
    assert {"helm", "API", "namespace", "MPIJob", "MPI operator", "rights", "volume claim pv-fsx"} <= set(
        by_name(found)
    )


def test_everything_that_is_missing_is_told_at_once(api: FakeKube) -> None:
    api.objects = {path: one for path, one in api.objects.items() if one["kind"] == "Namespace"}
    api.add(pool("g5.xlarge"), quota("20", "32"))
    api.allowed = lambda asked: False
    found = by_name(examine_eks(LAUNCH, which=lambda name: None))
    failed = {name for name, (verdict, _) in found.items() if verdict is Verdict.FAIL}
    assert failed == {
        "helm",
        "MPIJob",
        "rights",
        "volume claim pv-fsx",
        "NVIDIA device plugin",
        "quota",
    }
    assert found["nodes p4d.24xlarge"][0] is Verdict.WARN
    assert found["MPI operator"][0] is Verdict.WARN


def test_an_api_that_does_not_answer_is_the_one_finding(api: FakeKube) -> None:
    api.stop()
    found = examine_eks(LAUNCH, which=lambda name: name)
    assert [(one.name, one.verdict) for one in found] == [("helm", Verdict.OK), ("API", Verdict.FAIL)]
    api.start()


def test_nodes_without_karpenter_count(api: FakeKube) -> None:
    for name in ("a", "b"):
        labels = {"node.kubernetes.io/instance-type": "p4d.24xlarge"}
        api.add({"kind": "Node", "metadata": {"name": name, "labels": labels},
                 "status": {"allocatable": {"nvidia.com/gpu": "8"}}})  # fmt: skip
    found = by_name(examine_eks(LAUNCH, which=lambda name: name))
    assert found["nodes p4d.24xlarge"] == (Verdict.OK, "2 now")
    assert found["NVIDIA device plugin"] == (Verdict.OK, "nodes offer GPUs")


def test_a_cpu_run_needs_no_gpu(api: FakeKube) -> None:
    found = by_name(examine_eks(EksLaunch(instance="m7i.xlarge", gpus=0), which=lambda name: name))
    assert "NVIDIA device plugin" not in found


def test_the_command_prints_json_and_ends_with_1_when_something_fails(api: FakeKube) -> None:
    done = CliRunner().invoke(app, ["doctor", "--on", "eks", "--launch-set", "nodes=2", "--json"])
    assert done.exit_code == 1
    assert any(one["verdict"] == "fail" for one in json.loads(done.stdout))
    assert "cannot train yet" in CliRunner().invoke(app, ["doctor", "--on", "eks"]).stdout


@pytest.mark.parametrize(("text", "value"), [("8", 8), ("500m", Decimal("0.5")), ("2k", 2000), ("1Gi", 2**30)])
def test_quantities_are_read_as_kubernetes_writes_them(text: str, value: Any) -> None:
    assert amount(text) == value


def test_namespace_context_and_instance_are_chosen_as_for_a_launch(api: FakeKube) -> None:
    chosen = ["--namespace", "elsewhere", "--context", "fake", "--nodes", "3", "--instance", "g5.xlarge"]
    done = CliRunner().invoke(app, ["doctor", "--on", "eks", *chosen, "--json"])
    found = {one["name"]: one for one in json.loads(done.stdout)}
    assert found["namespace"]["remedy"].endswith("kubectl create namespace elsewhere")
    assert found["nodes g5.xlarge"]["found"].startswith("0 of 3")
    unknown = CliRunner().invoke(app, ["doctor", "--on", "eks", "--context", "nowhere", "--json"])
    assert "No such context nowhere" in json.loads(unknown.stdout)[1]["found"]


def test_a_long_path_in_the_table_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    path = "/opt/" + "deep/" * 20 + "helm"
    _print_table(("", "what", "found", "remedy"), [("ok", "helm", path, "")])
    assert path in "".join(capsys.readouterr().out.split())


def test_the_rights_that_are_checked_are_those_in_the_docs() -> None:
    page = Path(__file__).parents[3] / "docs/run-anywhere/eks/index.md"
    documented: dict[str, set[str]] = {}
    for line in page.read_text(encoding="utf-8").split("## Permissions")[1].splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 5 and cells[1] not in ("Resource", "---"):
            for name in cells[1].split(", "):
                documented.setdefault(name.split(" (")[0], set()).update(cells[2].split(", "))
    needed = {**OF_MPIJOB, **OF_ELASTIC_JOB, **PERMISSIONS}
    for (_, kind, part), verbs in needed.items():
        assert set(verbs) <= documented[f"{kind}/{part}" if part else kind], kind
    chart = deploy_path("helm", "train") / "templates"
    kinds = {kind for file in chart.glob("*.yaml") for kind in re.findall(r"^kind: (\w+)$", file.read_text(), re.M)}
    plural = {f"{kind.lower()[:-1]}ies" if kind.endswith("y") else f"{kind.lower()}s" for kind in kinds}
    optional = {"podmonitors"}  # only with metrics_pod_monitor
    assert all(kind in page.read_text(encoding="utf-8") for kind in optional)
    assert plural - optional == {
        kind for (_, kind, _), verbs in needed.items() if "create" in verbs and kind != "secrets"
    }


def test_an_elastic_job_needs_neither_operator_nor_mpijobs_but_a_new_cluster(
    api: FakeKube, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in [path for path in api.objects if "mpi" in path or "kubeflow.org" in path]:
        del api.objects[path]
    api.allowed = lambda asked: asked["resource"] != "mpijobs"
    elastic = EksLaunch(nodes=3, min_nodes=2)
    assert not [one for one in examine_eks(elastic) if one.refusal]
    assert {one.name for one in examine_eks(EksLaunch(nodes=3)) if one.refusal} == {"MPIJob", "rights"}
    api.allowed = lambda asked: (asked["resource"], asked["verb"]) != ("jobs", "create")
    assert by_name(examine_eks(elastic))["rights"] == (Verdict.FAIL, "lacks create jobs")
    monkeypatch.setitem(VERSION, "gitVersion", "v1.30.4-eks-1")
    assert by_name(examine_eks(elastic))["elastic jobs"][1] == "Kubernetes v1.30.4-eks-1 is too old"


def test_a_user_with_only_the_documented_rights_gets_no_failure(api: FakeKube) -> None:
    namespaced = {
        *("mpijobs", "configmaps", "serviceaccounts", "poddisruptionbudgets", "networkpolicies", "secrets", "pods"),
        *("events", "jobs", "persistentvolumeclaims"),
    }
    api.allowed = lambda asked: asked["resource"] in namespaced
    api.forbidden |= {"/api/v1/nodes", "/apis/apps", "/apis/karpenter.sh", "/apis/coordination.k8s.io"}
    api.forbidden |= {"/api/v1/namespaces/kubeflow/resourcequotas"}
    for path in ("/api/v1/namespaces", "/api/v1/namespaces/kubeflow"):
        api.broken[path] = 403
    found = by_name(examine_eks(LAUNCH, which=lambda name: f"/usr/bin/{name}"))
    assert {name for name, (verdict, _) in found.items() if verdict is Verdict.FAIL} == set()
    for name in ("nodes p4d.24xlarge", "quota", "NVIDIA device plugin"):
        assert found[name][0] is Verdict.WARN
        assert found[name][1].startswith("not permitted to list")
    assert found["namespace"] == (Verdict.OK, "kubeflow, not permitted to read it")


def test_pools_that_may_not_be_listed_are_not_called_missing(api: FakeKube) -> None:
    api.forbidden.add("/apis/karpenter.sh")
    found = by_name(examine_eks(LAUNCH, which=lambda name: name))
    assert found["nodes p4d.24xlarge"] == (Verdict.WARN, "0 of 2; not permitted to list Karpenter's pools")


def test_a_queue_needs_kueue_and_must_exist(api: FakeKube) -> None:
    launch = EksLaunch(nodes=2, instance="p4d.24xlarge", queue="gpu")

    def queue() -> tuple[Verdict, str]:
        return by_name(examine_eks(launch, which=lambda name: name))["queue gpu"]

    assert queue() == (Verdict.FAIL, "Kueue is not installed")
    version = "kueue.x-k8s.io/v1beta1"
    api.add_at("/apis/kueue.x-k8s.io", kind="APIGroup", preferredVersion={"groupVersion": version})
    queues = f"/apis/{version}/namespaces/kubeflow/localqueues"
    api.add_at(f"{queues}/other", kind="LocalQueue")
    assert queue() == (Verdict.FAIL, "missing")
    api.add_at(f"{queues}/gpu", kind="LocalQueue")
    assert queue() == (Verdict.OK, "exists")
    api.forbidden.add(queues)
    assert queue() == (Verdict.WARN, "not permitted to list queues")
