"""`maskfleet doctor --on eks`: what a cluster has and lacks."""

from __future__ import annotations

import json
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
from maskfleet.launch.eks.doctor import amount, examine_eks
from maskfleet.launch.findings import Finding, Verdict
from maskfleet.system.kube.fake import FakeKube
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
