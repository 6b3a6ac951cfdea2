"""The template of the EC2 cluster with cfn-lint, checkov, shellcheck and moto's CloudFormation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cfn_template import Stack, read_template
from cluster_charts import checkov_findings

from maskfleet.system.deploy_files import deploy_path
from tools import moto_server, run_tool

boto3 = pytest.importorskip("boto3")
pytestmark = pytest.mark.slow

FOLDER = deploy_path("cloudformation")
TEMPLATE = FOLDER / "ec2-cluster.yaml"
# Where the first version of this cluster could be created, in 2019; all of these regions still exist.
REGIONS = (
    "ap-northeast-1",
    "ap-northeast-2",
    "ap-south-1",
    "ap-southeast-1",
    "ap-southeast-2",
    "eu-central-1",
    "eu-west-1",
    "us-east-1",
    "us-east-2",
    "us-west-2",
)
# moto 5.2 ignores these types, so nothing is shown about them here; other tests read their properties.
IGNORED_BY_MOTO = {
    "AWS::CloudFormation::WaitConditionHandle",
    "AWS::CloudWatch::Alarm",
    "AWS::EC2::PlacementGroup",
    "AWS::EC2::SecurityGroupEgress",
    "AWS::FSx::DataRepositoryAssociation",
    "AWS::FSx::FileSystem",
}
# moto knows only AWS's parameters for Amazon Linux.
AMI_PARAMETER = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64"


def test_cfn_lint_finds_nothing_in_any_region_of_the_seed() -> None:
    assert run_tool("cfn-lint", TEMPLATE, "--regions", *REGIONS).strip() == ""


def test_checkov_finds_nothing() -> None:
    assert checkov_findings(TEMPLATE, "cloudformation", ()) == []


def test_shellcheck_finds_nothing(tmp_path: Path) -> None:
    scripts = sorted((FOLDER / "bootstrap").glob("*.sh"))
    assert len(scripts) == 2
    run_tool("shellcheck", *scripts)
    # The whole of it too, as a node runs it: settings, health script and bootstrap.
    stack = Stack(read_template(TEMPLATE), S3Bucket="my-bucket", KeyName="me", LustreStorageGiB=1200)
    for name in ("HeadTemplate", "WorkerTemplate"):
        file = tmp_path / f"{name}.sh"
        file.write_text(stack.properties(name)["LaunchTemplateData"]["UserData"], encoding="utf-8")
        run_tool("shellcheck", "-e", "SC1091", file)


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    with moto_server(tmp_path_factory.mktemp("moto") / "log") as url:
        account = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
        found = {"endpoint_url": url, "region_name": "us-east-1", **account}
        boto3.client("ec2", **found).create_key_pair(KeyName="me")
        yield found


@pytest.fixture(autouse=True)
def _no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))


def request(**parameters: str) -> dict[str, Any]:
    """Arguments of a call that creates or changes the stack."""
    default = read_template(TEMPLATE)["Parameters"]["AmiParameter"]["Default"]
    given = {"S3Bucket": "my-bucket", "KeyName": "me", **parameters}
    return {
        "StackName": "fleet",
        "TemplateBody": TEMPLATE.read_text(encoding="utf-8").replace(default, AMI_PARAMETER),
        "Parameters": [{"ParameterKey": key, "ParameterValue": value} for key, value in given.items()],
        "Capabilities": ["CAPABILITY_IAM"],
    }


def run_change_set(client: Any, kind: str, **parameters: str) -> str:
    """Create or update the stack with a change set, as the console does; returns the status of the stack."""
    client.create_change_set(ChangeSetName=kind.lower(), ChangeSetType=kind, **request(**parameters))
    client.execute_change_set(StackName="fleet", ChangeSetName=kind.lower())
    return str(client.describe_stacks(StackName="fleet")["Stacks"][0]["StackStatus"])


def groups(aws: dict[str, Any]) -> dict[str, int]:
    """Instances of each Auto Scaling group."""
    found = boto3.client("autoscaling", **aws).describe_auto_scaling_groups()["AutoScalingGroups"]
    return {one["AutoScalingGroupName"]: len(one["Instances"]) for one in found}


def test_the_stack_is_created_updated_and_deleted_by_moto(aws: dict[str, Any]) -> None:
    client, ec2 = boto3.client("cloudformation", **aws), boto3.client("ec2", **aws)
    # moto cannot delete a VPC that a stack created, so this one is ours.
    vpc = ec2.create_vpc(CidrBlock="10.1.0.0/16")["Vpc"]["VpcId"]
    subnets = [
        ec2.create_subnet(VpcId=vpc, CidrBlock=f"10.1.{number}.0/24")["Subnet"]["SubnetId"] for number in range(2)
    ]
    place = {"VpcId": vpc, "PublicSubnetId": subnets[0], "PrivateSubnetId": subnets[1]}
    assert run_change_set(client, "CREATE", **place) == "CREATE_COMPLETE"
    assert groups(aws) == {"fleet-head": 1, "fleet-worker": 2}
    [efs] = boto3.client("efs", **aws).describe_file_systems()["FileSystems"]
    assert efs["Encrypted"]

    grown = {**place, "WorkerCount": "3", "SshCidr": "203.0.113.7/32"}
    assert run_change_set(client, "UPDATE", **grown) == "UPDATE_COMPLETE"
    assert groups(aws) == {"fleet-head": 1, "fleet-worker": 3}

    client.delete_stack(StackName="fleet")
    assert groups(aws) == {}
    statuses = {one["StackName"]: one["StackStatus"] for one in client.list_stacks()["StackSummaries"]}
    assert statuses == {"fleet": "DELETE_COMPLETE"}


def test_moto_creates_every_resource_with_a_new_vpc_but_those_it_ignores(aws: dict[str, Any]) -> None:
    client = boto3.client("cloudformation", **aws)
    client.create_stack(**request(SshCidr="203.0.113.7/32"))
    [stack] = client.describe_stacks(StackName="fleet")["Stacks"]
    assert stack["StackStatus"] == "CREATE_COMPLETE"
    expected = Stack(read_template(TEMPLATE), S3Bucket="my-bucket", KeyName="me", SshCidr="203.0.113.7/32")
    assert {one["OutputKey"] for one in stack["Outputs"]} == expected.outputs.keys()
    listed = client.list_stack_resources(StackName="fleet")["StackResourceSummaries"]
    created = {one["LogicalResourceId"] for one in listed if one.get("LogicalResourceId")}
    assert {name for name, one in expected.resources.items() if one["Type"] not in IGNORED_BY_MOTO} == created
