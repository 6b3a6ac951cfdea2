"""`maskfleet infra … sagemaker` with its real template, and moto as AWS."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_cli import infra

from maskfleet.infra.cloudformation.kinds.sagemaker import SAGEMAKER
from maskfleet.system.aws import aws_client, aws_session

pytestmark = pytest.mark.slow


def settings(folder: Path, name: str, more: str = "") -> str:
    """The file of a stack whose bucket exists."""
    client("s3").create_bucket(Bucket=f"{name}-data")
    file = folder / "stack.yaml"
    file.write_text(f"name: {name}\nregion: us-east-1\ns3_bucket: {name}-data\n{more}")
    return str(file)


def client(service: str) -> Any:
    return aws_client(aws_session("tests", region="us-east-1"), service)


def existing_network() -> str:
    """Settings that name a VPC and three subnets of it. moto cannot delete a VPC that its own stack created."""
    ec2 = client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
    text = f"vpc_id: {vpc}\n"
    for number in (1, 2, 3):
        zone = f"us-east-1{'abc'[number - 1]}"
        made = ec2.create_subnet(VpcId=vpc, CidrBlock=f"10.9.{number}.0/24", AvailabilityZone=zone)["Subnet"]
        text += f"private_subnet{number}_id: {made['SubnetId']}\n"
    return text


@pytest.mark.usefixtures("moto")
def test_the_stack_from_plan_to_down(tmp_path: Path) -> None:
    config = ("sagemaker", "--config", settings(tmp_path, "sm", existing_network()))
    assert "it does not exist" in infra("status", *config).output
    planned = infra("plan", *config, "--detailed-exitcode")
    assert planned.exit_code == 2, planned.output
    assert "create  HostingRole" in planned.output
    assert "EFS" in planned.output
    made = infra("up", *config, "--yes")
    assert "stack sm in us-east-1 is CREATE_COMPLETE" in made.output, made.output
    assert "nothing to do: the stack matches the settings" in infra("up", *config, "--yes").output
    assert infra("plan", *config, "--detailed-exitcode").exit_code == 0
    found = json.loads(infra("status", *config, "--json").output)
    assert (found["status"], found["failed"]) == ("CREATE_COMPLETE", [])
    gone = infra("down", *config, "--yes", "--delete-data")
    assert "stack sm in us-east-1 is deleted" in gone.output, (gone.output, gone.exception)
    assert "nothing is left to remove" in infra("down", *config, "--yes").output


@pytest.mark.usefixtures("moto")
def test_a_stack_without_lustre_is_well_and_shows_its_outputs(tmp_path: Path) -> None:
    config = ("sagemaker", "--config", settings(tmp_path, "well"))
    # moto gives outputs only to stacks that no change set created.
    client("cloudformation").create_stack(
        StackName="well",
        TemplateBody=SAGEMAKER.template_file().read_text(encoding="utf-8"),
        Parameters=[{"ParameterKey": "S3Bucket", "ParameterValue": "well-data"}],
        Capabilities=["CAPABILITY_IAM"],
        Tags=[{"Key": "maskfleet", "Value": "sagemaker"}],
    )
    shown = infra("status", *config, "--json")
    assert (shown.exit_code, json.loads(shown.output)["missing_outputs"]) == (0, [])
    outputs = json.loads(infra("outputs", *config, "--json").output)
    assert outputs["DataUri"] == "s3://well-data/maskfleet"
    assert outputs["HostingRoleArn"].startswith("arn:aws:iam::")
    assert "FsxFileSystemId" not in outputs


@pytest.mark.usefixtures("moto")
def test_a_bucket_that_does_not_exist_is_refused_before_anything_is_created(tmp_path: Path) -> None:
    file = tmp_path / "stack.yaml"
    file.write_text("name: none\nregion: us-east-1\ns3_bucket: no-such-bucket-anywhere\n")
    refused = infra("up", "sagemaker", "--config", str(file), "--yes")
    assert refused.exit_code != 0
    assert "no-such-bucket-anywhere" in f"{refused.exception}{refused.output}"
    assert "no stack" in infra("status", "sagemaker", "--config", str(file)).output
