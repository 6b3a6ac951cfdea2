"""Checks of a job's network: its subnets' route to S3, its security groups, and mount targets of file systems."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from maskfleet.config.launch import SageMakerChannel, SageMakerLaunch
from maskfleet.launch.findings import Finding, Verdict
from maskfleet.launch.sagemaker.services import Json, Services, asking, is_denied
from maskfleet.system.aws import aws_exceptions, code_of

PLACE = "sagemaker"
T = TypeVar("T")
_EC2 = "ec2:DescribeSubnets, DescribeRouteTables, DescribeVpcEndpoints and DescribeSecurityGroups"


def network_findings(services: Services, launch: SageMakerLaunch) -> Iterator[Finding]:
    """Whether the job's subnets, groups and file systems fit together; nothing is created."""
    if not launch.subnets:
        yield Finding(PLACE, "network", Verdict.OK, "SageMaker's own, without subnets")
        return
    subnets = unless_denied("subnets", _EC2, lambda: _subnets(services, launch.subnets))
    if isinstance(subnets, Finding):
        yield subnets
        return
    yield from (_route(services, subnet) for subnet in subnets)
    yield _groups(services, launch.security_groups, {one["VpcId"] for one in subnets}, nodes=launch.nodes)
    for channel in launch.channels:
        if channel.source == "efs":
            yield _efs(services, channel, subnets)
        elif channel.source == "fsx":
            yield _fsx(services, channel, subnets)


def unless_denied(name: str, permissions: str, check: Callable[[], T]) -> T | Finding:
    """What `check` gives; without permission for it a warning, because the job may be fine all the same."""
    with asking(f"check {name}", permissions=permissions, service="AWS"):
        try:
            return check()
        except aws_exceptions() as error:
            if is_denied(error):
                return Finding(PLACE, name, Verdict.WARN, "not permitted to check it", f"it takes {permissions}")
            raise


def lacking(name: str, found: str, refusal: str, remedy: str) -> Finding:
    """A finding for which a launch is refused."""
    return Finding(PLACE, name, Verdict.FAIL, found, remedy, refusal)


def _subnets(services: Services, wanted: Sequence[str]) -> list[Json] | Finding:
    try:
        return list(services.client("ec2").describe_subnets(SubnetIds=list(wanted))["Subnets"])
    except aws_exceptions() as error:
        if code_of(error) in ("InvalidSubnetID.NotFound", "InvalidSubnetID.Malformed"):
            what = f"{services.region} has not all of the subnets {', '.join(wanted)}"
            return lacking("subnets", "missing", what, "check launch.subnets and the region")
        raise


def _route(services: Services, subnet: Json) -> Finding:
    """Whether the subnet reaches S3: by a gateway or interface endpoint, or by a default route that is not an internet
    gateway, because the job's network interfaces have no public address."""
    name = f"subnet {subnet['SubnetId']}"

    def check() -> Finding:
        way = _way_to_s3(services, subnet)
        if way is None:
            return lacking(
                name,
                "no route to S3",
                f"{name} has no route to S3, from which the job reads its data and to which it writes its model",
                "add an S3 gateway endpoint to its route table, or use private subnets with a NAT gateway",
            )
        free = subnet.get("AvailableIpAddressCount", 1)
        if free < 1:
            return lacking(name, "no free address", f"{name} has no free address", "use another subnet")
        return Finding(PLACE, name, Verdict.OK, f"{subnet['AvailabilityZone']}, S3 by {way}, {free} addresses free")

    return unless_denied(name, _EC2, check)


def _way_to_s3(services: Services, subnet: Json) -> str | None:
    ec2 = services.client("ec2")
    own = {"Name": "association.subnet-id", "Values": [subnet["SubnetId"]]}
    main = [{"Name": "vpc-id", "Values": [subnet["VpcId"]]}, {"Name": "association.main", "Values": ["true"]}]
    tables = ec2.describe_route_tables(Filters=[own])["RouteTables"]
    tables = tables or ec2.describe_route_tables(Filters=main)["RouteTables"]
    routes = [one for table in tables for one in table.get("Routes", []) if one.get("State", "active") == "active"]
    in_vpc = ec2.describe_vpc_endpoints(
        Filters=[
            {"Name": "vpc-id", "Values": [subnet["VpcId"]]},
            {"Name": "service-name", "Values": [f"com.amazonaws.{services.region}.s3"]},
        ]
    )["VpcEndpoints"]
    endpoints = {one["VpcEndpointId"]: one for one in in_vpc if one.get("State", "available") == "available"}
    if any(one.get("GatewayId") in endpoints for one in routes):
        return "a gateway endpoint"
    if any(one.get("VpcEndpointType") == "Interface" and one.get("PrivateDnsEnabled") for one in endpoints.values()):
        return "an interface endpoint"
    for one in routes:
        if one.get("DestinationCidrBlock") == "0.0.0.0/0" and not str(one.get("GatewayId", "")).startswith("igw-"):
            return "a NAT gateway" if one.get("NatGatewayId") else "its default route"
    return None


