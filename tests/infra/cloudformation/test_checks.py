"""What is found before anything is created, with answers as AWS gives them."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from small_stack import Screen, StubbedAws

from maskfleet.errors import InfraError
from maskfleet.infra.cloudformation.checks import check, check_new, check_region
from maskfleet.infra.cloudformation.client import Aws, LiveStack
from maskfleet.infra.cloudformation.diagnose import remedy_for
from maskfleet.infra.cloudformation.kinds.ec2 import EC2, Ec2Cluster
from maskfleet.infra.cloudformation.kinds.kind import InstanceNeed, Needs
from maskfleet.infra.cloudformation.plan import propose

GPU = InstanceNeed("worker_instance_type", "p5.48xlarge", 2)
HEAD = InstanceNeed("head_instance_type", "m6i.xlarge", 1)


def offers(aws: StubbedAws, *zones: str) -> None:
    rows = [{"InstanceType": "p5.48xlarge", "LocationType": "availability-zone", "Location": zone} for zone in zones]
    aws.answer("ec2", "describe_instance_type_offerings", {"InstanceTypeOfferings": rows})


def has_zones(aws: StubbedAws, *zones: str) -> None:
    rows = [{"ZoneName": zone, "State": "available"} for zone in zones]
    aws.answer("ec2", "describe_availability_zones", {"AvailabilityZones": rows})


def has_vcpus(aws: StubbedAws, **vcpus: int) -> None:
    rows = [
        {"InstanceType": name.replace("_", "."), "VCpuInfo": {"DefaultVCpus": number}} for name, number in vcpus.items()
    ]
    aws.answer("ec2", "describe_instance_types", {"InstanceTypes": rows})


def has_quota(aws: StubbedAws, code: str, vcpus: float) -> None:
    expected: dict[str, Any] = {"ServiceCode": "ec2", "QuotaCode": code}
    aws.answer("service-quotas", "get_service_quota", {"Quota": {"QuotaCode": code, "Value": vcpus}}, **expected)


def test_all_is_well(stubbed: StubbedAws) -> None:
    stubbed.identity()
    has_zones(stubbed, "us-east-1a", "us-east-1b")
    offers(stubbed, "us-east-1a")
    offers(stubbed, "us-east-1a", "us-east-1b")
    has_vcpus(stubbed, p5_48xlarge=192, m6i_xlarge=4)
    has_quota(stubbed, "L-417A185B", 384)
    has_quota(stubbed, "L-1216C47A", 64)
    stubbed.answer("ec2", "describe_key_pairs", {"KeyPairs": [{"KeyName": "me"}]}, KeyNames=["me"])
    stubbed.answer("s3", "head_bucket", {}, Bucket="data")
    assert check(stubbed, Needs((GPU, HEAD), key_name="me", bucket="data")) == []


def test_a_type_that_the_region_lacks(stubbed: StubbedAws) -> None:
    stubbed.identity()
    has_zones(stubbed, "us-east-1a")
    offers(stubbed)
    with pytest.raises(
        InfraError, match=r"worker_instance_type: us-east-1 does not offer the instance type p5\.48xlarge"
    ):
        check(stubbed, Needs((GPU,)))


@pytest.mark.parametrize("zone", [None, "us-east-1a"])
def test_a_zone_without_the_type_names_those_that_have_it(stubbed: StubbedAws, zone: str | None) -> None:
    stubbed.identity()
    has_zones(stubbed, "us-east-1a", "us-east-1d")
    offers(stubbed, "us-east-1d", "us-east-1c")
    with pytest.raises(InfraError, match="zone us-east-1a does not offer") as caught:
        check(stubbed, Needs((GPU,), zone=zone))
    assert caught.value.remedy.endswith("us-east-1c, us-east-1d")


def test_the_first_zone_is_never_a_local_zone(stubbed: StubbedAws) -> None:
    """Local Zones that the account uses are listed too, and sort before the first Availability Zone."""
    stubbed.identity()
    rows = [
        {"ZoneName": "us-west-2-lax-1a", "State": "available", "ZoneType": "local-zone"},
        {"ZoneName": "us-west-2a", "State": "available", "ZoneType": "availability-zone"},
    ]
    stubbed.answer("ec2", "describe_availability_zones", {"AvailabilityZones": rows})
    offers(stubbed, "us-west-2a")
    assert check(stubbed, Needs((InstanceNeed("worker_instance_type", "p5.48xlarge", 0),))) == []


def test_a_zone_that_does_not_exist(stubbed: StubbedAws) -> None:
    stubbed.identity()
    has_zones(stubbed, "us-east-1a", "us-east-1b")
    with pytest.raises(InfraError, match="us-east-1 has no availability zone us-east-1z"):
        check(stubbed, Needs((GPU,), zone="us-east-1z"))


@pytest.mark.parametrize(
    ("vpc", "zones", "what"),
    [
        ("vpc-2", ("us-east-1a", "us-east-1a"), "is a subnet of vpc-1, not of vpc-2"),
        ("vpc-1", ("us-east-1a", "us-east-1b"), "the subnets are in different zones"),
        ("vpc-1", ("us-east-1b", "us-east-1b"), "zone us-east-1b does not offer"),
    ],
)
def test_subnets_must_fit(stubbed: StubbedAws, vpc: str, zones: tuple[str, str], what: str) -> None:
    stubbed.identity()
    for zone in zones[: 1 if "is a subnet" in what else 2]:
        subnet = {"SubnetId": "subnet-1", "VpcId": "vpc-1", "AvailabilityZone": zone}
        stubbed.answer("ec2", "describe_subnets", {"Subnets": [subnet]})
    if "does not offer" in what:
        offers(stubbed, "us-east-1a")
    with pytest.raises(InfraError, match=what):
        check(
            stubbed, Needs((GPU,), vpc=vpc, subnets={"private_subnet_id": "subnet-1", "public_subnet_id": "subnet-2"})
        )


def test_a_subnet_that_does_not_exist(stubbed: StubbedAws) -> None:
    stubbed.identity()
    stubbed.refuse("ec2", "describe_subnets", "InvalidSubnetID.NotFound", "The subnet ID does not exist")
    with pytest.raises(InfraError, match="private_subnet_id: there is no subnet subnet-1 in us-east-1"):
        check(stubbed, Needs((GPU,), vpc="vpc-1", subnets={"private_subnet_id": "subnet-1"}))


@pytest.mark.parametrize(("spot", "code"), [(False, "L-417A185B"), (True, "L-7212CCBC")])
def test_a_quota_that_is_too_small(stubbed: StubbedAws, spot: bool, code: str) -> None:
    stubbed.identity()
    has_zones(stubbed, "us-east-1a")
    offers(stubbed, "us-east-1a")
    has_vcpus(stubbed, p5_48xlarge=192)
    has_quota(stubbed, code, 192)
    need = InstanceNeed("worker_instance_type", "p5.48xlarge", 2, spot=spot)
    with pytest.raises(InfraError, match=r"is 192 vCPUs, but 2 × p5\.48xlarge need 384") as caught:
        check(stubbed, Needs((need,)))
    assert f"--quota-code {code} --desired-value 384 --region us-east-1" in caught.value.remedy


def test_a_quota_that_was_never_changed_is_that_of_aws(stubbed: StubbedAws) -> None:
    stubbed.identity()
    has_zones(stubbed, "us-east-1a")
    offers(stubbed, "us-east-1a")
    has_vcpus(stubbed, p5_48xlarge=192)
    stubbed.refuse("service-quotas", "get_service_quota", "NoSuchResourceException", "no such quota")
    stubbed.answer("service-quotas", "get_aws_default_service_quota", {"Quota": {"Value": 0.0}})
    with pytest.raises(InfraError, match="is 0 vCPUs"):
        check(stubbed, Needs((GPU,)))


def test_reserved_capacity_needs_no_quota(stubbed: StubbedAws) -> None:
    stubbed.identity()
    has_zones(stubbed, "us-east-1a")
    offers(stubbed, "us-east-1a")
    need = InstanceNeed("worker_instance_type", "p5.48xlarge", 2, reserved=True)
    assert check(stubbed, Needs((need,))) == []


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("AccessDeniedException", "not allowed to get service quota (403); the identity in use needs the permission"),
        ("ServiceException", "cannot get service quota"),
    ],
)
def test_a_check_of_quotas_that_is_not_possible_is_skipped_and_said(stubbed: StubbedAws, code: str, words: str) -> None:
    stubbed.identity()
    has_zones(stubbed, "us-east-1a")
    offers(stubbed, "us-east-1a")
    has_vcpus(stubbed, p5_48xlarge=192)
    stubbed.refuse("service-quotas", "get_service_quota", code, "no")
    [note] = check(stubbed, Needs((GPU,)))
    assert note.startswith(f"not checked: {words}")
    assert ("servicequotas:GetServiceQuota" in note) == (code == "AccessDeniedException")


def test_a_key_pair_that_does_not_exist(stubbed: StubbedAws) -> None:
    stubbed.identity()
    stubbed.refuse("ec2", "describe_key_pairs", "InvalidKeyPair.NotFound", "The key pair 'me' does not exist")
    with pytest.raises(InfraError, match="there is no key pair me in us-east-1") as caught:
        check(stubbed, Needs(key_name="me"))
    assert "aws ec2 import-key-pair --key-name me" in caught.value.remedy


@pytest.mark.parametrize(("code", "fails"), [("404", True), ("403", False)])
def test_a_bucket_must_exist_but_need_not_be_ours(stubbed: StubbedAws, code: str, fails: bool) -> None:
    stubbed.identity()
    stubbed.refuse("s3", "head_bucket", code, "x")
    if fails:
        with pytest.raises(InfraError, match="there is no bucket data"):
            check(stubbed, Needs(bucket="data"))
    else:
        assert check(stubbed, Needs(bucket="data")) == []


@pytest.mark.parametrize(
    "code", ["ExpiredToken", "ExpiredTokenException", "RequestExpired", "UnrecognizedClientException"]
)
def test_expired_credentials(stubbed: StubbedAws, code: str) -> None:
    stubbed.refuse("sts", "get_caller_identity", code, "expired")
    with pytest.raises(InfraError, match="does not accept the credentials in use"):
        check(stubbed, Needs())


def test_a_region_that_does_not_exist() -> None:
    with pytest.raises(InfraError, match="there is no AWS region 'us-wset-2'") as caught:
        check_region(Aws("us-wset-2"))
    assert caught.value.remedy.startswith("did you mean us-west-2?")


VPC, SUBNET = "vpc-0123456789abcdef0", "subnet-0123456789abcdef0"
FILES, TARGET, NFS = "fs-0123456789abcdef0", "fsmt-0123456789abcdef0", "sg-0123456789abcdef0"


def has_mount_target(aws: StubbedAws, zone: str | None = None, *, groups: list[str] | None = None) -> None:
    facts = {"FileSystemId": FILES, "SubnetId": SUBNET, "LifeCycleState": "available", "VpcId": VPC}
    found = [] if zone is None else [{**facts, "MountTargetId": TARGET, "AvailabilityZoneName": zone}]
    aws.answer("efs", "describe_mount_targets", {"MountTargets": found}, FileSystemId=FILES)
    if groups is not None:
        answer = {"SecurityGroups": groups}
        aws.answer("efs", "describe_mount_target_security_groups", answer, MountTargetId=TARGET)


def existing_efs(aws: StubbedAws, group: str | None = None) -> list[str]:
    row = {"SubnetId": SUBNET, "VpcId": VPC, "AvailabilityZone": "us-east-1a"}
    aws.answer("ec2", "describe_subnets", {"Subnets": [row]})
    subnets = {"private_subnet_id": SUBNET}
    return check_new(aws, Needs(vpc=VPC, subnets=subnets, efs=FILES, efs_security_group=group))


def test_an_existing_file_system_without_a_mount_target_in_the_zone(stubbed: StubbedAws) -> None:
    has_mount_target(stubbed, "us-east-1b")
    assert existing_efs(stubbed) == []
    has_mount_target(stubbed)
    with pytest.raises(InfraError, match=f"{FILES} has no mount target in us-east-1a") as caught:
        existing_efs(stubbed, group=NFS)
    assert caught.value.remedy == "remove that setting: the stack then creates a mount target"


def test_an_existing_mount_target_in_the_zone_needs_its_security_group(stubbed: StubbedAws) -> None:
    """EFS refuses a second one there, after the stack has made its network."""
    has_mount_target(stubbed, "us-east-1a", groups=[NFS])
    assert existing_efs(stubbed, group=NFS) == []
    for group, wrong in ((None, ""), ("sg-00000000", ", not sg-00000000")):
        has_mount_target(stubbed, "us-east-1a", groups=[NFS])
        with pytest.raises(InfraError) as caught:
            existing_efs(stubbed, group=group)
        assert caught.value.what.endswith(f"has a mount target in us-east-1a with the security group {NFS}{wrong}")
        assert caught.value.remedy.startswith(f"set efs_security_group_id to {NFS}: ")


def test_an_existing_file_system_of_another_vpc_or_none_at_all(stubbed: StubbedAws) -> None:
    has_mount_target(stubbed, "us-east-1a")
    with pytest.raises(InfraError, match=f"has its mount targets in {VPC}, and can have them in one VPC only"):
        check_new(stubbed, Needs(efs=FILES))
    stubbed.refuse("efs", "describe_mount_targets", "FileSystemNotFound", "File system does not exist.")
    with pytest.raises(InfraError, match=f"efs_id: there is no file system {FILES} in us-east-1"):
        check_new(stubbed, Needs(efs=FILES))
    stubbed.refuse("efs", "describe_mount_targets", "AccessDeniedException", "not authorized")
    (note,) = check_new(stubbed, Needs(efs=FILES))
    assert note.startswith("not checked: ")
    assert "elasticfilesystem:DescribeMountTargets" in note


def test_only_a_new_stack_has_its_file_system_checked(stubbed: StubbedAws, screen: Screen) -> None:
    """Later the mount target in the zone is the stack's own."""
    config = Ec2Cluster(name="fleet", s3_bucket="data", key_name="me", efs_id=FILES)
    session = dataclasses.replace(screen.session(aws=stubbed), kind=EC2, config=config)
    has_mount_target(stubbed, "us-east-1a")
    with pytest.raises(InfraError, match="in one VPC only"):
        propose(session, None)
    stubbed.refuse("cloudformation", "create_change_set", "ValidationError", "No updates are to be performed.")
    assert propose(session, LiveStack("arn", "fleet", "CREATE_COMPLETE")) is None


def test_remedies_name_settings_that_exist() -> None:
    for reason in (
        "mount target already exists in this AZ (Service: Efs, Status Code: 409)",
        "The image id '[ami-1]' does not exist",
        "We currently do not have sufficient p5.48xlarge capacity in the Availability Zone you requested",
    ):
        remedy = remedy_for(reason)
        assert remedy is not None
        named = set(re.findall(r"[a-z]+(?:_[a-z]+)+", remedy))
        assert named, remedy
        assert named <= set(EC2.fields)
