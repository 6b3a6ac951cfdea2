"""What the nodes of the EC2 cluster may do, by the policies of the template, and what their network lets through."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
from cfn_template import PSEUDO, Stack, read_template
from iam_documents import allowed, listed, statements

from maskfleet.system.deploy_files import deploy_path

TEMPLATE = read_template(deploy_path("cloudformation") / "ec2-cluster.yaml")
KEY = "arn:aws:kms:us-west-2:111122223333:key/0a1b"
BUCKET = "arn:aws:s3:::my-bucket"
GROUPS = "arn:aws:autoscaling:us-west-2:111122223333:autoScalingGroup:0a1b:autoScalingGroupName"
# Actions that may have the resource *, and what limits them.
WITHOUT_RESOURCE = {
    "cloudwatch:PutMetricData": "has no resources; held to the namespace maskfleet",
    "ssm:UpdateInstanceInformation": "Session Manager's agent registers its own instance",
    "ssmmessages:CreateControlChannel": "has no resources",
    "ssmmessages:CreateDataChannel": "has no resources",
    "ssmmessages:OpenControlChannel": "has no resources",
    "ssmmessages:OpenDataChannel": "has no resources",
}


@cache
def policy(resource: str, document: str = "PolicyDocument", **parameters: Any) -> str:
    given = {"S3Bucket": "my-bucket", "S3Prefix": "teams/vision", "KeyName": "me", **parameters}
    stack = Stack(TEMPLATE, **given)
    assert stack.refusals() == []
    return json.dumps(stack.properties(resource)[document])


def may(action: str, resource: str, **context: str) -> bool:
    return allowed(policy("InstancePolicy"), action, resource, context)


def test_nodes_read_and_write_their_prefix_and_delete_nothing() -> None:
    for action in ("s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"):
        assert may(action, f"{BUCKET}/teams/vision/data/coco2017/a.jpg"), action
    assert not may("s3:DeleteObject", f"{BUCKET}/teams/vision/data/coco2017/a.jpg")
    for prefix in ("teams/vision", "teams/vision/", "teams/vision/data/"):
        assert may("s3:ListBucket", BUCKET, **{"s3:prefix": prefix}), prefix
    assert may("s3:GetBucketLocation", BUCKET)


@pytest.mark.parametrize("action", ["s3:GetObject", "s3:PutObject", "s3:DeleteObject"])
@pytest.mark.parametrize(
    "object_",
    [
        "my-bucket/payroll.csv",
        "my-bucket/teams/vision-2/a",
        "my-bucket/teams/a",
        "other/teams/vision/a",
        "my-bucket-2/teams/vision/a",
    ],
)
def test_nodes_reach_no_other_object(action: str, object_: str) -> None:
    assert not may(action, f"arn:aws:s3:::{object_}")


def test_nodes_list_no_other_prefix_or_bucket() -> None:
    for context in ({}, {"s3:prefix": ""}, {"s3:prefix": "teams/"}, {"s3:prefix": "teams/vision-2/"}):
        assert not may("s3:ListBucket", BUCKET, **context), context
    assert not may("s3:ListBucket", "arn:aws:s3:::other", **{"s3:prefix": "teams/vision/"})
    assert not may("s3:ListAllMyBuckets", "*")


@pytest.mark.parametrize(
    "action",
    ["s3:DeleteBucket", "s3:PutBucketPolicy", "s3:PutBucketAcl", "s3:PutObjectAcl", "s3:PutLifecycleConfiguration"],
)
def test_nodes_do_not_administer_the_bucket(action: str) -> None:
    assert not may(action, BUCKET)
    assert not may(action, f"{BUCKET}/teams/vision/a")


@pytest.mark.parametrize(
    "action",
    [
        "iam:CreateUser",
        "iam:PassRole",
        "iam:AttachRolePolicy",
        "sts:AssumeRole",
        "ec2:TerminateInstances",
        "ec2:RunInstances",
        "ec2:DescribeInstances",
        "ec2:AuthorizeSecurityGroupIngress",
        "autoscaling:SetDesiredCapacity",
        "autoscaling:TerminateInstanceInAutoScalingGroup",
        "autoscaling:UpdateAutoScalingGroup",
        "cloudformation:DeleteStack",
        "cloudformation:UpdateStack",
        "elasticfilesystem:DeleteFileSystem",
        "fsx:DeleteFileSystem",
        "secretsmanager:GetSecretValue",
        "ssm:GetParameter",
        "ssm:SendCommand",
        "ssm:StartSession",
        "kms:Decrypt",
        "cloudwatch:DeleteAlarms",
        "logs:DeleteLogGroup",
    ],
)
def test_nodes_do_nothing_else(action: str) -> None:
    for resource in (
        "*",
        "arn:aws:ec2:us-west-2:111122223333:instance/i-1",
        f"{GROUPS}/fleet-worker",
        PSEUDO["AWS::StackId"],
    ):
        assert not may(action, resource), resource


def test_nodes_report_to_their_own_stack_and_groups() -> None:
    assert may("cloudformation:SignalResource", PSEUDO["AWS::StackId"])
    assert not may("cloudformation:SignalResource", PSEUDO["AWS::StackId"].replace("fleet", "fleet-2"))
    for action in ("autoscaling:CompleteLifecycleAction", "autoscaling:SetInstanceHealth"):
        assert may(action, f"{GROUPS}/fleet-head")
        assert may(action, f"{GROUPS}/fleet-worker")
        for stranger in ("web", "fleet", "fleet-2-worker", "fleet-worker-2", "my-fleet-worker"):
            assert not may(action, f"{GROUPS}/{stranger}"), stranger


@pytest.mark.parametrize("role", ["Head", "Worker"])
def test_nodes_signal_their_stack_by_the_id_that_they_may_signal(role: str) -> None:
    # IAM sees a call that gives the name of a stack as one on `stack/NAME/*`, which a policy for its id does not allow.
    script = Stack(TEMPLATE, S3Bucket="my-bucket", KeyName="me").properties(f"{role}Template")
    text = script["LaunchTemplateData"]["UserData"]
    assert 'signal-resource --stack-name "$STACK"' in text
    [identity] = re.findall(r"^STACK='(.*)'$", text, re.MULTILINE)
    assert may("cloudformation:SignalResource", identity)


def test_nodes_publish_metrics_only_in_our_namespace() -> None:
    assert may("cloudwatch:PutMetricData", "*", **{"cloudwatch:namespace": "maskfleet"})
    assert not may("cloudwatch:PutMetricData", "*", **{"cloudwatch:namespace": "AWS/EC2"})
    assert not may("cloudwatch:PutMetricData", "*")


def test_a_customer_key_is_used_only_through_s3() -> None:
    with_key = policy("BucketKeyPolicy", S3KmsKeyArn=KEY)
    through = {"kms:ViaService": "s3.us-west-2.amazonaws.com"}
    for action in ("kms:Decrypt", "kms:GenerateDataKey"):
        assert allowed(with_key, action, KEY, through)
        assert not allowed(with_key, action, KEY, {})
        assert not allowed(with_key, action, KEY + "2", through)
    assert not allowed(with_key, "kms:ScheduleKeyDeletion", KEY, through)


def test_no_statement_has_a_wildcard_action_and_only_listed_actions_have_all_resources() -> None:
    used = set()
    for one in [*statements(policy("InstancePolicy")), *statements(policy("BucketKeyPolicy", S3KmsKeyArn=KEY))]:
        assert one["Effect"] == "Allow"
        assert not any("*" in action for action in listed(one["Action"])), one["Sid"]
        if "*" in listed(one["Resource"]):
            used |= set(listed(one["Action"]))
    assert used == set(WITHOUT_RESOURCE)


def test_only_ec2_takes_the_role() -> None:
    [trust] = statements(policy("InstanceRole", "AssumeRolePolicyDocument"))
    assert trust == {"Effect": "Allow", "Action": "sts:AssumeRole", "Principal": {"Service": "ec2.amazonaws.com"}}


def test_the_role_has_no_other_policy() -> None:
    stack = Stack(TEMPLATE, S3Bucket="my-bucket", KeyName="me")
    assert stack.properties("InstanceRole").keys() == {"Description", "AssumeRolePolicyDocument"}
    others = [name for name, one in stack.resources.items() if one["Type"].startswith("AWS::IAM::")]
    assert sorted(others) == ["InstancePolicy", "InstanceProfile", "InstanceRole"]


def test_the_endpoint_lets_through_what_the_nodes_may_do_and_what_they_download() -> None:
    endpoint = policy("S3Endpoint")
    for one in statements(policy("InstancePolicy")):
        for action in listed(one["Action"]):
            if action.startswith("s3:"):
                assert allowed(endpoint, action, listed(one["Resource"])[0].replace("*", "data/a.jpg"), {}), action
    for downloaded in (
        "aws-ssm-us-west-2/agent",
        "fsx-lustre-client-repo/ubuntu/dists/noble/Release",
        "us-west-2.ec2.archive.ubuntu.com/ubuntu/dists/noble/InRelease",
        "images.cocodataset.org/zips/train2017.zip",
    ):
        assert allowed(endpoint, "s3:GetObject", f"arn:aws:s3:::{downloaded}", {}), downloaded
        assert not allowed(endpoint, "s3:PutObject", f"arn:aws:s3:::{downloaded}", {}), downloaded
    for stranger in ("other/teams/vision/a", "my-bucket/payroll.csv"):
        for action in ("s3:GetObject", "s3:PutObject"):
            assert not allowed(endpoint, action, f"arn:aws:s3:::{stranger}", {}), stranger
