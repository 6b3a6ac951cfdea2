"""The AWS root as files: arguments, variables, outputs, docs; needs neither a provider nor an account."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from cluster_charts import checkov_findings
from hcl_schema import check_root, read_root
from terraform_aws import ROOT

from tools import run_tool

HERE = Path(__file__).parent
SCHEMA = json.loads((HERE / "schemas" / "eks-aws.json").read_text(encoding="utf-8"))
DOC = HERE.parents[2] / "docs" / "run-anywhere" / "eks" / "terraform.md"
OUTPUTS = (
    "cluster_vpc cluster_subnets cluster_id cluster_version cluster_endpoint cluster_ca cluster_oidc_arn node_role_arn "
    "node_security_group node_role_name efs_id efs_dns fsx_id fsx_dns fsx_mount_name fsx_subnet_az karpenter_queue "
    "karpenter_role_arn karpenter_namespace efa_az staging_role_arn trainer_role_arn autoscaler_role_arn "
    "load_balancer_role_arn region kubeflow_namespace data_bucket"
)
# The 47 variables of the stack that this one follows.
SEED_VARIABLES = (
    "credentials profile region cluster_name azs neuron_az k8s_version cidr_vpc cidr_private cidr_public "
    "efs_performance_mode efs_throughput_mode import_path key_pair node_volume_size node_group_desired node_group_max "
    "node_group_min capacity_type system_capacity_type system_instances system_volume_size system_group_desired "
    "system_group_max system_group_min node_instances neuron_instances efa_enabled custom_taints karpenter_enabled "
    "karpenter_namespace karpenter_version karpenter_capacity_type karpenter_consolidate_after nvidia_plugin_version "
    "auth_namespace ingress_namespace kubeflow_namespace static_email static_username ingress_scheme ingress_cidrs "
    "ingress_gateway cluster_issuer kubeflow_platform_enabled local_helm_repo tags"
)


def table_row(name: str) -> str:
    """The line of the doc's tables that begins with `name`."""
    found = re.search(rf"^\| `{name}` \|.*$", DOC.read_text(encoding="utf-8"), re.MULTILINE)
    assert found, f"{name} has no row in {DOC.name}"
    return found.group()


def test_the_aws_root_is_formatted() -> None:
    run_tool("terraform", "fmt", "-check", "-diff", "-recursive", ROOT, CHECKPOINT_DISABLE="1")


def test_arguments_references_and_variables_of_the_aws_root_are_right() -> None:
    assert check_root(ROOT, SCHEMA) == []


def test_the_module_of_policies_uses_and_describes_each_variable() -> None:
    # Its only caller gives it values that were validated.
    assert [fault for fault in check_root(ROOT / "policies", SCHEMA) if not fault.endswith("has no validation")] == []