def _groups(services: Services, wanted: Sequence[str], networks: set[str], *, nodes: int) -> Finding:
    """Whether the groups are in the network of the subnets, and let several instances reach each other."""
    name = "security groups"

    def check() -> Finding:
        try:
            found = services.client("ec2").describe_security_groups(GroupIds=list(wanted))["SecurityGroups"]
        except aws_exceptions() as error:
            if code_of(error) not in ("InvalidGroup.NotFound", "InvalidGroupId.Malformed"):
                raise
            what = f"{services.region} has not all of the security groups {', '.join(wanted)}"
            return lacking(name, "missing", what, "check launch.security_groups and the region")
        others = [one["GroupId"] for one in found if one["VpcId"] not in networks]
        if others or len(networks) > 1:
            what = "the job's subnets and security groups are not all in one VPC"
            return lacking(name, "in another VPC", what, "name subnets and security_groups of the same VPC")
        if nodes > 1 and not any(_admits(rule, wanted) for one in found for rule in one.get("IpPermissions", ())):
            # No refusal: several narrow rules together may be enough.
            remedy = "let one of them admit all traffic from itself, or the ranks cannot reach each other"
            return Finding(PLACE, name, Verdict.WARN, "no rule admits all TCP ports of the other instances", remedy)
        return Finding(PLACE, name, Verdict.OK, ", ".join(wanted))

    return unless_denied(name, _EC2, check)


def _admits(rule: Json, groups: Sequence[str]) -> bool:
    """Whether an inbound rule opens all TCP ports to members of `groups`, or to addresses."""
    is_wide = rule["IpProtocol"] == "-1" or (
        rule["IpProtocol"] == "tcp" and rule["FromPort"] <= 1024 and rule["ToPort"] == 65_535
    )
    members = {pair.get("GroupId") for pair in rule.get("UserIdGroupPairs", ())}
    return is_wide and bool(rule.get("IpRanges") or rule.get("PrefixListIds") or members & {*groups})


def _efs(services: Services, channel: SageMakerChannel, subnets: list[Json]) -> Finding:
    """Whether each zone of the job has a mount target."""
    name = f"channel {channel.name}"

    def check() -> Finding:
        try:
            answer = services.client("efs").describe_mount_targets(FileSystemId=channel.file_system_id)
        except aws_exceptions() as error:
            if code_of(error) != "FileSystemNotFound":
                raise
            what = f"there is no EFS file system {channel.file_system_id} in {services.region}"
            return lacking(name, "no such file system", what, "check file_system_id and the region")
        targets = [one for one in answer["MountTargets"] if one["LifeCycleState"] == "available"]
        zones = {one["AvailabilityZoneId"] for one in targets}
        without = sorted({one["AvailabilityZone"] for one in subnets if one["AvailabilityZoneId"] not in zones})
        if without:
            what = f"{channel.file_system_id} has no mount target in {', '.join(without)}, where the job may run"
            return lacking(name, "mount target missing", what, "add a mount target there, or leave out those subnets")
        return Finding(PLACE, name, Verdict.OK, f"{channel.file_system_id}, mount targets in all zones")

    return unless_denied(name, "elasticfilesystem:DescribeMountTargets", check)


def _fsx(services: Services, channel: SageMakerChannel, subnets: list[Json]) -> Finding:
    """Whether the directory begins with the file system's mount name, and the file system is available."""
    name = f"channel {channel.name}"

    def check() -> Finding:
        try:
            answer = services.client("fsx").describe_file_systems(FileSystemIds=[channel.file_system_id])
        except aws_exceptions() as error:
            if code_of(error) != "FileSystemNotFound":
                raise
            what = f"there is no FSx file system {channel.file_system_id} in {services.region}"
            return lacking(name, "no such file system", what, "check file_system_id and the region")
        system = answer["FileSystems"][0]
        mount = system.get("LustreConfiguration", {}).get("MountName")
        if mount is None or system["Lifecycle"] != "AVAILABLE":
            what = f"{channel.file_system_id} is {system['FileSystemType']}, {system['Lifecycle']}"
            return lacking(name, what, f"{what}; a job needs an available one of type LUSTRE", "use another one")
        if not f"{channel.uri}/".startswith(f"/{mount}/"):
            what = f"the directory {channel.uri} of {name} does not begin with the mount name /{mount}"
            return lacking(name, "wrong directory", what, f"write uri: /{mount}{channel.uri}")
        if system.get("VpcId") not in {one["VpcId"] for one in subnets}:
            what = f"{channel.file_system_id} is in another VPC than the job"
            return lacking(name, "in another VPC", what, "use subnets of the file system's VPC")
        return Finding(PLACE, name, Verdict.OK, f"{channel.file_system_id}, mount name {mount}")

    return unless_denied(name, "fsx:DescribeFileSystems", check)
