"""The AWS root with the real provider: its own validation, mock tests, and an apply to moto."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hcl_schema import read_root
from iam_documents import listed, statements
from terraform_aws import ROOT, operator_policy, ready_copy
from terraform_schema import extract

from tools import moto_server, run_tool, tool, try_tool

pytestmark = pytest.mark.slow

SCHEMAS = Path(__file__).parent / "schemas"
VARIABLES = {
    "region": "us-east-1",
    "cluster_name": "fleet",
    "azs": ["us-east-1a", "us-east-1b"],
    "import_path": "s3://my-bucket/ml-platform",
    "public_access_cidrs": ["203.0.113.7/32"],
    "load_balancer_controller_enabled": True,
    "data_bucket_enabled": True,
    "fsx_enabled": False,  # moto's FSx never becomes available
}
# What moto 5.2 lacks: add-ons, access entries, pod identities, calls of EFS, SQS and S3 that never end, and the
# cluster's security group, for which a group of the test stands in. It has no placement groups either.
OVERRIDE = """
locals {
  cluster_security_group = aws_security_group.stand_in.id
}
resource "aws_eks_addon" "before_nodes" { for_each = {} }
resource "aws_eks_addon" "after_nodes" { for_each = {} }
resource "aws_eks_access_entry" "gpu_node" { count = 0 }
resource "aws_eks_pod_identity_association" "data" { for_each = {} }
resource "aws_efs_backup_policy" "this" { count = 0 }
resource "aws_efs_file_system_policy" "this" { count = 0 }
resource "aws_sqs_queue_policy" "karpenter" { count = 0 }
resource "aws_s3_bucket_lifecycle_configuration" "data" { count = 0 }
"""
STAND_IN = """
resource "aws_security_group" "stand_in" {
  name   = "stand-in"
  vpc_id = local.vpc_id
  lifecycle {
    ignore_changes = [tags]
  }
}
"""
# The provider's names of services in its log, and IAM's.
PREFIXES = {
    "CloudWatch Logs": "logs",
    "EC2": "ec2",
    "EFS": "elasticfilesystem",
    "EKS": "eks",
    "EventBridge": "events",
    "IAM": "iam",
    "KMS": "kms",
    "S3": "s3",
    "SQS": "sqs",
    "STS": "sts",
}


# Calls of S3 that IAM has another name for.
S3_ACTIONS = {
    "HeadBucket": "ListBucket",
    "ListObjectVersions": "ListBucketVersions",
    "PutPublicAccessBlock": "PutBucketPublicAccessBlock",
    "DeletePublicAccessBlock": "PutBucketPublicAccessBlock",
    "PutBucketEncryption": "PutEncryptionConfiguration",
    "DeleteBucketEncryption": "PutEncryptionConfiguration",
    "DeleteBucketOwnershipControls": "PutBucketOwnershipControls",
}


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    tool("terraform")
    return ready_copy(tmp_path_factory.mktemp("provider"))


def test_the_provider_finds_the_aws_root_valid(ready: tuple[Path, dict[str, str]]) -> None:
    folder, given = ready
    report = json.loads(run_tool("terraform", "validate", "-json", cwd=folder, **given))
    assert report["valid"]
    assert report["diagnostics"] == []


def test_the_committed_schema_is_the_providers(ready: tuple[Path, dict[str, str]]) -> None:
    folder, given = ready
    committed = json.loads((SCHEMAS / "eks-aws.json").read_text(encoding="utf-8"))
    lock = (folder / ".terraform.lock.hcl").read_text(encoding="utf-8")
    [version] = re.findall(r'^  version +?= "([^"]+)"', lock, re.MULTILINE)
    if version != committed["versions"]["aws"]:
        pytest.skip(f"the provider here is {version}; the schema is of {committed['versions']['aws']}")
    schemas = json.loads(run_tool("terraform", "providers", "schema", "-json", cwd=folder, **given))
    assert extract(schemas, version, ROOT) == committed


def run_blocks(name: str) -> list[str]:
    return re.findall(
        r'^run "(\w+)"', (ROOT / "tests" / f"{name}.tftest.hcl").read_text(encoding="utf-8"), re.MULTILINE
    )


@pytest.mark.parametrize("name", ["options", "plan", "refusals"])
def test_terraforms_own_tests_of_the_aws_root_pass(name: str, ready: tuple[Path, dict[str, str]]) -> None:
    folder, given = ready
    done = try_tool("terraform", "test", "-no-color", f"-filter=tests/{name}.tftest.hcl", cwd=folder, **given)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Success! {len(run_blocks(name))} passed, 0 failed." in done.stdout


def test_every_validation_fails_once_in_terraforms_tests() -> None:
    text = (ROOT / "tests" / "refusals.tftest.hcl").read_text(encoding="utf-8")
    refused = set(re.findall(r"^    var\.(\w+),$", text, re.MULTILINE))
    validated = {name for name, variable in read_root(ROOT).variables.items() if "validation" in variable}
    assert refused == validated


@pytest.fixture
def on_moto(ready: tuple[Path, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the root, initialized with state on disk, that uses moto as AWS."""
    for name, value in {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    monkeypatch.setenv("MOTO_IAM_LOAD_MANAGED_POLICIES", "true")
    with moto_server(tmp_path / "moto.log") as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        folder, given = ready_copy(tmp_path)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        (folder / "moto_override.tf").write_text(OVERRIDE, encoding="utf-8")
        (folder / "stand_in.tf").write_text(STAND_IN, encoding="utf-8")
        (folder / "terraform.tfvars.json").write_text(json.dumps(VARIABLES), encoding="utf-8")
        yield folder


def test_moto_applies_the_root_returns_its_outputs_and_destroys_it(
    on_moto: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import boto3

    monkeypatch.setenv("TF_LOG_PROVIDER", "DEBUG")
    monkeypatch.setenv("TF_LOG_PATH", str(on_moto / "terraform.log"))
    run_tool("terraform", "apply", "-auto-approve", "-no-color", "-parallelism=20", cwd=on_moto)
    outputs = {
        name: one["value"] for name, one in json.loads(run_tool("terraform", "output", "-json", cwd=on_moto)).items()
    }
    cluster = boto3.client("eks", region_name="us-east-1").describe_cluster(name="fleet")["cluster"]
    assert outputs["cluster_endpoint"] == cluster["endpoint"]
    assert cluster["resourcesVpcConfig"]["publicAccessCidrs"] == ["203.0.113.7/32"]
    assert cluster["encryptionConfig"][0]["resources"] == ["secrets"]
    group = boto3.client("eks", region_name="us-east-1").describe_nodegroup(clusterName="fleet", nodegroupName="system")
    assert group["nodegroup"]["capacityType"] == "ON_DEMAND"
    check_network(outputs)
    check_bucket()
    check_roles(outputs)
    run_tool("terraform", "destroy", "-auto-approve", "-no-color", "-parallelism=20", cwd=on_moto)
    assert boto3.client("eks", region_name="us-east-1").list_clusters()["clusters"] == []
    assert boto3.client("efs", region_name="us-east-1").describe_file_systems()["FileSystems"] == []
    assert run_tool("terraform", "state", "list", cwd=on_moto) == ""
    called = called_actions(on_moto / "terraform.log")
    assert len(called) > 80
    granted = [action for one in statements(operator_policy()) for action in listed(one["Action"])]
    # GetCallerIdentity needs no permission.
    assert {one for one in called if not any(fnmatchcase(one, each) for each in granted)} == {"sts:GetCallerIdentity"}


def called_actions(log: Path) -> set[str]:
    """What Terraform asked of AWS, as IAM names it."""
    called = set()
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        method = re.search(r"rpc\.method=(\w+)", line)
        service = re.search(r'rpc\.service=("?)([\w ]+?)\1(?: |$)', line)
        if method and service:
            action = S3_ACTIONS.get(method.group(1), method.group(1)) if service.group(2) == "S3" else method.group(1)
            called.add(f"{PREFIXES[service.group(2)]}:{action}")
    return called


def check_network(outputs: dict[str, object]) -> None:
    """Nothing is reachable from outside, S3 is reached without NAT, EFS by nodes alone, and EFA has its rules."""
    import boto3

    ec2 = boto3.client("ec2", region_name="us-east-1")
    of_vpc = [{"Name": "vpc-id", "Values": [str(outputs["cluster_vpc"])]}]
    groups = ec2.describe_security_groups(Filters=of_vpc)["SecurityGroups"]
    assert [grant for group in groups for rule in group["IpPermissions"] for grant in rule["IpRanges"]] == []
    [nfs] = [rule for group in groups if group["GroupName"] == "fleet-efs" for rule in group["IpPermissions"]]
    assert (nfs["FromPort"], nfs["ToPort"]) == (2049, 2049)
    assert [pair["GroupId"] for pair in nfs["UserIdGroupPairs"]] == [outputs["node_security_group"]]
    [nodes] = [group for group in groups if group["GroupName"] == "fleet-nodes"]
    for rules in (nodes["IpPermissions"], nodes["IpPermissionsEgress"]):
        [itself] = [
            rule for rule in rules if any(pair["GroupId"] == nodes["GroupId"] for pair in rule["UserIdGroupPairs"])
        ]
        assert itself["IpProtocol"] == "-1"
    [endpoint] = ec2.describe_vpc_endpoints(Filters=of_vpc)["VpcEndpoints"]
    assert endpoint["ServiceName"] == "com.amazonaws.us-east-1.s3"
    assert len(endpoint["RouteTableIds"]) == 3
    assert (
        len(
            boto3.client("efs", region_name="us-east-1").describe_mount_targets(FileSystemId=outputs["efs_id"])[
                "MountTargets"
            ]
        )
        == 2
    )


def check_bucket() -> None:
    """The bucket of import_path is versioned, encrypted, not public, and refuses connections without TLS."""
    import boto3

    s3 = boto3.client("s3", region_name="us-east-1")
    assert s3.get_bucket_versioning(Bucket="my-bucket")["Status"] == "Enabled"
    assert all(s3.get_public_access_block(Bucket="my-bucket")["PublicAccessBlockConfiguration"].values())
    [rule] = s3.get_bucket_encryption(Bucket="my-bucket")["ServerSideEncryptionConfiguration"]["Rules"]
    assert rule["ApplyServerSideEncryptionByDefault"]["SSEAlgorithm"] == "AES256"
    [denied] = statements(s3.get_bucket_policy(Bucket="my-bucket")["Policy"])
    assert denied["Effect"] == "Deny"
    assert denied["Condition"] == {"Bool": {"aws:SecureTransport": ["false"]}}


def check_roles(outputs: dict[str, object]) -> None:
    """The roles that the outputs name are there, with the policies that the module wrote."""
    import boto3

    iam = boto3.client("iam", region_name="us-east-1")
    for output in ("karpenter", "autoscaler", "trainer", "staging", "load_balancer"):
        name = str(outputs[f"{output}_role_arn"]).rsplit("/", 1)[1]
        role = iam.get_role(RoleName=name)["Role"]
        assert role["Arn"] == outputs[f"{output}_role_arn"]
        assert all(one["Condition"] for one in role["AssumeRolePolicyDocument"]["Statement"])
        for policy in iam.list_role_policies(RoleName=name)["PolicyNames"]:
            document = iam.get_role_policy(RoleName=name, PolicyName=policy)["PolicyDocument"]
            assert statements(json.dumps(document))
