"""What would make a stack fail, found before anything is created: region, credentials, instance types, quotas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from maskfleet.config.fields import nearest
from maskfleet.errors import InfraError
from maskfleet.infra.cloudformation.client import Aws, aws_code
from maskfleet.infra.cloudformation.kinds.kind import InstanceNeed, Needs

# Quotas of EC2 in vCPUs: the first letters of a family -> code and name, on demand and Spot.
_QUOTAS = {
    "p": (("L-417A185B", "Running On-Demand P instances"), ("L-7212CCBC", "All P Spot Instance Requests")),
    "g": (
        ("L-DB2E81BA", "Running On-Demand G and VT instances"),
        ("L-3819A6DF", "All G and VT Spot Instance Requests"),
    ),
    "standard": (
        ("L-1216C47A", "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances"),
        ("L-34B43A08", "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests"),
    ),
}
_STANDARD = "acdhimrtz"
_DENIED = {"AccessDenied", "AccessDeniedException", "UnauthorizedOperation"}
_UNKNOWN_QUOTA = "NoSuchResourceException"


def check(aws: Aws, needs: Needs) -> list[str]:
    """Raise an error for what the account or the region lacks; notes about what could not be checked."""
    check_region(aws)
    check_identity(aws)
    return _notes_of(aws, needs, (_offered, _quotas, _key, _bucket))


def check_new(aws: Aws, needs: Needs) -> list[str]:
    """The same about what a stack changes itself, so that it is checked only before the stack exists."""
    return _notes_of(aws, needs, (_efs,))


def _notes_of(aws: Aws, needs: Needs, parts: Sequence[Callable[[Aws, Needs], None]]) -> list[str]:
    notes: list[str] = []
    for part in parts:
        try:
            part(aws, needs)
        except InfraError as error:
            # A service of quotas that does not answer need not stop anybody; a quota that is too small has no cause.
            is_unanswered = part is _quotas and error.__cause__ is not None
            if not is_unanswered and aws_code(error) not in _DENIED:
                raise
            notes.append(f"not checked: {error.what}; {error.remedy}")
    return notes


def check_region(aws: Aws) -> None:
    """Raise an error for a region that does not exist."""
    known = aws.known_regions()
    if aws.region not in known:
        near = nearest(aws.region, known)
        raise InfraError(
            f"there is no AWS region {aws.region!r}",
            remedy=f"{f'did you mean {near}? ' if near else ''}For a new region, update boto3: pip install -U boto3",
        )


def check_identity(aws: Aws) -> str:
    """The account of the credentials in use; expired or missing ones are an error before anything is sent."""
    return str(aws.call("sts", "get_caller_identity")["Account"])


def _offered(aws: Aws, needs: Needs) -> None:
    """Raise an error unless the region, and the zone, offer every instance type."""
    if not needs.instances:
        return
    zone = _zone(aws, needs)
    for setting, kind in {one.type: (one.setting, one.type) for one in needs.instances}.values():
        pages = aws.pages(
            "ec2",
            "describe_instance_type_offerings",
            LocationType="availability-zone",
            Filters=[{"Name": "instance-type", "Values": [kind]}],
        )
        zones = sorted(one["Location"] for page in pages for one in page["InstanceTypeOfferings"])
        if not zones:
            raise InfraError(
                f"{setting}: {aws.region} does not offer the instance type {kind}",
                remedy="check its spelling, or choose another type or region; `aws ec2"
                " describe-instance-type-offerings` lists what a region offers",
            )
        if zone not in zones:
            raise InfraError(
                f"{setting}: the availability zone {zone} does not offer the instance type {kind}",
                remedy=f"set availability_zone, or choose subnets, in another zone: {', '.join(zones)}",
            )


def _zone(aws: Aws, needs: Needs) -> str:
    """The availability zone of the instances: the one given, that of the subnets, or the first of the region."""
    if needs.subnets:
        return _zone_of_subnets(aws, needs)
    answer = aws.call("ec2", "describe_availability_zones")
    # Local Zones that the account uses are listed too; some sort before the first Availability Zone.
    zones = sorted(
        one["ZoneName"]
        for one in answer["AvailabilityZones"]
        if one["State"] == "available" and one.get("ZoneType", "availability-zone") == "availability-zone"
    )
    if needs.zone is not None and needs.zone not in zones:
        raise InfraError(
            f"{aws.region} has no availability zone {needs.zone}", remedy=f"choose one of {', '.join(zones)}"
        )
    return needs.zone or zones[0]


def _zone_of_subnets(aws: Aws, needs: Needs) -> str:
    zones = {}
    for setting, subnet in needs.subnets.items():
        try:
            [found] = aws.call("ec2", "describe_subnets", SubnetIds=[subnet])["Subnets"]
        except InfraError as error:
            if aws_code(error) != "InvalidSubnetID.NotFound":
                raise
            raise InfraError(
                f"{setting}: there is no subnet {subnet} in {aws.region}", remedy="name one that exists there"
            ) from error
        if found["VpcId"] != needs.vpc:
            raise InfraError(
                f"{setting}: {subnet} is a subnet of {found['VpcId']}, not of {needs.vpc}",
                remedy="name a subnet of vpc_id, or the other VPC",
            )
        zones[setting] = str(found["AvailabilityZone"])
    if len(set(zones.values())) > 1:
        text = ", ".join(f"{setting} in {zone}" for setting, zone in zones.items())
        raise InfraError(f"the subnets are in different zones: {text}", remedy="name subnets of one zone")
    return next(iter(zones.values()))


def _quotas(aws: Aws, needs: Needs) -> None:
    """Raise an error if a quota of vCPUs is smaller than what the stack alone needs."""
    limited = [one for one in needs.instances if one.count and not one.reserved and _family(one.type) is not None]
    if not limited:
        return
    vcpus = _vcpus(aws, {one.type for one in limited})
    wanted: defaultdict[tuple[str, str], list[InstanceNeed]] = defaultdict(list)
    for one in limited:
        family = _family(one.type)
        assert family is not None
        wanted[_QUOTAS[family][one.spot]].append(one)
    for (code, name), users in wanted.items():
        need = sum(one.count * vcpus[one.type] for one in users)
        quota = _quota(aws, code)
        if quota < need:
            what = " and ".join(f"{one.count} × {one.type}" for one in users)
            more = (
                f"aws service-quotas request-service-quota-increase --service-code ec2 --quota-code {code}"
                f" --desired-value {need} --region {aws.region}"
            )
            raise InfraError(
                f"the quota {name!r} in {aws.region} is {quota} vCPUs, but {what} need {need}",
                remedy=f"ask for more with `{more}`, or choose fewer or smaller instances",
            )


def _quota(aws: Aws, code: str) -> int:
    """The quota of the account, or AWS's default if the account has never had another one."""
    arguments = {"ServiceCode": "ec2", "QuotaCode": code}
    try:
        answer = aws.call("service-quotas", "get_service_quota", **arguments)
    except InfraError as error:
        if aws_code(error) != _UNKNOWN_QUOTA:
            raise
        answer = aws.call("service-quotas", "get_aws_default_service_quota", **arguments)
    return int(answer["Quota"]["Value"])


