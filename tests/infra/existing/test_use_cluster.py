"""`--use-cluster`: plan, up and down on a cluster of others; the real terraform, and the fake Kubernetes API."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from maskfleet.errors import ConfigError, InfraError
from maskfleet.infra.existing.cluster import describe_cluster
from maskfleet.infra.existing.down import down_existing
from maskfleet.infra.existing.up import plan_existing, up_existing
from maskfleet.infra.kubernetes import leftovers
from maskfleet.infra.terraform.down import DownOptions
from maskfleet.infra.terraform.session import Options, Session, open_session, read_session
from maskfleet.infra.terraform.status import status
from maskfleet.infra.terraform.variables import VARIABLES_FILE
from maskfleet.system.kube.fake import FakeKube

# A root with the names and the variables of the shipped one, and terraform_data instead of charts.
ROOT = """
variable "region" { type = string }
variable "cluster_id" { type = string }
variable "cluster_endpoint" { type = string }
variable "node_role_name" { type = string }
variable "existing_parts" { default = [] }
variable "kubeflow_namespace" { default = "kubeflow" }
variable "trainer_service_accounts" { default = ["maskfleet-trainer"] }
variable "staging_service_accounts" { default = ["maskfleet-staging"] }
variable "efs_id" { default = "" }
resource "terraform_data" "kubeflow" {
  count = contains(var.existing_parts, "namespace") ? 0 : 1
  input = var.kubeflow_namespace
}
resource "terraform_data" "data" {
  for_each = toset(concat(var.trainer_service_accounts, var.staging_service_accounts))
  input    = each.key
}
resource "terraform_data" "mpi_operator" {
  count = contains(var.existing_parts, "mpi_operator") ? 0 : 1
  input = var.cluster_id
}
resource "terraform_data" "gpu_nodes" {
  count = contains(var.existing_parts, "node_pools") ? 0 : 1
  input = var.node_role_name
}
resource "terraform_data" "storage" {
  count = var.efs_id == "" ? 0 : 1
  input = var.efs_id
}
"""
MPIJOBS = "/apis/kubeflow.org/v2beta1/mpijobs"
POOLS = "/apis/karpenter.sh/v1/nodepools"
CLAIMS = "/apis/karpenter.sh/v1/nodeclaims"
CLASSES = "/apis/karpenter.k8s.aws/v1/ec2nodeclasses"
IMAGE = {"containers": [{"image": "mirror/mpi-operator"}]}


def labels(chart: str) -> dict[str, Any]:
    return {"labels": {"app.kubernetes.io/part-of": "maskfleet", "app.kubernetes.io/name": f"maskfleet-{chart}"}}


@dataclass
class Platform:
    """A cluster of a team, and a work folder for it."""

    stage: Any
    api: FakeKube

    def open(self, *assignments: str, name: str | None = "team") -> Session:
        options = Options(self.stage.workdir, assignments, use_cluster=name)
        return open_session(options, self.stage.stack, self.stage.view(), self.stage.env)

    def read(self) -> Session:
        return read_session(Options(self.stage.workdir), self.stage.stack, self.stage.view(), self.stage.env)

    def made(self) -> set[str]:
        return {resource.address.removeprefix("terraform_data.") for resource in self.read().addons.state().resources}

    def given(self) -> dict[str, Any]:
        """The variables that terraform was given last."""
        file = self.stage.workdir / "deploy/terraform/eks/addons" / VARIABLES_FILE
        found: dict[str, Any] = json.loads(file.read_text())
        return found


@pytest.fixture
def platform(stage: Any, made_once: Any, kube_api: FakeKube, monkeypatch: pytest.MonkeyPatch) -> Platform:
    """Karpenter without GPU pools, no operator, and somebody's Deployment."""
    monkeypatch.setattr(leftovers, "POLL_S", 0.05)
    folder = Path(made_once[0].env["PATH"].split(":")[0]).parent
    certificate = base64.b64encode((folder / "api.crt").read_bytes()).decode()
    cluster = {
        "name": "team",
        "version": "1.34",
        "status": "ACTIVE",
        "arn": "arn:aws:eks:eu-west-1:123456789012:cluster/team",
        "endpoint": kube_api.url,
        "certificateAuthority": {"data": certificate},
        "resourcesVpcConfig": {"vpcId": "vpc-1"},
    }
    answer = stage.workdir.parent / "cluster.json"
    answer.write_text(json.dumps({"cluster": cluster}))
    # What describes clusters comes first on PATH; tokens come from the program of `made_once`.
    program = Path(stage.env["PATH"].split(":")[0]) / "aws"
    program.write_text(
        f'#!/bin/sh\ncase "$*" in *describe-cluster*team*) cat {answer};; *) echo "$0: $*" >&2; exit 1;; esac\n'
    )
    program.chmod(0o755)
    (stage.stack.deploy / "terraform/eks/addons/main.tf").write_text(ROOT)
    for path in (MPIJOBS, "/apis/kubeflow.org/v1/mpijobs"):
        monkeypatch.setitem(kube_api.broken, path, 404)
    kube_api.add_at("/api/v1/namespaces/kube-system")
    terms = [{"tags": {"team": "a"}}]
    spec = {"role": "team-node", "subnetSelectorTerms": terms, "securityGroupSelectorTerms": terms}
    kube_api.add_at(f"{CLASSES}/default", spec=spec)
    kube_api.add_at(f"{POOLS}/cpu", spec={"limits": {"cpu": 100}})
    kube_api.add_at("/apis/apps/v1/namespaces/web/deployments/shop")
    return Platform(stage, kube_api)


