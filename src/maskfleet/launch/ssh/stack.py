"""Hosts of a CloudFormation stack: its running instances, those of its Auto Scaling groups and of nested stacks too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from maskfleet.errors import LaunchError
from maskfleet.launch.instances import Instance
from maskfleet.launch.supervise.job_files import Host
from maskfleet.system.aws import aws_client, aws_error, aws_exceptions, aws_session, code_of

_GROUP, _INSTANCE, _NESTED = "AWS::AutoScaling::AutoScalingGroup", "AWS::EC2::Instance", "AWS::CloudFormation::Stack"
_COMPLETE = ("CREATE_COMPLETE", "UPDATE_COMPLETE", "IMPORT_COMPLETE", "UPDATE_ROLLBACK_COMPLETE")
_PAGE = 100  # instances asked for at once


def hosts_of_stack(name: str, *, region: str | None, known: Mapping[str, Instance], default_slots: int) -> list[Host]:
    """The hosts of the stack `name`, oldest first; one rank per GPU of a known instance type.

    Instances without a GPU are left out if others have one: they are login or storage nodes.
    """
    session = aws_session("hosts of a stack", region=region)
    with _aws_errors(name):
        with closing(aws_client(session, "cloudformation")) as client:
            groups, instances = _resources(client, name)
        with closing(aws_client(session, "autoscaling")) as client:
            wanted, members = _members(client, groups)
        with closing(aws_client(session, "ec2")) as client:
            found = _running(client, [*instances, *members])
    if not found:
        raise LaunchError(
            f"stack {name} has no running instance",
            remedy="start its instances, or wait until its group has launched them",
        )
    lost = wanted + len(instances) - len(found)
    if lost > 0:
        raise LaunchError(
            f"stack {name} should have {wanted + len(instances)} instances, but only {len(found)} are running",
            remedy="wait for the rest, or name the hosts that you want with --hosts",
        )
    gpus = {one["InstanceId"]: known[kind].gpus for one in found if (kind := one["InstanceType"]) in known}
    if gpus:
        found = [one for one in found if one["InstanceId"] in gpus]
    return [Host(_address(one), gpus.get(one["InstanceId"], default_slots)) for one in found]


def _resources(client: Any, stack: str) -> tuple[list[str], list[str]]:
    """(Auto Scaling groups, instances) of a stack that is complete."""
    status = client.describe_stacks(StackName=stack)["Stacks"][0]["StackStatus"]
    if status not in _COMPLETE:
        raise LaunchError(
            f"stack {stack} is {status}", remedy="wait until it is complete, or see its events for why it failed"
        )
    groups, instances = [], []
    for page in client.get_paginator("list_stack_resources").paginate(StackName=stack):
        for resource in page["StackResourceSummaries"]:
            kind, identity = resource["ResourceType"], resource.get("PhysicalResourceId", "")
            if kind == _NESTED and identity:
                more_groups, more_instances = _resources(client, identity)
                groups += more_groups
                instances += more_instances
            elif kind == _GROUP and identity:
                groups.append(identity)
            elif kind == _INSTANCE and identity:
                instances.append(identity)
    return groups, instances


def _members(client: Any, groups: list[str]) -> tuple[int, list[str]]:
    """(instances that the groups should have, ids of those that they have)."""
    if not groups:  # an empty list would select all groups
        return 0, []
    pages = client.get_paginator("describe_auto_scaling_groups").paginate(AutoScalingGroupNames=groups)
    found = [group for page in pages for group in page["AutoScalingGroups"]]
    members = [one["InstanceId"] for group in found for one in group["Instances"]]
    return sum(group["DesiredCapacity"] for group in found), members


def _running(client: Any, ids: list[str]) -> list[dict[str, Any]]:
    found = []
    for start in range(0, len(ids), _PAGE):
        answer = client.describe_instances(InstanceIds=ids[start : start + _PAGE])
        found += [one for reservation in answer["Reservations"] for one in reservation["Instances"]]
    running = [one for one in found if one["State"]["Name"] == "running"]
    return sorted(running, key=lambda one: (one["LaunchTime"], one["InstanceId"]))


def _address(instance: dict[str, Any]) -> str:
    """Its public name if it has one, else its private address, for a VPN or a jump host of ~/.ssh/config."""
    return str(instance.get("PublicDnsName") or instance.get("PublicIpAddress") or instance["PrivateIpAddress"])


@contextmanager
def _aws_errors(stack: str) -> Iterator[None]:
    """What AWS refuses, as a message with a remedy."""
    try:
        yield
    except aws_exceptions() as error:
        if code_of(error) == "ValidationError" and "does not exist" in str(error):
            raise LaunchError(
                f"there is no stack {stack} in this region", remedy="check its name, AWS_PROFILE and the region"
            ) from error
        if type(error).__name__ == "NoRegionError":
            raise LaunchError(
                f"no AWS region to look up stack {stack} in", remedy="set AWS_REGION, or --launch-set region=us-west-2"
            ) from error
        raise aws_error(
            error,
            f"look up stack {stack}",
            service="CloudFormation",
            permissions="cloudformation:DescribeStacks and ListStackResources, "
            "autoscaling:DescribeAutoScalingGroups, ec2:DescribeInstances",
            kind=LaunchError,
        ) from error
