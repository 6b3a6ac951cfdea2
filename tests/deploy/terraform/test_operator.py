"""The policy for the person who applies the AWS root: enough for it, and not an administrator's."""

from __future__ import annotations

import re

import pytest
from iam_documents import allowed, listed, statements
from terraform_aws import OPERATOR_POLICY, operator_policy

# Statements that say * for the resource, and why.
FOR_ALL_RESOURCES = {
    "See": "reading; most of these calls name no resource",
    "MakeNetwork": "what is made has no name yet; held to the region",
    "ChangeOwnNetwork": "held to what carries the cluster's tag",
    "MakeKey": "a new key has no name yet; must carry the cluster's tag",
    "MakeEfs": "a new file system has no name yet; must carry the cluster's tag",
}
ROLE = "arn:aws:iam::111122223333:role"


def test_the_operator_has_no_wildcard_but_for_reading() -> None:
    for one in statements(operator_policy()):
        for action in listed(one["Action"]):
            assert re.fullmatch(r"[a-z0-9]+:([A-Za-z]+|(Describe|List|Get)\*)", action), action


def test_the_operator_has_all_resources_only_where_a_reason_is_given() -> None:
    open_ones = {one["Sid"] for one in statements(operator_policy()) if "*" in listed(one["Resource"])}
    assert open_ones == set(FOR_ALL_RESOURCES)
    assert all("Condition" in one for one in statements(operator_policy()) if one["Sid"] in open_ones)


@pytest.mark.parametrize(
    ("action", "resource", "context"),
    [
        ("iam:CreateUser", "arn:aws:iam::111122223333:user/x", {}),
        ("iam:PutRolePolicy", f"{ROLE}/Admin", {}),
        ("iam:PassRole", f"{ROLE}/Admin", {"iam:PassedToService": "eks.amazonaws.com"}),
        ("iam:PassRole", f"{ROLE}/fleet-trainer", {"iam:PassedToService": "lambda.amazonaws.com"}),
        (
            "iam:AttachRolePolicy",
            f"{ROLE}/fleet-trainer",
            {"iam:PolicyARN": "arn:aws:iam::aws:policy/AdministratorAccess"},
        ),
        ("ec2:DeleteVpc", "arn:aws:ec2:us-west-2:111122223333:vpc/vpc-1", {"aws:RequestedRegion": "us-west-2"}),
        ("eks:DeleteCluster", "arn:aws:eks:us-west-2:111122223333:cluster/other", {}),
        ("elasticfilesystem:DeleteFileSystem", "arn:aws:elasticfilesystem:us-west-2:111122223333:file-system/fs-1", {}),
        ("s3:DeleteObject", "arn:aws:s3:::my-bucket/ml-platform/data/a.jpg", {}),
        ("ec2:TerminateInstances", "arn:aws:ec2:us-west-2:111122223333:instance/i-1", {}),
    ],
)
def test_the_operator_may_not(action: str, resource: str, context: dict[str, str]) -> None:
    assert not allowed(operator_policy(), action, resource, context)


def test_the_operator_may_remove_the_cluster_and_what_carries_its_tag() -> None:
    tagged = {"aws:RequestedRegion": "us-west-2", "aws:ResourceTag/maskfleet/cluster": "fleet"}
    policy = operator_policy()
    assert allowed(policy, "eks:DeleteCluster", "arn:aws:eks:us-west-2:111122223333:cluster/fleet", {})
    assert allowed(policy, "ec2:DeleteVpc", "arn:aws:ec2:us-west-2:111122223333:vpc/vpc-1", tagged)
    efs = "arn:aws:elasticfilesystem:us-west-2:111122223333:file-system/fs-1"
    assert allowed(policy, "elasticfilesystem:DeleteFileSystem", efs, tagged)


# What a service asks of IAM or EC2 in the caller's name; moto checks none of it.
SERVICE_ROLE = f"{ROLE}/aws-service-role/eks-nodegroup.amazonaws.com/AWSServiceRoleForAmazonEKSNodegroup"
INTERFACE = "arn:aws:ec2:us-west-2:111122223333:network-interface/eni-1"
FOR_THE_CALLER = [
    ("iam:GetRole", SERVICE_ROLE),  # eks:CreateNodegroup, before it makes the role
    ("iam:CreateServiceLinkedRole", SERVICE_ROLE),
    ("ec2:DescribeSubnets", "*"),  # elasticfilesystem:CreateMountTarget
    ("ec2:DescribeNetworkInterfaces", "*"),
    ("ec2:CreateNetworkInterface", INTERFACE),
    ("ec2:DeleteNetworkInterface", INTERFACE),  # elasticfilesystem:DeleteMountTarget
    ("ec2:ModifyNetworkInterfaceAttribute", INTERFACE),  # elasticfilesystem:ModifyMountTargetSecurityGroups
    ("ec2:ModifyNetworkInterfaceAttribute", "arn:aws:ec2:us-west-2:111122223333:security-group/sg-1"),
    ("ec2:GetSecurityGroupsForVpc", "arn:aws:ec2:us-west-2:111122223333:vpc/vpc-1"),  # fsx:CreateFileSystem
]


@pytest.mark.parametrize(("action", "resource"), FOR_THE_CALLER)
def test_the_operator_may_do_what_services_do_in_the_callers_name(action: str, resource: str) -> None:
    context = {"aws:RequestedRegion": "us-west-2", "iam:AWSServiceName": "eks-nodegroup.amazonaws.com"}
    assert allowed(operator_policy(), action, resource, context)


@pytest.mark.parametrize("action", ["iam:PutRolePolicy", "iam:AttachRolePolicy", "iam:DeleteRole"])
def test_the_operator_only_reads_the_roles_of_services(action: str) -> None:
    assert not allowed(operator_policy(), action, SERVICE_ROLE, {})


def test_the_operator_policy_fits_into_a_role() -> None:
    longest = operator_policy(cluster="f" * 38)
    assert len(re.sub(r"\s", "", longest)) <= 10_240


def test_the_placeholders_are_those_that_the_doc_names() -> None:
    words = set(re.findall(r"\b(?:STATE-)?[A-Z]{6,}\b", OPERATOR_POLICY.read_text(encoding="utf-8")))
    assert words == {"REGION", "ACCOUNT", "CLUSTER", "BUCKET", "PREFIX", "STATE-BUCKET"}