def test_the_policies_need_no_provider() -> None:
    assert read_root(ROOT / "policies").blocks == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("  role_arn                      = aws_iam", "  role                          = aws_iam", "role is not an"),
        ("  role_arn                      = aws_iam", "  # aws_iam", "aws_eks_cluster.this: role_arn is missing"),
        ('    authentication_mode                         = "API"', '    mode = "API"', "mode is not an argument"),
        ("  vpc_config {", "  vpc_config = {", "vpc_config is a block, not an argument"),
        ("    provider {", "    provider_key {", "provider_key is not a block"),
        ("  scaling_config {", "  scaling {", "scaling_config is missing"),
        ("retention_in_days = var.log_retention_days", 'retention_in_days = "long"', "is a string, not a number"),
        ("encrypted        = true", "encrypted        = 3", "encrypted is 3, not a boolean"),
        ('resource "aws_sqs_queue" "', 'resource "aws_sqs_line" "', "aws_sqs_line is not in the schema"),
        ("subnet in aws_subnet.private :", "subnet in aws_subnet.privat :", "aws_subnet.privat is not declared"),
        ("var.fsx_storage_capacity\n", "1200\n", "var.fsx_storage_capacity is not used"),
        ('events = ["NEW", "CHANGED"]', 'event = ["NEW", "CHANGED"]', "event is not an argument"),
        ("  queue_arn                = ", "  que_arn = ", "queue_arn is missing"),
    ],
)
def test_the_checker_finds_an_error_planted_in_the_aws_root(old: str, new: str, fault: str, tmp_path: Path) -> None:
    copy = tmp_path / "aws"
    shutil.copytree(ROOT, copy)
    [file] = [one for one in sorted(copy.glob("*.tf")) if old in one.read_text(encoding="utf-8")][:1]
    file.write_text(file.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")
    faults = check_root(copy, SCHEMA)
    assert any(fault in one for one in faults), faults


def test_the_outputs_that_others_read_exist() -> None:
    assert set(OUTPUTS.split()) <= set(read_root(ROOT).outputs)


def test_every_variable_and_output_has_its_row_in_the_doc() -> None:
    root = read_root(ROOT)
    for name in (*root.variables, *root.outputs):
        table_row(name)


def shown(default: object) -> str:
    """A default as the doc writes it."""
    match default:
        case None | "null":
            return "null"
        case bool():
            return f"`{str(default).lower()}`"
        case '""' | [] | {}:
            return "none"
        case list():
            return ", ".join(f"`{str(one).strip(chr(34))}`" for one in default)
    return f"`{str(default).strip(chr(34))}`"


def test_the_doc_states_the_defaults_that_the_variables_have() -> None:
    for name, variable in read_root(ROOT).variables.items():
        expected = shown(variable["default"]) if "default" in variable else "required"
        assert table_row(name).split("|")[2].strip() == expected, name


def test_every_variable_of_aws_samples_is_kept_or_accounted_for() -> None:
    assert len(SEED_VARIABLES.split()) == 47
    ours = set(read_root(ROOT).variables)
    gone = {name for row in gone_rows() for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert ours & gone == set()
    assert set(SEED_VARIABLES.split()) - ours == gone


def gone_rows() -> list[str]:
    text = DOC.read_text(encoding="utf-8")
    return re.findall(r"^\| `.*$", text[text.index("## Removed variables") :], re.MULTILINE)


def test_a_variable_documented_for_the_addons_root_exists_there() -> None:
    there = set(read_root(ROOT.parent / "addons").variables)
    rows = [row for row in gone_rows() if "add-ons root" in row]
    assert rows
    for row in rows:
        assert set(re.findall(r"`(\w+)`", row.split("|")[1])) <= there, row


def test_the_examples_name_variables_and_settings_that_exist() -> None:
    def names(file: str) -> set[str]:
        return set(re.findall(r"^(\w+) *=", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE))

    variables = read_root(ROOT).variables
    required = {name for name, variable in variables.items() if "default" not in variable}
    assert required <= names("terraform.tfvars.example") <= set(variables)
    assert names("backend.hcl.example") == {"bucket", "key", "region", "encrypt", "use_lockfile"}


def test_nothing_of_the_root_is_open_to_the_world() -> None:
    text = "".join(file.read_text(encoding="utf-8") for file in ROOT.rglob("*.tf"))
    rules = re.findall(r'^.*"0\.0\.0\.0/0".*$', text, re.MULTILINE)
    # Two routes, the nodes' egress out of the VPC, and a route that is read; no rule lets anyone in.
    assert sorted(one.split("=")[0].strip() for one in rules) == [
        "cidr_ipv4",
        "destination_cidr_block",
        "destination_cidr_block",
        "for route in self.routes : route.cidr_block",
    ]
    opened = [f"{type_}.{name}" for _, type_, name, body in read_root(ROOT).blocks if "cidr_ipv4" in body]
    assert opened == ["aws_vpc_security_group_egress_rule.internet"]
    assert "ipv6" not in re.sub(r"#.*", "", text)


def test_deletions_are_imported_but_never_exported() -> None:
    text = (ROOT / "storage.tf").read_text(encoding="utf-8")
    [exported] = re.findall(r"auto_export_policy \{\s+events = \[([^]]*)\]", text)
    assert exported == '"NEW", "CHANGED"'


def test_terraform_waits_longer_than_ten_minutes_for_the_link_to_s3() -> None:
    # Ten are the provider's default, which a first link has exceeded (the repository of AWS Samples, issue 112).
    [link] = [body for _, type_, _, body in read_root(ROOT).blocks if type_ == "aws_fsx_data_repository_association"]
    [timeouts] = link["timeouts"]
    assert {name: timeouts[name].strip('"') for name in ("create", "update", "delete")} == {
        "create": "60m",
        "update": "30m",
        "delete": "30m",
    }


def test_no_module_comes_from_a_registry_and_providers_are_pinned() -> None:
    assert [body["source"].strip('"') for body in read_root(ROOT).modules.values()] == ["./policies"]
    text = (ROOT / "versions.tf").read_text(encoding="utf-8")
    assert re.findall(r'source\s+= "([^"]+)"', text) == ["hashicorp/aws"]
    assert re.search(r'version = ">= [\d.]+, < [\d.]+"', text)
    assert 'backend "s3"' in text


@pytest.mark.slow
def test_checkov_finds_nothing_in_the_aws_root() -> None:
    assert checkov_findings(ROOT, "terraform", ()) == []


def test_every_skip_of_checkov_says_why() -> None:
    skips = [line for file in ROOT.rglob("*.tf") for line in file.read_text().splitlines() if "checkov:skip" in line]
    assert skips
    for line in skips:
        assert re.fullmatch(r"\s*#checkov:skip=CKV2?_AWS_\d+:.{20,}", line), line
