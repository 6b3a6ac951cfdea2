"""The storage chart: claims for file systems that exist. checkov checks it together with the stage-data chart."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_charts import checkov_findings, kubernetes_complaints, lint, of_kind, refusal, rendered, written

from maskfleet.config.launch import EksLaunch
from maskfleet.system.kube.fake import FakeKube

EFS = {"enabled": True, "file_system_id": "fs-0123456789abcdef0"}
FSX = {
    "enabled": True,
    "file_system_id": "fs-0123456789abcdef1",
    "dns_name": "fs-0123456789abcdef1.fsx.us-east-1.amazonaws.com",
    "mount_name": "abcdefgh",
}
GP3 = {"enabled": True}
ALL = {"efs": EFS, "fsx": FSX, "gp3": GP3}


def combinations() -> list[dict[str, Any]]:
    """All combinations of the parts, each absent or in one of its documented forms."""
    efs = [None, EFS, {**EFS, "access_point_id": "fsap-0123456789abcdef0", "claim": "data"}]
    fsx = [None, FSX, {**FSX, "capacity": "9600Gi"}]
    key = "arn:aws:kms:us-east-1:123456789012:key/0d5c1a2e-0000-4000-8000-000000000000"
    gp3 = [None, GP3, {**GP3, "default": True, "name": "scratch", "kms_key_arn": key}]
    parts = [dict(zip(("efs", "fsx", "gp3"), choice, strict=True)) for choice in itertools.product(efs, fsx, gp3)]
    chosen = [{name: part for name, part in one.items() if part is not None} for one in parts]
    return [one for one in chosen if one]


def test_every_combination_renders_valid_objects(tmp_path: Path) -> None:
    everything: dict[str, Any] = {}
    for values in combinations():
        manifests = rendered("storage", values=values)
        claims = len([name for name in ("efs", "fsx") if name in values])
        assert len(of_kind(manifests, "PersistentVolume")) == claims
        assert len(of_kind(manifests, "PersistentVolumeClaim")) == claims
        assert len(of_kind(manifests, "StorageClass")) == ("gp3" in values)
        everything |= {json.dumps(one): one for one in manifests}
    assert len(combinations()) == 26
    assert kubernetes_complaints(everything.values(), tmp_path / "all") == []


def test_helm_lint_passes(tmp_path: Path) -> None:
    assert "0 chart(s) failed" in lint("storage", ALL, tmp_path)


def test_volume_and_claim_are_bound_to_each_other_and_outlive_the_release() -> None:
    manifests = rendered("storage", values=ALL, release="one", namespace="team-a")
    volumes, claims = of_kind(manifests, "PersistentVolume"), of_kind(manifests, "PersistentVolumeClaim")
    for volume, claim in zip(volumes, claims, strict=True):
        assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
        reference = volume["spec"]["claimRef"]
        assert (reference["namespace"], reference["name"]) == ("team-a", claim["metadata"]["name"])
        assert volume["spec"]["storageClassName"] == claim["spec"]["storageClassName"] == ""
        assert volume["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
        assert volume["spec"]["accessModes"] == claim["spec"]["accessModes"] == ["ReadWriteMany"]
        assert volume["spec"]["capacity"]["storage"] == claim["spec"]["resources"]["requests"]["storage"]
        for one in (volume, claim):
            assert one["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert [claim["metadata"]["name"] for claim in claims] == ["pv-efs", "pv-fsx"]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKube]:
    """An API with as much as helm asks before it renders."""
    with FakeKube(tmp_path) as api:
        api.objects["/api"] = {"kind": "APIVersions", "versions": ["v1"]}
        api.objects["/apis"] = {"kind": "APIGroupList", "apiVersion": "v1", "groups": []}
        kind = {"name": "persistentvolumes", "namespaced": False, "kind": "PersistentVolume", "verbs": ["get"]}
        api.objects["/api/v1"] = {"kind": "APIResourceList", "groupVersion": "v1", "resources": [kind]}
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig))
        yield api


@pytest.mark.parametrize(("phase", "is_freed"), [("Released", True), ("Bound", False), ("Available", False)])
def test_a_volume_whose_claim_was_deleted_can_be_claimed_again(phase: str, is_freed: bool, cluster: FakeKube) -> None:
    # With the uid of the deleted claim it would stay Released, and the new claim Pending.
    reference = {"kind": "PersistentVolumeClaim", "namespace": "kubeflow", "name": "pv-efs", "uid": "5f0c-old"}
    cluster.objects["/api/v1/persistentvolumes/kubeflow-storage-efs"] = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "kubeflow-storage-efs"},
        "spec": {"claimRef": reference},
        "status": {"phase": phase},
    }
    volumes = of_kind(rendered("storage", values=ALL, release="storage", is_live=True), "PersistentVolume")
    hooks = [one for one in volumes if "helm.sh/hook" in one["metadata"]["annotations"]]
    assert [one["metadata"]["name"] for one in hooks] == (["kubeflow-storage-efs"] if is_freed else [])
    efs, fsx = (one for one in volumes if one not in hooks)
    for hook in hooks:  # helm deletes the old volume and waits for that, then makes this one
        assert hook["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
        assert hook["metadata"]["annotations"]["helm.sh/hook-delete-policy"] == "before-hook-creation"
        assert hook["spec"] == efs["spec"]
    # A uid in the manifest would unbind the volume at the next upgrade or rollback.
    assert not any("uid" in one["spec"]["claimRef"] for one in volumes)
    assert efs["metadata"]["annotations"] == fsx["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_releases_and_namespaces_share_no_volume() -> None:
    names = set()
    for release, namespace in itertools.product(("one", "two"), ("team-a", "team-b")):
        manifests = rendered("storage", values=ALL, release=release, namespace=namespace)
        names |= {volume["metadata"]["name"] for volume in of_kind(manifests, "PersistentVolume")}
    assert len(names) == 8


def test_efs_is_encrypted_in_transit_and_lustre_locks_hold_on_all_nodes() -> None:
    efs, fsx = of_kind(rendered("storage", values=ALL), "PersistentVolume")
    assert efs["spec"]["csi"] == {
        "driver": "efs.csi.aws.com",
        "volumeHandle": "fs-0123456789abcdef0",
        "volumeAttributes": {"encryptInTransit": "true"},
    }
    assert "mountOptions" not in efs["spec"]  # the driver calls `tls` among them deprecated
    assert fsx["spec"]["csi"] == {
        "driver": "fsx.csi.aws.com",
        "volumeHandle": "fs-0123456789abcdef1",
        "volumeAttributes": {"dnsname": FSX["dns_name"], "mountname": "abcdefgh"},
    }
    assert fsx["spec"]["mountOptions"] == ["noatime", "flock"]


def test_an_access_point_is_part_of_the_handle() -> None:
    values = {"efs": {**EFS, "access_point_id": "fsap-0123456789abcdef0"}}
    [volume] = of_kind(rendered("storage", values=values), "PersistentVolume")
    assert volume["spec"]["csi"]["volumeHandle"] == "fs-0123456789abcdef0::fsap-0123456789abcdef0"


def test_the_storage_class_waits_for_a_pod_and_is_not_the_default() -> None:
    [gp3] = of_kind(rendered("storage", values={"gp3": GP3}), "StorageClass")
    assert gp3["volumeBindingMode"] == "WaitForFirstConsumer"
    assert gp3["metadata"]["annotations"] == {"storageclass.kubernetes.io/is-default-class": "false"}
    assert gp3["parameters"] == {"type": "gp3", "encrypted": "true", "csi.storage.k8s.io/fstype": "ext4"}


def prepared(**more: Any) -> dict[str, Any]:
    return {"fsx": {**FSX, "prepare": {"enabled": True, **more}}}


def test_a_job_gives_the_folders_of_a_new_lustre_to_the_user_of_our_pods(tmp_path: Path) -> None:
    manifests = rendered("storage", values=prepared(), release="storage")
    assert kubernetes_complaints(manifests, tmp_path) == []
    [job] = of_kind(manifests, "Job")
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["install", "--directory", "--owner=1000", "--group=1000", "--mode=0775"]
    # Where launches write runs and look for data (launch.log_dir, launch.data_dir).
    launch = EksLaunch()
    assert container["args"] == [f"/fsx/{launch.log_dir}", f"/fsx/{launch.data_dir.split('/')[0]}"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]}
    [volume] = job["spec"]["template"]["spec"]["volumes"]
    name = volume["persistentVolumeClaim"]["claimName"]
    [claim] = [one for one in of_kind(manifests, "PersistentVolumeClaim") if one["metadata"]["name"] == name]
    [source] = [one for one in of_kind(manifests, "PersistentVolume") if one["metadata"]["name"] == name]
    # Root is not admitted where jobs run.
    assert claim["metadata"]["namespace"] == job["metadata"]["namespace"] == "kube-system"
    assert source["spec"]["csi"]["volumeHandle"] == FSX["file_system_id"]
    assert source["spec"]["persistentVolumeReclaimPolicy"] == "Retain"


@pytest.mark.slow
def test_checkov_finds_only_what_the_job_needs_root_for(tmp_path: Path) -> None:
    skips = (
        "CKV_K8S_23",  # only root may give folders away
        "CKV_K8S_40",  # the same
        "CKV_K8S_25",  # CHOWN and FOWNER, and nothing else
        "CKV_K8S_43",  # the default image has a tag: its digest could not be looked up here
        "CKV2_K8S_6",  # it is in a namespace of the cluster, whose traffic is not ours to limit
    )
    manifests = rendered("storage", values=prepared(), release="storage")
    assert checkov_findings(written(manifests, tmp_path / "job.yaml"), "kubernetes", skips) == []


def test_other_folders_make_another_job_and_none_is_made_unless_asked() -> None:
    first, second = (
        of_kind(rendered("storage", values=prepared(folders=folders)), "Job")[0]["metadata"]["name"]
        for folders in (["logs"], ["logs", "more"])
    )
    assert first != second
    assert of_kind(rendered("storage", values={"fsx": FSX}), "Job") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_the_jobs_command_creates_the_folders_and_may_run_again(tmp_path: Path) -> None:
    [job] = of_kind(rendered("storage", values=prepared(folders=["logs", "data/coco2017"])), "Job")
    [container] = job["spec"]["template"]["spec"]["containers"]
    (tmp_path / "fsx" / "logs").mkdir(parents=True)
    for _ in range(2):
        folders = [str(tmp_path / one.lstrip("/")) for one in container["args"]]
        subprocess.run([*container["command"], *folders], check=True)
        for folder in map(Path, folders):
            assert (folder.stat().st_uid, folder.stat().st_gid, folder.stat().st_mode & 0o777) == (1000, 1000, 0o775)


def test_names_that_look_like_numbers_stay_strings() -> None:
    values = {"efs": {**EFS, "claim": "123"}, "gp3": {**GP3, "name": "456"}}
    for one in rendered("storage", values=values, release="7", namespace="42"):
        assert one["metadata"]["labels"]["app.kubernetes.io/instance"] == "7"
        assert isinstance(one["metadata"]["name"], str)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({}, "efs.enabled"),
        ({"efs": {"enabled": True}}, "efs.file_system_id"),
        ({"efs": {**EFS, "file_system_id": "fs-1 }}{{ fail"}}, "efs.file_system_id"),
        ({"efs": {**EFS, "file_system_id": "fs-0123456789abcdef0\nhostPath: /"}}, "efs.file_system_id"),
        ({"efs": {**EFS, "access_point_id": "fs-0123456789abcdef0"}}, "efs.access_point_id"),
        ({"efs": {**EFS, "claim": "x" * 64}}, "efs.claim"),
        ({"efs": {**EFS, "claim": 'a"b'}}, "efs.claim"),
        ({"efs": {**EFS, "capacity": 5}}, "efs.capacity"),
        ({"efs": {**EFS, "capacity": "lots"}}, "efs.capacity"),
        ({"efs": {**EFS, "enabled": "yes"}}, "efs.enabled"),
        ({"efs": {**EFS, "tls": False}}, "tls"),
        ({"fsx": {**FSX, "dns_name": ""}}, "fsx.dns_name"),
        ({"fsx": {**FSX, "dns_name": "a@tcp:/x"}}, "fsx.dns_name"),
        ({"fsx": {**FSX, "mount_name": ""}}, "fsx.mount_name"),
        ({"fsx": {**FSX, "mount_name": "../etc"}}, "fsx.mount_name"),
        ({"efs": EFS, "fsx": {**FSX, "claim": "pv-efs"}}, "fsx.claim"),
        (prepared(folders=["../etc"]), "folders"),
        (prepared(folders=[]), "folders"),
        (prepared(image=""), "image"),
        ({"gp3": {**GP3, "kms_key_arn": "alias/x"}}, "gp3.kms_key_arn"),
        ({"gp3": {**GP3, "name": "Under_Score"}}, "gp3.name"),
        ({"bogus": 1, "efs": EFS}, "bogus"),
    ],
)
def test_a_bad_value_is_rejected_by_name(values: dict[str, Any], field: str) -> None:
    assert field in refusal("storage", values=values)


def test_a_release_name_that_is_too_long_is_rejected_by_name() -> None:
    assert "release name" in refusal("storage", values=ALL, release="a" * 41)