@pytest.mark.slow
def test_up_installs_only_what_is_missing_and_changes_nothing_else(platform: Platform) -> None:
    before = dict(platform.api.objects)
    asked = len(platform.api.requests)
    up_existing(platform.open())
    assert platform.made() == {
        *('data["maskfleet-staging"]', 'data["maskfleet-trainer"]', "gpu_nodes[0]", "kubeflow[0]", "mpi_operator[0]"),
    }
    given = platform.given()
    assert given["cluster_id"] == "team"
    assert given["region"] == "eu-west-1"
    assert given["node_role_name"] == "team-node"
    assert given["existing_parts"] == ["efa_device_plugin", "karpenter", "kueue", "cluster_autoscaler"]
    assert {method for method, _ in platform.api.requests[asked:]} == {"GET"}
    assert platform.api.objects == before
    shown = platform.stage.shown()
    assert "cluster team, which maskfleet did not create:" in shown
    assert [line.split("  ")[1] for line in shown.splitlines() if line.endswith("  install")][:2] == [
        "namespace kubeflow",
        "service accounts",
    ]
    assert not [command for command in platform.stage.commands() if "aws" in command]
    state = status(platform.read())
    assert [root.root for root in state.roots] == ["addons"]
    assert state.is_well
    assert state.cluster == "team"


@pytest.mark.slow
def test_a_second_up_does_nothing_and_down_removes_only_what_the_first_made(platform: Platform) -> None:
    platform.api.add_at("/apis/apps/v1/namespaces/tools/deployments/mpi", spec={"template": {"spec": IMAGE}})
    platform.api.broken.pop(MPIJOBS)
    up_existing(platform.open())
    assert "mpi_operator[0]" not in platform.made()
    before = platform.made()
    # What the charts would have created.
    platform.api.add_at("/api/v1/namespaces/kubeflow")
    for account in ("default", "maskfleet-trainer", "maskfleet-staging"):
        platform.api.add_at(f"/api/v1/namespaces/kubeflow/serviceaccounts/{account}")
    claim = platform.api.add_at(f"{CLAIMS}/gpu-1", lingers=1, metadata={"labels": {"karpenter.sh/nodepool": "gpu"}})
    pool = platform.api.add_at(f"{POOLS}/gpu", dependents=(claim,), metadata=labels("gpu-nodes"))
    theirs = platform.api.add_at(f"{CLAIMS}/cpu-1", metadata={"labels": {"karpenter.sh/nodepool": "cpu"}})
    job = platform.api.add_at("/apis/kubeflow.org/v2beta1/namespaces/research/mpijobs/theirs")
    platform.stage.shown()
    up_existing(platform.open(name=None))
    assert "nothing to do" in platform.stage.shown()
    assert platform.made() == before
    down_existing(platform.read(), DownOptions())
    assert platform.made() == set()
    assert platform.api.deleted == [pool, claim]
    assert {theirs, job, f"{POOLS}/cpu"} <= set(platform.api.objects)
    down_existing(platform.read(), DownOptions())
    assert "nothing is left to remove" in platform.stage.shown()


