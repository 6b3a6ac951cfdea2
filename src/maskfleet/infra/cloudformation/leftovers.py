"""What a stack leaves in the account: file systems that are kept on purpose, network interfaces that block it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from maskfleet.errors import InfraError
from maskfleet.infra.cloudformation.client import Aws, StackResource, aws_code
from maskfleet.infra.cloudformation.kinds.ec2 import lustre_price
from maskfleet.infra.costs import Prices, monthly

_STACK_TAG = "aws:cloudformation:stack-name"
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Kept:
    """A file system that a stack created and that remains without it."""

    service: str
    id: str
    state: str
    text: str
    """What it is, what it holds and what it costs."""


def kept_file_systems(aws: Aws, stack: str, prices: Prices) -> list[Kept]:
    """The file systems with CloudFormation's tag of `stack`, whether or not the stack still exists."""
    return [*_efs(aws, stack, prices), *_lustre(aws, stack, prices)]


def delete_file_system(aws: Aws, kept: Kept) -> None:
    """Delete a file system with all data in it; one that is gone is no error."""
    try:
        aws.call(kept.service, "delete_file_system", FileSystemId=kept.id)
    except InfraError as error:
        if aws_code(error) == "FileSystemInUse":
            raise InfraError(
                f"{kept.id} still has mount targets, so it cannot be deleted",
                remedy="wait until the stack is deleted, delete mount targets made by hand, then run it again",
            ) from error
        if aws_code(error) != "FileSystemNotFound":
            raise


def kept_networks(aws: Aws, stack: str) -> list[str]:
    """The commands that delete what remains of the network of a stack that is gone, in the order of deletion.

    A Lustre file system that is kept needs its subnet, its security group and the VPC of both. They cost nothing.
    """
    query = [{"Name": f"tag:{_STACK_TAG}", "Values": [stack]}]
    commands = []
    for noun, option in (("security_group", "group"), ("subnet", "subnet"), ("vpc", "vpc")):
        for page in aws.pages("ec2", f"describe_{noun}s", Filters=query):
            for one in page["".join(word.capitalize() for word in noun.split("_")) + "s"]:
                words = f"aws ec2 delete-{noun.replace('_', '-')} --{option}-id {one[f'{option.capitalize()}Id']}"
                commands.append(f"{words} --region {aws.region}")
    return commands


def network_interfaces(aws: Aws, resources: Sequence[StackResource]) -> list[str]:
    """Network interfaces in the VPC, subnets and security groups of a stack that cannot be deleted, in words."""
    filters = {"AWS::EC2::VPC": "vpc-id", "AWS::EC2::Subnet": "subnet-id", "AWS::EC2::SecurityGroup": "group-id"}
    found: dict[str, str] = {}
    for kind, name in filters.items():
        ids = [one.id for one in resources if one.type == kind and one.id and one.status != "DELETE_COMPLETE"]
        if ids:
            query = [{"Name": name, "Values": ids}]
            for page in aws.pages("ec2", "describe_network_interfaces", Filters=query):
                found |= {one["NetworkInterfaceId"]: _interface(one) for one in page["NetworkInterfaces"]}
    return list(found.values())


def _interface(one: dict[str, Any]) -> str:
    used = one.get("Attachment", {}).get("InstanceId") or one.get("Description") or one.get("InterfaceType", "")
    return f"{one['NetworkInterfaceId']} in {one['SubnetId']} ({one['Status']}; {used})"


def _efs(aws: Aws, stack: str, prices: Prices) -> Iterator[Kept]:
    for page in aws.pages("efs", "describe_file_systems"):
        for one in page["FileSystems"]:
            if _is_of(stack, one.get("Tags", ())) and one["LifeCycleState"] not in ("deleting", "deleted"):
                gib = one["SizeInBytes"]["Value"] / _GIB
                cost = monthly("gib_month/efs_standard", gib, prices)
                yield Kept("efs", one["FileSystemId"], one["LifeCycleState"], f"EFS with {gib:.1f} GiB, {cost}")


def _lustre(aws: Aws, stack: str, prices: Prices) -> Iterator[Kept]:
    for page in aws.pages("fsx", "describe_file_systems"):
        for one in page["FileSystems"]:
            if _is_of(stack, one.get("Tags", ())) and one["Lifecycle"] != "DELETING":
                facts = one.get("LustreConfiguration", {})
                kind, throughput = facts.get("DeploymentType", "SCRATCH_2"), facts.get("PerUnitStorageThroughput")
                cost = monthly(lustre_price(kind, throughput), one["StorageCapacity"], prices)
                text = f"FSx for Lustre of {one['StorageCapacity']} GiB ({kind}), {cost}"
                yield Kept("fsx", one["FileSystemId"], one["Lifecycle"], text)


def _is_of(stack: str, tags: Sequence[dict[str, str]]) -> bool:
    return {"Key": _STACK_TAG, "Value": stack} in list(tags)
