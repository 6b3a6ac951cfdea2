"""down: first what is outside of the state, data last and only on request; with the real terraform."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from maskfleet.errors import InfraError
from maskfleet.infra.kubernetes import leftovers
from maskfleet.infra.terraform.down import DownOptions, down
from maskfleet.infra.terraform.status import status
from maskfleet.infra.terraform.up import up

pytestmark = pytest.mark.slow

OURS = {"labels": {"app.kubernetes.io/name": "maskfleet-notebook"}}


@pytest.fixture(autouse=True)
def _quick_looks(kube_api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "POLL_S", 0.05)


def addresses(stage: Any) -> set[str]:
    session = stage.read()
    return {resource.address for root in (session.base, session.addons) for resource in root.state().resources}


def test_down_keeps_data_and_what_it_depends_on_and_lists_it(made: Any) -> None:
    ids = {resource.address: resource.id for resource in made.read().base.state().resources}
    down(made.read(), DownOptions())
    kept = {
        "terraform_data.efs",
        "terraform_data.efs_policy",
        "terraform_data.fsx",
        'terraform_data.subnet["a"]',
        'terraform_data.subnet["b"]',
        "terraform_data.vpc",
    }
    assert addresses(made) == kept
    shown = made.shown()
    for address in kept:
        assert f"  {address}  {ids[address]}" in shown
    assert "--delete-data deletes it" in shown


def test_up_after_two_downs_uses_the_same_data(made: Any) -> None:
    before = {resource.address: resource.id for resource in made.read().base.state().resources}
    down(made.read(), DownOptions())
    down(made.read(yes=False), DownOptions())
    assert "nothing is left to remove" in made.shown()
    up(made.open())
    after = {resource.address: resource.id for resource in made.read().base.state().resources}
    assert set(after) == set(before)
    assert after["terraform_data.fsx"] == before["terraform_data.fsx"]
    assert after["terraform_data.efs"] == before["terraform_data.efs"]
    assert after["terraform_data.cluster"] != before["terraform_data.cluster"]
    assert "aws: 4 created, 0 changed, 0 destroyed" in made.shown()


def test_delete_data_deletes_everything_even_after_a_down_that_kept_data(made: Any) -> None:
    down(made.read(), DownOptions())
    made.shown()
    down(made.read(), DownOptions(delete_data=True))
    shown = made.shown()
    assert "with all data in:" in shown
    assert "terraform_data.fsx" in shown
    assert addresses(made) == set()
    down(made.read(yes=False), DownOptions(delete_data=True))
    assert "nothing is left to remove" in made.shown()


def test_down_asks_for_the_name_of_the_cluster(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session = made.read(yes=False)
    before = addresses(made)
    monkeypatch.setattr(session.view, "_answer", lambda question: "flet")
    with pytest.raises(InfraError, match="nothing was removed"):
        down(session, DownOptions())
    assert addresses(made) == before
    monkeypatch.setattr(session.view, "_answer", lambda question: "fleet")
    down(session, DownOptions())
    assert addresses(made) < before


def test_what_the_cluster_created_outside_of_the_state_is_removed_first(made: Any, kube_api: Any) -> None:
    job = kube_api.add_at("/apis/kubeflow.org/v2beta1/namespaces/kubeflow/mpijobs/r50", lingers=1)
    notebook = kube_api.add_at("/apis/apps/v1/namespaces/kubeflow/deployments/nb", metadata=OURS)
    other = kube_api.add_at("/apis/apps/v1/namespaces/kube-system/deployments/coredns")
    public = kube_api.add_at("/api/v1/namespaces/kubeflow/services/nb", lingers=1, spec={"type": "LoadBalancer"})
    inner = kube_api.add_at("/api/v1/namespaces/kubeflow/services/r50", spec={"type": "ClusterIP"})
    claim = kube_api.add_at("/apis/karpenter.sh/v1/nodeclaims/gpu-x7", lingers=2)
    pool = kube_api.add_at("/apis/karpenter.sh/v1/nodepools/gpu", dependents=(claim,))
    down(made.read(), DownOptions())
    assert kube_api.deleted == [job, notebook, public, pool, claim]
    assert set(kube_api.objects) == {other, inner}
    shown = made.shown()
    assert "removing Service kubeflow/nb (load balancer)" in shown
    assert "waiting for" in shown
    assert "NodeClaim gpu-x7" in shown
    assert shown.index("NodeClaim gpu-x7") < shown.index("addons: 1 to destroy") < shown.index("aws: 4 to destroy")


def test_down_stops_at_the_wait_limit_and_keeps_the_cluster(made: Any, kube_api: Any) -> None:
    kube_api.add_at("/apis/karpenter.sh/v1/nodeclaims/stuck", lingers=10**6)
    before = addresses(made)
    with pytest.raises(InfraError, match=r"after 0 s the cluster still has NodeClaim stuck"):
        down(made.read(), DownOptions(wait_s=0.3))
    assert addresses(made) == before
    kube_api.lingering["/apis/karpenter.sh/v1/nodeclaims/stuck"] = 0
    down(made.read(), DownOptions())  # resumes
    assert addresses(made) < before


def test_ebs_volumes_of_claims_are_listed_or_deleted(made: Any, kube_api: Any) -> None:
    claim = "/api/v1/namespaces/kubeflow/persistentvolumeclaims/scratch"
    volume = kube_api.add_at(
        "/api/v1/persistentvolumes/pvc-1",
        spec={
            "csi": {"driver": "ebs.csi.aws.com", "volumeHandle": "vol-1"},
            "claimRef": {"namespace": "kubeflow", "name": "scratch"},
            "persistentVolumeReclaimPolicy": "Delete",
        },
    )
    kube_api.add_at(claim, dependents=(volume,))
    shared = {"csi": {"driver": "fsx.csi.aws.com", "volumeHandle": "fs-1"}, "persistentVolumeReclaimPolicy": "Retain"}
    kube_api.add_at("/api/v1/persistentvolumes/pv-fsx", spec=shared)
    session = made.read()
    down(session, DownOptions())
    shown = made.shown()
    assert "aws ec2 delete-volume --volume-id vol-1" in shown
    assert "fs-1" not in shown
    assert kube_api.deleted == []
    up(made.open())
    down(made.read(), DownOptions(delete_data=True))
    assert kube_api.deleted == [claim, volume]
    assert "EBS volumes" not in made.shown()


def test_an_unreachable_cluster_stops_down_unless_it_is_skipped(stage: Any) -> None:
    up(stage.open())  # nothing listens at its endpoint
    before = addresses(stage)
    with pytest.raises(InfraError, match="the cluster does not answer") as caught:
        down(stage.read(), DownOptions())
    assert "--skip-cluster" in caught.value.remedy
    assert addresses(stage) == before
    stage.shown()
    down(stage.read(), DownOptions(skip_cluster=True, delete_data=True))
    assert addresses(stage) == set()
    assert "may be left behind" in stage.shown()


def test_a_cluster_that_refuses_a_request_stops_down(made: Any, kube_api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = addresses(made)
    monkeypatch.setattr(kube_api, "forbidden", {"/apis/karpenter.sh"})
    with pytest.raises(InfraError, match="the cluster did not do what it was asked: the cluster refused") as caught:
        down(made.read(), DownOptions())
    assert "access entry" in caught.value.remedy
    assert addresses(made) == before


def test_resources_of_a_missing_cluster_are_forgotten_only_with_skip_cluster(made: Any) -> None:
    session = made.read()
    session.base.forget(["terraform_data.nodes", "terraform_data.fsx_policy", "terraform_data.cluster"])
    with pytest.raises(InfraError, match="addons has 1 resources of a cluster that aws lacks") as caught:
        down(session, DownOptions())
    assert "--skip-cluster" in caught.value.remedy
    down(session, DownOptions(skip_cluster=True))
    assert "terraform_data.storage" not in addresses(made)


def test_down_resumes_after_a_failed_destroy(made: Any, tmp_path: Path) -> None:
    root = made.workdir / "deploy/terraform/eks/aws/main.tf"
    gate = tmp_path / "gate"
    blocked = f"""
resource "terraform_data" "blocked" {{
  provisioner "local-exec" {{
    when    = destroy
    command = "test -e {gate}"
  }}
}}
"""
    root.write_text(root.read_text() + blocked)
    up(made.open())
    with pytest.raises(InfraError, match=r"terraform_data\.blocked"):
        down(made.read(), DownOptions())
    assert "terraform_data.blocked" in addresses(made)
    assert "terraform_data.storage" not in addresses(made)
    assert "down failed" in status(made.read()).roots[0].last
    gate.touch()
    down(made.read(), DownOptions())
    assert "terraform_data.blocked" not in addresses(made)


def test_down_connects_only_to_the_cluster_of_the_state(made: Any) -> None:
    down(made.read(), DownOptions())
    written = json.loads((made.workdir / "kubeconfig").read_text())
    assert written["current-context"] == "fleet"
    assert len(written["clusters"]) == 1
    asked = (made.argv_log.parent / "aws.log").read_text().splitlines()
    assert set(asked) == {"--region us-west-2 eks get-token --cluster-name fleet --output json"}
