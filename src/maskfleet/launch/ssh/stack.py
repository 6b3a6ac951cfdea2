"""Hosts of a CloudFormation stack: its healthy instances, those of its Auto Scaling groups and of nested stacks too."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from maskfleet.errors import LaunchError
from maskfleet.launch.instances import Instance
from maskfleet.launch.ssh.route import DIRECT, Routes, Way
from maskfleet.launch.supervise.job_files import Host
from maskfleet.system.aws import aws_client, aws_error, aws_exceptions, aws_session, code_of

_GROUP, _INSTANCE, _NESTED = "AWS::AutoScaling::AutoScalingGroup", "AWS::EC2::Instance", "AWS::CloudFormation::Stack"
_COMPLETE = ("CREATE_COMPLETE", "UPDATE_COMPLETE", "IMPORT_COMPLETE", "UPDATE_ROLLBACK_COMPLETE")
_PAGE = 100  # instances asked for at once
POLL_S = 15.0


@dataclass(frozen=True, slots=True)
class StackHosts:
    """The hosts of a stack now, how they are reached, and what the stack says about them."""

    hosts: list[Host]
    wanted: int  # hosts that the stack should have
    region: str
    missing: str = ""  # why there are fewer
    outputs: dict[str, str] = field(default_factory=dict)
    routes: Routes = DIRECT


@dataclass(frozen=True, slots=True)
class _Member:
    """An instance of the stack."""

    id: str
    group: str = ""
    is_healthy: bool = True
    state: str = ""


def hosts_of_stack(
    name: str, *, region: str | None, known: Mapping[str, Instance], default_slots: int, enough: int | None = None
) -> StackHosts:
    """The hosts of the stack `name`, oldest first; one rank per GPU of a known instance type.

    Instances without a GPU are left out if others have one: they are login or storage nodes. There must be `enough`
    healthy hosts; None for all that the stack should have.
    """
    found = _look(name, region, known, default_slots)
    if not found.hosts and not found.wanted:
        raise LaunchError(
            f"stack {name} has no running instance",
            remedy="start its instances, or wait until its group has launched them",
        )
    needed = found.wanted if enough is None else enough
    if len(found.hosts) < needed:
        raise TooFewHostsError(
            f"stack {name} should have {needed} instances, but only {len(found.hosts)} are running{found.missing}",
            remedy="wait for the rest, or accept fewer with --min-nodes",
        )
    return found


class TooFewHostsError(LaunchError):
    """The stack does not have enough healthy hosts yet; later it may."""


def wait_for_hosts(
    look: Callable[[], StackHosts],
    *,
    limit_s: float,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> StackHosts:
    """What `look` finds as soon as there are enough hosts; its last error after `limit_s`."""
    began, said = time.monotonic(), ""
    while True:
        try:
            return look()
        except TooFewHostsError as error:
            if time.monotonic() - began >= limit_s:
                raise
            if error.what != said:
                said = error.what
                say(f"{said}; waiting up to {limit_s:.0f} s")
        sleep(POLL_S)


def _look(name: str, region: str | None, known: Mapping[str, Instance], default_slots: int) -> StackHosts:
    session = aws_session("hosts of a stack", region=region)
    with _aws_errors(name):
        with closing(aws_client(session, "cloudformation")) as client:
            outputs, groups, instances = _resources(client, name)
        with closing(aws_client(session, "autoscaling")) as client:
            desired, members = _members(client, groups)
        members += [_Member(one) for one in instances]
        with closing(aws_client(session, "ec2")) as client:
            described = _described(client, [one.id for one in members])
    healthy = {one.id for one in members if one.is_healthy}
    ready = [one for one in described if one["State"]["Name"] == "running" and one["InstanceId"] in healthy]
    gpus = {one["InstanceId"]: known[kind].gpus for one in described if (kind := one["InstanceType"]) in known}
    head = {one.id for one in members if one.group and one.group == outputs.get("HeadGroup")}
    without_ranks = {one["InstanceId"] for one in described if (gpus or head) and one["InstanceId"] not in gpus}
    if not gpus:
        without_ranks &= head  # the workers of a cluster without GPUs train, its head node does not
    routes = _routes(outputs, head, ready, str(session.region_name))
    hosts = [one for one in ready if one["InstanceId"] not in without_ranks]
    return StackHosts(
        hosts=[Host(_address(one, routes), gpus.get(one["InstanceId"], default_slots)) for one in hosts],
        wanted=max(desired + len(instances) - len(without_ranks), 0),
        region=str(session.region_name),
        missing=_missing(members, described, {one["InstanceId"] for one in ready} | without_ranks),
        outputs=outputs,
        routes=routes,
    )


def _resources(client: Any, stack: str) -> tuple[dict[str, str], list[str], list[str]]:
    """(outputs, Auto Scaling groups, instances) of a stack that is complete."""
    [described] = client.describe_stacks(StackName=stack)["Stacks"]
    status = described["StackStatus"]
    if status not in _COMPLETE:
        is_busy = status.endswith("_IN_PROGRESS") and "ROLLBACK" not in status and not status.startswith("DELETE")
        raise (TooFewHostsError if is_busy else LaunchError)(
            f"stack {stack} is {status}", remedy="wait until it is complete, or see its events for why it failed"
        )
    outputs = {one["OutputKey"]: one["OutputValue"] for one in described.get("Outputs", ())}
    groups, instances = [], []
    for page in client.get_paginator("list_stack_resources").paginate(StackName=stack):
        for resource in page["StackResourceSummaries"]:
            kind, identity = resource["ResourceType"], resource.get("PhysicalResourceId", "")
            if kind == _NESTED and identity:
                _, more_groups, more_instances = _resources(client, identity)
                groups += more_groups
                instances += more_instances
            elif kind == _GROUP and identity:
                groups.append(identity)
            elif kind == _INSTANCE and identity:
                instances.append(identity)
    return outputs, groups, instances


def _members(client: Any, groups: list[str]) -> tuple[int, list[_Member]]:
    """(instances that the groups should have, those that they have)."""
    if not groups:  # an empty list would select all groups
        return 0, []
    pages = client.get_paginator("describe_auto_scaling_groups").paginate(AutoScalingGroupNames=groups)
    found = [group for page in pages for group in page["AutoScalingGroups"]]
    members = [
        _Member(
            one["InstanceId"],
            group["AutoScalingGroupName"],
            one["LifecycleState"] == "InService" and one["HealthStatus"].lower() == "healthy",
            f"{one['LifecycleState']}, {one['HealthStatus']}",
        )
        for group in found
        for one in group["Instances"]
    ]
    return sum(group["DesiredCapacity"] for group in found), members


def _described(client: Any, ids: list[str]) -> list[dict[str, Any]]:
    """What EC2 says about those of the instances that it knows, oldest first.

    A filter, because EC2 refuses a list of ids if it does not know one of them: an instance that was launched just now,
    or that was terminated an hour ago.
    """
    found = []
    for start in range(0, len(ids), _PAGE):
        answer = client.describe_instances(Filters=[{"Name": "instance-id", "Values": ids[start : start + _PAGE]}])
        found += [one for reservation in answer["Reservations"] for one in reservation["Instances"]]
    return sorted(found, key=lambda one: (one["LaunchTime"], one["InstanceId"]))


def _missing(members: Sequence[_Member], described: Sequence[dict[str, Any]], ready: set[str]) -> str:
    """The instances that are not ready, with their states; an empty text for none."""
    states = {one["InstanceId"]: one["State"]["Name"] for one in described}
    texts = [
        f"{one.id} is {', '.join(filter(None, (states.get(one.id, 'not described'), one.state)))}"
        for one in members
        if one.id not in ready
    ]
    return f" ({'; '.join(texts)})" if texts else ""


def _routes(outputs: Mapping[str, str], head: Collection[str], ready: Sequence[dict[str, Any]], region: str) -> Routes:
    """The ways to the instances of our template, which says how they are reached; other stacks have none."""
    if "Access" not in outputs:
        return DIRECT
    ways = {one["PrivateIpAddress"]: Way(one["InstanceId"], one.get("PublicIpAddress")) for one in ready}
    if outputs["Access"] != "ssh":
        return Routes({address: Way(way.instance) for address, way in ways.items()}, session_region=region)
    heads = [address for address, way in ways.items() if way.instance in head and way.connect_to]
    return Routes(ways, jump=heads[0] if heads else None)


def _address(instance: dict[str, Any], routes: Routes) -> str:
    """The address by which the nodes of our template reach each other, for which there is a way.

    Of another stack: the public name if it has one, else the private address, for a VPN or a jump host of
    ~/.ssh/config.
    """
    private = str(instance["PrivateIpAddress"])
    if private in routes.ways:
        return private
    return str(instance.get("PublicDnsName") or instance.get("PublicIpAddress") or private)


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
