"""The addons root: arguments, variables, and the values with which it would install our charts."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_charts import checkov_findings, karpenter_complaints, kubernetes_complaints, of_kind, rendered
from hcl_schema import check_root, read_root
from terraform_addons import chart_values, evaluated, provider_free_copy, root

from maskfleet.system.deploy_files import deploy_path
from tools import run_tool

SCHEMA = json.loads((Path(__file__).parent / "schemas" / "eks-addons.json").read_text(encoding="utf-8"))
# Default plugin folders; TF_PLUGIN_MIRROR names another one.
PROVIDERS = ("aws", "helm", "kubernetes")
PLUGIN_FOLDERS = ("/usr/share/terraform/plugins", "/usr/local/share/terraform/plugins", "~/.terraform.d/plugins")


@pytest.fixture(scope="session")
def provider_free(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return provider_free_copy(tmp_path_factory.mktemp("deploy"))


def test_the_addons_root_is_formatted() -> None:
    run_tool("terraform", "fmt", "-check", "-diff", "-recursive", root(), CHECKPOINT_DISABLE="1")


def test_arguments_references_and_variables_of_the_addons_root_are_right() -> None:
    assert check_root(root(), SCHEMA) == []


def planted(folder: Path, old: str, new: str) -> list[str]:
    """What the checker says after `old` became `new` somewhere in a copy of the root."""
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(root(), copy)
    changed = 0
    for file in copy.glob("*.tf"):
        text = file.read_text(encoding="utf-8")
        if old in text and not changed:
            file.write_text(text.replace(old, new, 1), encoding="utf-8")
            changed += 1
    assert changed, old
    return check_root(copy, SCHEMA)


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("skip_crds   = true", "skip_crd    = true", "skip_crd is not an argument"),
        ('chart            = "karpenter-crd"', "", "chart is missing"),
        ("timeout     = 600", 'timeout     = "long"', "timeout is a string, not a number"),
        ("atomic      = true", "atomic      = 3", "atomic is 3, not a boolean"),
        ("values      = [yamlencode(local.values.karpenter)]", 'values = "x"', "values is a string, not a list"),
        ("values      = [yamlencode(local.values.karpenter)]", "values = { a = 1 }", "values is an object, not a list"),
        ('"helm" {\n  kubernetes = {', '"helm" {\n  kubernetes {', "kubernetes is an argument, not a block"),
        ("  exec {", "  exec = {", "exec is a block, not an argument"),
        ("    exec                   = local.token", "    exek = local.token", "exek is not an argument"),
        ("    exec                   = local.token", "    exec = { command = 1 }", "api_version is missing"),
        ("    api_version = local.token.api_version", "", "api_version is missing"),
        ("  metadata {", "  meta {", "meta is not a block"),
        ('"helm_release" "kueue"', '"helm_chart" "kueue"', "helm_chart is not in the schema"),
        ("local.values.karpenter)", "local.valeus.karpenter)", "local.valeus is not declared"),
        ("var.karpenter_version", "var.karpenter_versions", "var.karpenter_versions is not declared"),
        ("[helm_release.karpenter]", "[helm_release.carpenter]", "helm_release.carpenter is not declared"),
        ("= var.node_volume_size\n", "= 200\n", "var.node_volume_size is not used"),
        ('description = "Id of the VPC, for the load-balancer controller."', "", "var.cluster_vpc has no description"),
    ],
)
def test_the_checker_finds_a_planted_error(old: str, new: str, fault: str, tmp_path: Path) -> None:
    assert any(fault in one for one in planted(tmp_path, old, new)), planted(tmp_path, old, new)


def mirror_of_providers() -> Path | None:
    """A folder that holds all providers of the root, laid out as Terraform wants a mirror."""
    for folder in filter(None, (os.environ.get("TF_PLUGIN_MIRROR"), *PLUGIN_FOLDERS)):
        mirror = Path(folder).expanduser()
        if all(list(mirror.glob(f"*/hashicorp/{name}/**/terraform-provider-{name}*")) for name in PROVIDERS):
            return mirror
    return None


def test_terraform_validates_the_addons_root_if_its_providers_are_installed(tmp_path: Path) -> None:
    mirror = mirror_of_providers()
    if mirror is None:
        pytest.skip(f"no folder of TF_PLUGIN_MIRROR, {', '.join(PLUGIN_FOLDERS)} has the providers {PROVIDERS}")
    config = tmp_path / "terraformrc"
    config.write_text(
        f'provider_installation {{\n  filesystem_mirror {{\n    path = "{mirror}"\n  }}\n}}\n', encoding="utf-8"
    )
    copy = shutil.copytree(root(), tmp_path / "terraform" / "eks" / "addons")
    (tmp_path / "helm").symlink_to(deploy_path("helm"))
    environment = {"CHECKPOINT_DISABLE": "1", "TF_CLI_CONFIG_FILE": str(config)}
    run_tool("terraform", "init", "-backend=false", "-no-color", cwd=copy, **environment)
    run_tool("terraform", "validate", "-no-color", cwd=copy, **environment)


def test_every_variable_that_names_an_output_of_the_aws_root_is_one() -> None:
    outputs = set(read_root(deploy_path("terraform", "eks", "aws")).outputs)
    from_aws = read_root_file("variables.tf")
    assert from_aws - outputs == {"profile"}


def read_root_file(name: str) -> set[str]:
    return set(re.findall(r'^variable "(\w+)"', (root() / name).read_text(encoding="utf-8"), re.MULTILINE))


def test_the_service_accounts_are_those_of_the_aws_root_by_default() -> None:
    ours, theirs = (read_root(deploy_path("terraform", "eks", name)).variables for name in ("addons", "aws"))
    for name in ("trainer_service_accounts", "staging_service_accounts"):
        assert ours[name]["default"] == theirs[name]["default"]


def test_every_variable_and_output_of_the_addons_root_is_in_its_doc() -> None:
    text = (Path(__file__).parents[3] / "docs" / "run-anywhere" / "eks" / "addons.md").read_text(encoding="utf-8")
    here = read_root(root())
    for name in (*here.variables, *here.outputs):
        assert f"`{name}`" in text, name


@pytest.mark.parametrize("chart", ["mpi-operator", "gpu-nodes", "queues"])
def test_every_value_of_the_cluster_charts_is_in_the_doc(chart: str) -> None:
    text = (Path(__file__).parents[3] / "docs" / "run-anywhere" / "eks" / "addons.md").read_text(encoding="utf-8")
    values = yaml.safe_load((deploy_path("helm", chart) / "values.yaml").read_text(encoding="utf-8"))
    for name, value in values.items():
        inner = (
            value
            if isinstance(value, dict) and name in ("image", "root_volume", "startup_taints", "general", "efa")
            else {}
        )
        for full in (f"{name}.{key}" for key in inner) if inner else (name,):
            assert f"`{full}`" in text, full


def test_no_token_or_password_of_the_cluster_is_in_the_root() -> None:
    text = "".join(file.read_text(encoding="utf-8") for file in root().glob("*.tf"))
    assert "aws_eks_cluster_auth" not in text
    for provider in (body for kind, _, _, body in read_root(root()).blocks if kind == "provider"):
        assert not {"token", "password", "client_key"} & set(provider)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("region", "us-west"),
        ("profile", "a b"),
        ("cluster_id", ""),
        ("cluster_version", "1.35.1"),
        ("cluster_endpoint", "http://example.com"),
        ("cluster_ca", "bm90IGEgY2VydGlmaWNhdGU="),
        ("cluster_vpc", "demo"),
        ("node_role_name", "arn:aws:iam::123456789012:role/demo"),
        ("karpenter_role_arn", "demo"),
        ("karpenter_queue", "https://sqs.us-west-2.amazonaws.com/1/demo"),
        ("karpenter_namespace", "Kube"),
        ("autoscaler_role_arn", "demo"),
        ("load_balancer_role_arn", "demo"),
        ("kubeflow_namespace", "kube-system"),
        ("trainer_role_arn", "demo"),
        ("trainer_service_accounts", ["*"]),
        ("staging_role_arn", "demo"),
        ("staging_service_accounts", ["a b"]),
        ("efs_id", "efs-1"),
        ("efs_access_point_id", "ap-1"),
        ("fsx_id", "fs-x"),
        ("fsx_dns", "no dots"),
        ("fsx_mount_name", "ninechars"),
        ("efa_az", "us-west-2"),
        ("karpenter_version", "v0.33.2"),
        ("karpenter_capacity_type", "SPOT"),
        ("karpenter_consolidate_after", "soon"),
        ("gpu_ami_alias", "al2@latest"),
        ("gpu_limit", 1.5),
        ("node_volume_size", 8),
        ("node_volume_iops", 100),
        ("node_volume_throughput", 5000),
        ("node_instance_store", "RAID1"),
        ("node_expire_after", "soon"),
        ("node_max_pods", 3),
        ("placement_group", "a\nb"),
        ("gpu_instances", ["big"]),
        ("efa_instances", ["p5"]),
        ("capacity_reservations", ["mine"]),
        ("node_tags", {"aws:x": "y"}),
        ("nvidia_plugin_version", "v0.14.3"),
        ("efa_plugin_version", "0.5.29"),
        ("autoscaler_version", "latest"),
        ("load_balancer_controller_version", "latest"),
        ("metrics_server_version", "latest"),
        ("dcgm_exporter_version", "latest"),
        ("kueue_version", "latest"),
        ("kueue_queue", "A queue"),
        ("kueue_cluster_queue", "A queue"),
        ("kueue_ready_timeout", "soon"),
        ("existing_parts", ["vpc"]),
        ("system_node_selector", {"a": "b c"}),
        ("node_subnet_tags", {"a": ""}),
        ("node_security_group_tags", {"": "a"}),
        ("mpi_operator_image", "repo:tag:"),
        ("mpi_operator_version", "0.4.0"),
        ("mpi_operator_digest", "sha256:1"),
        ("mpi_operator_all_namespaces", "perhaps"),
    ],
)
def test_a_bad_variable_of_the_addons_root_is_rejected_by_name(provider_free: Path, variable: str, value: Any) -> None:
    code, message = evaluated(provider_free, **{variable: value})
    assert code != 0
    assert variable in message


def test_karpenter_accepts_the_pools_that_the_root_installs(provider_free: Path) -> None:
    values = chart_values(provider_free)["gpu_nodes"]
    manifests = rendered("gpu-nodes", values=values, release="gpu", namespace="kube-system")
    assert karpenter_complaints(manifests) == []
    assert {one["metadata"]["name"] for one in of_kind(manifests, "NodePool")} == {"gpu", "gpu-efa"}
    assert {one["spec"]["role"] for one in of_kind(manifests, "EC2NodeClass")} == {"demo-gpu-node"}
    chosen = chart_values(
        provider_free,
        karpenter_capacity_type="spot",
        karpenter_consolidate_after="30m",
        gpu_ami_alias="al2023@v20260101",
        gpu_limit=8,
        node_volume_size=300,
        gpu_instances=["g5.xlarge"],
        efa_instances=["p5.48xlarge"],
        capacity_reservations=["cr-0123"],
        reserved_only=True,
        node_tags={"team": "vision"},
        node_volume_iops=16000,
        node_volume_throughput=1000,
        node_instance_store="RAID0",
        node_expire_after="721h",
        node_max_pods=58,
        placement_group="fleet-efa",
        efs_id="",
    )["gpu_nodes"]
    manifests = rendered("gpu-nodes", values=chosen, release="gpu", namespace="kube-system")
    assert karpenter_complaints(manifests) == []
    text = yaml.safe_dump_all(manifests)
    words = "spot 30m v20260101 300Gi g5.xlarge p5.48xlarge cr-0123 vision reserved 16000 1000 RAID0 721h fleet-efa"
    for expected in (*words.split(), "maxPods: 58"):
        assert expected in text, expected
    assert "efs.csi.aws.com" not in text


def test_a_changed_file_of_a_chart_changes_the_values_of_its_release(provider_free: Path) -> None:
    # The Helm provider sees no other change of a local chart (terraform-provider-helm issue 515).
    charts = provider_free.parents[2] / "helm"
    names = {"gpu-nodes": "gpu_nodes", "mpi-operator": "mpi_operator", "queues": "queues", "storage": "storage"}
    before = chart_values(provider_free)
    ours = charts.resolve()
    charts.unlink()
    shutil.copytree(ours, charts)
    try:
        assert chart_values(provider_free) == before
        for chart in names:
            notes = charts / chart / "templates" / "NOTES.txt"
            notes.write_text(notes.read_text(encoding="utf-8") + "more\n", encoding="utf-8")
        after = chart_values(provider_free)
    finally:
        shutil.rmtree(charts)
        charts.symlink_to(ours)
    for name in names.values():
        assert len(before[name]["global"]["chart_sha256"]) == 64
        assert before[name]["global"] != after[name]["global"]
    text = (root() / "releases.tf").read_text(encoding="utf-8")
    assert set(re.findall(r'"\$\{local\.charts\}/([\w-]+)"', text)) == set(names)


def test_every_set_of_values_goes_to_a_release(provider_free: Path) -> None:
    text = (root() / "releases.tf").read_text(encoding="utf-8")
    assert set(re.findall(r"local\.values\.(\w+)", text)) == set(chart_values(provider_free))


def test_without_a_zone_for_efa_the_root_makes_one_pool(provider_free: Path) -> None:
    values = chart_values(provider_free, efa_az="")["gpu_nodes"]
    (pool,) = of_kind(rendered("gpu-nodes", values=values, release="gpu"), "NodePool")
    assert pool["metadata"]["name"] == "gpu"


def test_the_operator_that_the_root_installs_watches_one_namespace(provider_free: Path, tmp_path: Path) -> None:
    values = chart_values(provider_free, kubeflow_namespace="training")["mpi_operator"]
    manifests = rendered("mpi-operator", values=values, release="mpi-operator", namespace="training")
    assert kubernetes_complaints(manifests, tmp_path / "objects") == []
    (deployment,) = of_kind(manifests, "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert "--namespace=training" in container["args"]
    assert container["image"] == "docker.io/mpioperator/mpi-operator:0.8.2"
    digest = "sha256:" + "0" * 64
    chosen = chart_values(
        provider_free, mpi_operator_all_namespaces=True, mpi_operator_image="mirror/mpi", mpi_operator_digest=digest
    )["mpi_operator"]
    (deployment,) = of_kind(rendered("mpi-operator", values=chosen), "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"mirror/mpi@{digest}"
    assert not [one for one in container["args"] if one.startswith("--namespace")]


def test_the_storage_that_the_root_installs_has_the_names_of_aws_samples(provider_free: Path) -> None:
    if not (deploy_path("helm") / "storage" / "Chart.yaml").exists():
        pytest.skip("deploy/helm/storage is not here")
    manifests = rendered("storage", values=chart_values(provider_free)["storage"], release="storage")
    claims = of_kind(manifests, "PersistentVolumeClaim")
    ours = [one for one in claims if one["metadata"]["namespace"] == "kubeflow"]
    assert {one["metadata"]["name"] for one in ours} == {"pv-efs", "pv-fsx"}
    (job,) = of_kind(manifests, "Job")
    assert job["spec"]["template"]["spec"]["nodeSelector"] == {"maskfleet/node": "system"}
    only_fsx = chart_values(provider_free, efs_id="", efs_access_point_id="")["storage"]
    claims = of_kind(rendered("storage", values=only_fsx, release="storage"), "PersistentVolumeClaim")
    ours = [one for one in claims if one["metadata"]["namespace"] == "kubeflow"]
    assert {one["metadata"]["name"] for one in ours} == {"pv-fsx"}


def test_roles_go_to_the_service_accounts_that_the_aws_root_trusts(provider_free: Path) -> None:
    values = chart_values(provider_free, load_balancer_role_arn="arn:aws:iam::123456789012:role/demo-lb")
    trust = (deploy_path("terraform", "eks", "aws", "policies") / "trust.tf").read_text(encoding="utf-8")
    accounts = {
        "karpenter": values["karpenter"]["serviceAccount"],
        "cluster-autoscaler": values["cluster_autoscaler"]["rbac"]["serviceAccount"],
        "aws-load-balancer-controller": values["load_balancer_controller"]["serviceAccount"],
    }
    for name, account in accounts.items():
        assert account["name"] == name
        assert f':{name}"' in trust
        assert account["annotations"]["eks.amazonaws.com/role-arn"].startswith("arn:aws:iam::123456789012:role/demo-")


def test_both_device_plugins_tolerate_the_taints_of_our_nodes(provider_free: Path) -> None:
    values = chart_values(provider_free)
    (pool, efa) = of_kind(rendered("gpu-nodes", values=values["gpu_nodes"], release="gpu"), "NodePool")
    (taint,) = pool["spec"]["template"]["spec"]["taints"]
    for plugin in ("nvidia_device_plugin", "efa_device_plugin"):
        (toleration,) = values[plugin]["tolerations"]
        assert (toleration["key"], toleration["operator"], toleration["effect"]) == (
            taint["key"],
            "Exists",
            taint["effect"],
        )
    labels = pool["spec"]["template"]["metadata"]["labels"]
    assert values["nvidia_device_plugin"]["nodeSelector"].items() <= labels.items()
    types = next(
        one["values"]
        for one in efa["spec"]["template"]["spec"]["requirements"]
        if one["key"] == "node.kubernetes.io/instance-type"
    )
    assert values["efa_device_plugin"]["supportedInstanceLabels"]["values"] == types


def test_the_namespace_of_jobs_enforces_restricted_pod_security() -> None:
    (namespace,) = [body for _, kind, _, body in read_root(root()).blocks if kind == "kubernetes_namespace_v1"]
    labels = {key.strip('"'): value for key, value in namespace["metadata"][0]["labels"].items()}
    assert labels["pod-security.kubernetes.io/enforce"] == '"restricted"'


def test_the_pools_outlive_neither_karpenter_nor_its_crds() -> None:
    releases = {name: body for _, kind, name, body in read_root(root()).blocks if kind == "helm_release"}
    assert releases["gpu_nodes"]["depends_on"] == ["${helm_release.karpenter}"]
    assert releases["karpenter"]["depends_on"] == ["${helm_release.karpenter_crd}"]


def test_every_remote_chart_has_a_version_of_its_own() -> None:
    for _, kind, name, body in read_root(root()).blocks:
        if kind == "helm_release" and "repository" in body:
            assert body["version"].startswith("${var."), name


@pytest.mark.slow
def test_checkov_finds_nothing_in_the_addons_root() -> None:
    assert checkov_findings(root(), "terraform", skips=()) == []