@pytest.mark.slow
def test_down_keeps_what_others_use_until_they_do_not(platform: Platform) -> None:
    up_existing(platform.open())
    platform.api.broken.pop(MPIJOBS)
    job = platform.api.add_at("/apis/kubeflow.org/v2beta1/namespaces/research/mpijobs/theirs")
    secret = platform.api.add_at("/api/v1/namespaces/kubeflow/secrets/password")
    platform.api.add_at("/api/v1/namespaces/kubeflow/configmaps/kube-root-ca.crt")
    pool = platform.api.add_at(f"{POOLS}/gpu", metadata=labels("gpu-nodes"))
    platform.api.add_at("/api/v1/nodes/n1", metadata={"labels": {"karpenter.sh/nodepool": "gpu"}})
    pod = platform.api.add_at("/api/v1/namespaces/web/pods/model", spec={"nodeName": "n1"}, status={"phase": "Running"})
    platform.stage.shown()
    down_existing(platform.read(), DownOptions())
    shown = platform.stage.shown()
    assert platform.made() == {"gpu_nodes[0]", "kubeflow[0]", "mpi_operator[0]"}
    assert platform.api.deleted == []
    assert "kept terraform_data.mpi_operator: MPIJob research/theirs would be lost or stop" in shown
    assert "kept terraform_data.kubeflow: secrets/password would" in shown
    assert "kept terraform_data.gpu_nodes: pod web/model would" in shown
    for path in (job, secret, pod):
        del platform.api.objects[path]
    down_existing(platform.read(), DownOptions())
    assert platform.made() == set()
    assert platform.api.deleted == [pool]


@pytest.mark.slow
def test_down_that_may_not_look_removes_nothing(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    up_existing(platform.open())
    before = platform.made()
    monkeypatch.setattr(platform.api, "forbidden", {"/apis/karpenter.sh"})
    with pytest.raises(InfraError, match="nothing was removed"):
        down_existing(platform.read(), DownOptions())
    with pytest.raises(InfraError, match="what the cluster has cannot be read"):
        plan_existing(platform.open())
    assert platform.made() == before


def test_a_work_folder_keeps_to_its_cluster(platform: Platform, made: Any) -> None:
    with pytest.raises(InfraError, match="belongs to a cluster of maskfleet's own"):
        read_session(Options(made.workdir, use_cluster="team"), made.stack, made.view(), made.env)
    with pytest.raises(ConfigError, match="no variable azs"):
        platform.open('azs=["a"]')
    platform.open()
    (platform.stage.workdir / "state").mkdir(exist_ok=True)
    (platform.stage.workdir / "state" / "addons.tfstate").touch()
    with pytest.raises(InfraError, match="belongs to the cluster team, not to other"):
        platform.open(name="other")


@pytest.mark.parametrize(
    ("words", "what", "remedy"),
    [
        ("ResourceNotFoundException: No cluster found", "there is no EKS cluster team in eu-west-1", "list-clusters"),
        (
            "AccessDeniedException: User is not authorized to perform: eks:DescribeCluster",
            "failed",
            "eks:DescribeCluster",
        ),
        ("Unable to locate credentials", "failed: Unable", "fix what aws reports"),
    ],
)
def test_what_aws_says_about_a_cluster_it_does_not_show(tmp_path: Path, words: str, what: str, remedy: str) -> None:
    program = tmp_path / "aws"
    program.write_text(f"#!/bin/sh\necho '{words}' >&2\nexit 254\n")
    program.chmod(0o755)
    with pytest.raises(InfraError, match=what) as caught:
        describe_cluster("team", region="eu-west-1", profile=None, env={"PATH": f"{tmp_path}:/bin"})
    assert remedy in caught.value.remedy
    with pytest.raises(ConfigError, match="not the name"):
        describe_cluster("--endpoint-url=x", region=None, profile=None, env={"PATH": str(tmp_path)})