def _family(kind: str) -> str | None:
    """Which quota counts an instance type; None for one that we do not know."""
    letters = kind.split(".")[0].rstrip("0123456789").lower()
    first = letters[:1]
    if kind.startswith(("trn", "inf", "dl", "hpc", "mac", "u-")):
        return None
    return first if first in ("p", "g") else "standard" if first in _STANDARD else None


def _vcpus(aws: Aws, kinds: Iterable[str]) -> dict[str, int]:
    answer = aws.call("ec2", "describe_instance_types", InstanceTypes=sorted(kinds))
    return {one["InstanceType"]: one["VCpuInfo"]["DefaultVCpus"] for one in answer["InstanceTypes"]}


def _key(aws: Aws, needs: Needs) -> None:
    if needs.key_name is None:
        return
    try:
        aws.call("ec2", "describe_key_pairs", KeyNames=[needs.key_name])
    except InfraError as error:
        if aws_code(error) != "InvalidKeyPair.NotFound":
            raise
        importing = (
            f"aws ec2 import-key-pair --key-name {needs.key_name}"
            f" --public-key-material fileb://~/.ssh/id_ed25519.pub --region {aws.region}"
        )
        raise InfraError(
            f"there is no key pair {needs.key_name} in {aws.region}", remedy=f"import your public key: {importing}"
        ) from error


def _bucket(aws: Aws, needs: Needs) -> None:
    if needs.bucket is None:
        return
    try:
        aws.call("s3", "head_bucket", Bucket=needs.bucket)
    except InfraError as error:
        if aws_code(error) == "403":
            return  # it exists, and the nodes use it with a role of their own
        if aws_code(error) != "404":
            raise
        raise InfraError(
            f"there is no bucket {needs.bucket}",
            remedy=f"create it (aws s3 mb s3://{needs.bucket}), or name one that exists",
        ) from error


def _efs(aws: Aws, needs: Needs) -> None:
    """Raise an error unless nodes can mount an existing file system by the mount target that it has or gets."""
    if needs.efs is None:
        return
    try:
        targets = aws.call("efs", "describe_mount_targets", FileSystemId=needs.efs)["MountTargets"]
    except InfraError as error:
        if aws_code(error) != "FileSystemNotFound":
            raise
        raise InfraError(
            f"efs_id: there is no file system {needs.efs} in {aws.region}", remedy="name one that exists there"
        ) from error
    elsewhere = sorted({one["VpcId"] for one in targets} - {needs.vpc})
    if elsewhere:
        raise InfraError(
            f"efs_id: {needs.efs} has its mount targets in {elsewhere[0]}, and can have them in one VPC only",
            remedy=f"set vpc_id to {elsewhere[0]} and the subnets to its own, or delete those mount targets",
        )
    zone, given = _zone(aws, needs), needs.efs_security_group
    here = next((one["MountTargetId"] for one in targets if one.get("AvailabilityZoneName") == zone), None)
    if here is None and given is not None:
        raise InfraError(
            f"efs_security_group_id: {needs.efs} has no mount target in {zone}",
            remedy="remove that setting: the stack then creates a mount target",
        )
    if here is None:
        return
    groups = aws.call("efs", "describe_mount_target_security_groups", MountTargetId=here)["SecurityGroups"]
    if given not in groups:
        raise InfraError(
            f"efs_security_group_id: {needs.efs} has a mount target in {zone} with the security group"
            f" {' and '.join(groups)}{f', not {given}' if given is not None else ''}",
            remedy=f"set efs_security_group_id to {groups[0]}: the nodes then use that mount target",
        )
