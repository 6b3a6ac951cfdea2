"""The stage-data chart: a Job that runs `maskfleet data stage`."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_charts import checkov_findings, kubernetes_complaints, lint, of_kind, refusal, rendered, written

from maskfleet.system.deploy_files import deploy_path
from pairwise import pairwise

boto3 = pytest.importorskip("boto3", reason="boto3 is not here: pip install 'maskfleet[aws]'")

from tools import moto_server  # noqa: E402

IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/maskfleet-train:0.1.0@sha256:" + "ab" * 32
NEEDED = {"image": IMAGE, "s3_bucket": "my-bucket"}
FSX_NAME = {"dns_name": "fs-0123456789abcdef1.fsx.us-east-1.amazonaws.com", "mount_name": "abcdefgh"}
STORAGE = {
    "efs": {"enabled": True, "file_system_id": "fs-0123456789abcdef0"},
    "fsx": {"enabled": True, "file_system_id": "fs-0123456789abcdef1", **FSX_NAME},
    "gp3": {"enabled": True},
}
SKIPS = (
    "CKV_K8S_40",  # the image's user is 1000, who owns what training writes; a higher number would lock it out
)


def job(values: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    [found] = of_kind(rendered("stage-data", values={**NEEDED, **(values or {})}, **options), "Job")
    return found


def pod(values: dict[str, Any] | None = None) -> dict[str, Any]:
    spec: dict[str, Any] = job(values)["spec"]["template"]["spec"]
    return spec


def arguments(values: dict[str, Any] | None = None) -> list[str]:
    """Arguments of the process, after Kubernetes has replaced $$ with $."""
    [container] = pod(values)["containers"]
    assert container["command"] == ["python"]
    return [one.replace("$$", "$") for one in container["args"]]


def combinations() -> list[dict[str, Any]]:
    """Values in which every two choices occur together."""
    accounts = [{}, {"service_account": ""}]
    accounts += [{"service_account": "", "role_arn": "arn:aws:iam::123456789012:role/eks/staging"}]
    volumes = [{}, {"shared_fs": "fsx"}, {"shared_pvc": "mine", "stage_dir": "/efs/x", "region": "eu-central-1"}]
    times = [{}, {"ttl_s": None, "max_run_s": 3600, "backoff_limit": 0}, {"check": True, "workers": 64}]
    nodes = [
        {},
        {
            "cpu": 0.5,
            "memory": "512Mi",
            "node_selector": {"maskfleet/node": "system"},
            "tolerations": [{"key": "x", "operator": "Exists", "effect": "NoSchedule"}],
            "image_pull_secrets": ["registry"],
            "image_pull_policy": "Always",
        },
    ]
    return [dict(itertools.chain(*map(dict.items, one))) for one in pairwise(accounts, volumes, times, nodes)]


def test_every_two_choices_together_render_valid_objects(tmp_path: Path) -> None:
    everything: dict[str, Any] = {}
    for values in combinations():
        manifests = rendered("stage-data", values={**NEEDED, **values})
        assert len(of_kind(manifests, "ServiceAccount")) == ("service_account" in values)
        everything |= {json.dumps(one): one for one in manifests}
    assert kubernetes_complaints(everything.values(), tmp_path / "all") == []


def test_helm_lint_passes(tmp_path: Path) -> None:
    assert "0 chart(s) failed" in lint("stage-data", NEEDED, tmp_path)


@pytest.mark.slow
def test_checkov_finds_nothing_but_skips_with_a_reason_in_this_and_the_storage_chart(tmp_path: Path) -> None:
    manifests = rendered("stage-data", values={**NEEDED, "service_account": ""})
    manifests += rendered("storage", values=STORAGE)
    assert checkov_findings(written(manifests, tmp_path / "charts.yaml"), "kubernetes", SKIPS) == []


def test_the_pod_is_restricted_and_writes_only_to_volumes() -> None:
    spec = pod()
    [container] = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/efs", "/tmp"}
    assert [sorted(volume)[0] for volume in spec["volumes"]] == ["name", "emptyDir"]
    assert not any("hostPath" in volume for volume in spec["volumes"])


def test_the_command_is_a_list_without_a_shell() -> None:
    assert arguments() == [
        "-m",
        "maskfleet",
        "data",
        "stage",
        "s3://my-bucket/ml-platform/data/coco2017",
        "/efs/data/coco2017",
        "--workers",
        "16",
    ]
    assert arguments({"check": True})[-1] == "--check"


@pytest.mark.parametrize(
    "prefix", ["a b", "quo'te\"", "$(HOME)/$$x", "{{ .Values.image }}", "図/ü", "a;b|c&d", "--check", "", "a/"]
)
def test_any_prefix_arrives_as_it_is(prefix: str) -> None:
    source = arguments({"s3_prefix": prefix})[4]
    assert source == f"s3://my-bucket/{prefix}".rstrip("/")


def test_a_dollar_sign_is_doubled_so_that_kubernetes_replaces_nothing() -> None:
    [container] = pod({"s3_prefix": "$(HOME)"})["containers"]
    assert container["args"][4] == "s3://my-bucket/$$(HOME)"


def test_the_claim_and_the_folder_follow_the_file_system() -> None:
    assert arguments({"shared_fs": "fsx"})[5] == "/fsx/data/coco2017"
    assert pod({"shared_fs": "fsx"})["volumes"][0]["persistentVolumeClaim"] == {"claimName": "pv-fsx"}
    assert arguments({"stage_dir": "/efs/data/mine"})[5] == "/efs/data/mine"  # like STAGE_DIR of AWS Samples


def test_other_values_make_another_job_and_the_same_values_the_same() -> None:
    assert job()["metadata"]["name"] == job()["metadata"]["name"]
    assert job()["metadata"]["name"] != job({"workers": 8})["metadata"]["name"]
    assert len(job(release="a" * 40)["metadata"]["name"]) <= 57  # leaves 6 characters for the suffix of the pod


def test_a_lost_node_does_not_count_as_a_failed_attempt() -> None:
    spec = job()["spec"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # or the policy would not be allowed
    [rule] = spec["podFailurePolicy"]["rules"]
    assert rule == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def test_the_account_is_the_clusters_or_the_releases_own() -> None:
    assert pod()["serviceAccountName"] == "maskfleet-staging"
    role = "arn:aws:iam::123456789012:role/staging"
    manifests = rendered("stage-data", values={**NEEDED, "service_account": "", "role_arn": role}, release="coco")
    [account] = of_kind(manifests, "ServiceAccount")
    assert account["metadata"]["name"] == "coco"
    assert account["metadata"]["annotations"] == {"eks.amazonaws.com/role-arn": role}


def test_names_that_look_like_numbers_stay_strings() -> None:
    for one in rendered("stage-data", values={**NEEDED, "service_account": ""}, release="1e3", namespace="42"):
        assert one["metadata"]["labels"]["app.kubernetes.io/instance"] == "1e3"
        assert one["metadata"]["namespace"] == "42"


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"image": ""}, "image"),
        ({"image": "a b"}, "image"),
        ({"image": 'x"\ncommand: [sh]'}, "image"),
        ({"s3_bucket": ""}, "s3_bucket: the bucket of the data set is required"),
        ({"preload": True, "check": True}, "preload and check: set one of them"),
        ({"s3_bucket": "s3://x"}, "s3_bucket"),
        ({"s3_bucket": "Upper"}, "s3_bucket"),
        ({"s3_prefix": "/abs"}, "s3_prefix"),
        ({"s3_prefix": "a\nb"}, "s3_prefix"),
        ({"shared_fs": "ebs"}, "shared_fs"),
        ({"shared_pvc": "Pv"}, "shared_pvc"),
        ({"stage_dir": "../x"}, "stage_dir"),
        ({"stage_dir": "/efs/../etc"}, "stage_dir"),
        ({"stage_dir": "/fsx/data"}, "stage_dir"),
        ({"stage_dir": ""}, "stage_dir"),
        ({"workers": 0}, "workers"),
        ({"workers": "16"}, "workers"),
        ({"backoff_limit": -1}, "backoff_limit"),
        ({"ttl_s": "1d"}, "ttl_s"),
        ({"memory": "2 GB"}, "memory"),
        ({"cpu": "$(x)"}, "cpu"),
        ({"service_account": "x" * 254}, "service_account"),
        ({"role_arn": "arn:aws:iam::123456789012:role/x"}, "role_arn"),
        ({"role_arn": "x", "service_account": ""}, "role_arn"),
        ({"region": "mars"}, "region"),
        ({"tolerations": [{"keys": "x"}]}, "tolerations"),
        ({"node_selector": {"a": 1}}, "node_selector"),
        ({"bogus": 1}, "bogus"),
    ],
)
def test_a_bad_value_is_rejected_by_name(values: dict[str, Any], field: str) -> None:
    assert field in refusal("stage-data", values={**NEEDED, **values})


@pytest.mark.parametrize("name", ["a" * 41, "a.b"])
def test_a_bad_release_name_is_rejected_by_name(name: str) -> None:
    assert "release name" in refusal("stage-data", values=NEEDED, release=name)


def test_every_value_is_in_the_schema_with_a_description() -> None:
    values = yaml.safe_load((deploy_path("helm", "stage-data") / "values.yaml").read_text(encoding="utf-8"))
    schema = json.loads((deploy_path("helm", "stage-data") / "values.schema.json").read_text(encoding="utf-8"))
    assert set(schema["properties"]) - {"global"} == set(values)
    assert all(one.get("description") for one in schema["properties"].values())


def test_the_jobs_command_really_stages(tmp_path: Path) -> None:
    words = arguments({"s3_prefix": "a b/$(x)", "workers": 2})
    words[5] = words[5].replace("/efs/", f"{tmp_path}/efs/")
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1", "HOME": "/tmp"}
    with moto_server(tmp_path / "log") as url:
        s3 = boto3.session.Session("test", "test", region_name="us-east-1").client("s3", endpoint_url=url)
        s3.create_bucket(Bucket="my-bucket")
        s3.put_object(Bucket="my-bucket", Key="a b/$(x)/train2017/1.jpg", Body=b"jpeg")
        s3.close()
        environment = {**keys, "AWS_ENDPOINT_URL": url, "PATH": "/usr/bin:/bin"}
        done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "efs/data/coco2017/train2017/1.jpg").read_bytes() == b"jpeg"
    assert "train2017/1.jpg" in (tmp_path / "efs/data/coco2017/manifest.jsonl").read_text()


def test_preload_loads_the_same_folder_and_needs_no_bucket() -> None:
    [found] = of_kind(rendered("stage-data", values={"image": IMAGE, "shared_fs": "fsx", "preload": True}), "Job")
    [container] = found["spec"]["template"]["spec"]["containers"]
    folder = "/fsx/data/coco2017"
    assert container["args"] == ["-m", "maskfleet", "data", "preload", folder, "--workers", "16"]
    assert arguments({"shared_fs": "fsx"})[-3] == folder
