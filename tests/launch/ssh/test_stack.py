"""Hosts of a stack, against moto's CloudFormation, EC2 and Auto Scaling."""

from __future__ import annotations

import gzip
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from maskfleet.config.launch import SshLaunch
from maskfleet.errors import LaunchError
from maskfleet.launch.instances import INSTANCES
from maskfleet.launch.ssh.backend import SshBackend
from maskfleet.launch.ssh.stack import _address, hosts_of_stack
from tools import ROOT, moto_server

boto3 = pytest.importorskip("boto3")
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with moto_server(tmp_path_factory.mktemp("moto") / "log") as url:
        yield url


@pytest.fixture(autouse=True)
def _account(aws: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws)


def client(service: str) -> Any:
    return boto3.client(service, region_name="us-east-1")


def template(*, nodes: int, kind: str, login: bool = False) -> dict[str, Any]:
    """A network, a group of `nodes` instances of `kind` and, with `login`, a small instance beside it."""
    image = client("ec2").describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    resources: dict[str, Any] = {
        "Vpc": {"Type": "AWS::EC2::VPC", "Properties": {"CidrBlock": "10.0.0.0/16"}},
        "Subnet": {
            "Type": "AWS::EC2::Subnet",
            "Properties": {
                "VpcId": {"Ref": "Vpc"},
                "CidrBlock": "10.0.0.0/24",
                "AvailabilityZone": "us-east-1a",
                "MapPublicIpOnLaunch": True,
            },
        },
        "Template": {
            "Type": "AWS::EC2::LaunchTemplate",
            "Properties": {"LaunchTemplateData": {"ImageId": image, "InstanceType": kind}},
        },
        "Workers": {
            "Type": "AWS::AutoScaling::AutoScalingGroup",
            "Properties": {
                "MinSize": "0",
                "MaxSize": "8",
                "DesiredCapacity": str(nodes),
                "VPCZoneIdentifier": [{"Ref": "Subnet"}],
                "LaunchTemplate": {
                    "LaunchTemplateId": {"Ref": "Template"},
                    "Version": {"Fn::GetAtt": ["Template", "LatestVersionNumber"]},
                },
            },
        },
    }
    if login:
        resources["Login"] = {
            "Type": "AWS::EC2::Instance",
            "Properties": {"ImageId": image, "InstanceType": "t3.small", "SubnetId": {"Ref": "Subnet"}},
        }
    return {"AWSTemplateFormatVersion": "2010-09-09", "Resources": resources}


@pytest.fixture
def stack(request: pytest.FixtureRequest) -> Iterator[str]:
    formation, name = client("cloudformation"), f"fleet-{next(NUMBERS)}"
    formation.create_stack(StackName=name, TemplateBody=json.dumps(template(**request.param)))
    yield name
    formation.delete_stack(StackName=name)


def instances_of(stack: str) -> list[dict[str, Any]]:
    """What EC2 itself lists under CloudFormation's tag or the group's."""
    pages = client("ec2").describe_instances()["Reservations"]
    group = f"{stack}-Workers"
    return [
        one
        for page in pages
        for one in page["Instances"]
        if any(tag["Value"].startswith(group) or tag["Value"] == stack for tag in one.get("Tags", ()))
    ]


@pytest.mark.parametrize("stack", [{"nodes": 3, "kind": "p4d.24xlarge", "login": True}], indirect=True)
def test_hosts_are_the_running_gpu_instances_with_a_rank_a_gpu(stack: str) -> None:
    hosts = hosts_of_stack(stack, region=None, known=INSTANCES, default_slots=1)
    private = {one["PrivateIpAddress"] for one in instances_of(stack) if one["InstanceType"] == "p4d.24xlarge"}
    assert len(private) == 3  # moto gives the instances of a group no public address
    assert {host.address for host in hosts} == private
    assert [host.slots for host in hosts] == [8, 8, 8]

    backend = SshBackend(SshLaunch(stack=stack, user="ubuntu"), nodes=2)
    assert backend.slots == (8, 8)
    assert [host.address for host in backend.hosts] == [f"ubuntu@{host.address}" for host in hosts[:2]]


@pytest.mark.parametrize("stack", [{"nodes": 2, "kind": "c5.large", "login": True}], indirect=True)
def test_without_gpus_every_instance_is_a_host_of_one_rank(stack: str) -> None:
    hosts = hosts_of_stack(stack, region=None, known=INSTANCES, default_slots=1)
    assert [host.slots for host in hosts] == [1, 1, 1]


@pytest.mark.parametrize(
    ("instance", "address"),
    [
        (
            {"PublicDnsName": "ec2-1.example", "PublicIpAddress": "1.2.3.4", "PrivateIpAddress": "10.0.0.1"},
            "ec2-1.example",
        ),
        ({"PublicDnsName": "", "PublicIpAddress": "1.2.3.4", "PrivateIpAddress": "10.0.0.1"}, "1.2.3.4"),
        ({"PublicDnsName": "", "PrivateIpAddress": "10.0.0.1"}, "10.0.0.1"),
    ],
)
def test_a_host_goes_by_its_public_name_where_it_has_one(instance: dict[str, str], address: str) -> None:
    assert _address(instance) == address


@pytest.mark.parametrize("stack", [{"nodes": 0, "kind": "p4d.24xlarge"}], indirect=True)
def test_a_stack_without_instances_is_refused(stack: str) -> None:
    with pytest.raises(LaunchError, match=f"stack {stack} has no running instance"):
        hosts_of_stack(stack, region=None, known=INSTANCES, default_slots=1)


@pytest.mark.parametrize("stack", [{"nodes": 2, "kind": "p4d.24xlarge", "login": True}], indirect=True)
def test_a_stack_that_is_smaller_than_it_should_be_is_not_used_silently(stack: str) -> None:
    login = next(one for one in instances_of(stack) if one["InstanceType"] == "t3.small")
    client("ec2").stop_instances(InstanceIds=[login["InstanceId"]])
    with pytest.raises(LaunchError, match="should have 3 instances, but only 2 are running"):
        hosts_of_stack(stack, region=None, known=INSTANCES, default_slots=1)


def test_an_unknown_stack_is_named() -> None:
    with pytest.raises(LaunchError, match="there is no stack no-such") as caught:
        hosts_of_stack("no-such", region=None, known=INSTANCES, default_slots=1)
    assert "region" in caught.value.remedy


def test_without_credentials_or_region_the_remedy_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_REGION")
    with pytest.raises(LaunchError, match="no AWS region"):
        hosts_of_stack("x", region=None, known=INSTANCES, default_slots=1)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(LaunchError, match="no AWS credentials"):
        hosts_of_stack("x", region="us-east-1", known=INSTANCES, default_slots=1)


def test_hosts_are_named_in_one_way_only() -> None:
    with pytest.raises(ValueError, match="hosts and stack all name the hosts"):
        SshLaunch(hosts=("a",), stack="b")


def test_the_facts_of_instances_are_those_that_aws_lists() -> None:
    lists = list(ROOT.glob(".tools/py/lib/python*/site-packages/moto/ec2/resources/instance_types.json.gz"))
    if not lists:
        pytest.skip("moto's copy of AWS's list is not here: make test-tools installs it")
    listed = json.loads(gzip.decompress(lists[0].read_bytes()))
    unlisted = {name for name in INSTANCES if name not in listed}
    assert unlisted <= {"p3.2xlarge", "p3.8xlarge", "p3.16xlarge"}  # AWS no longer offers them
    for name in INSTANCES.keys() - unlisted:
        facts, [gpu] = listed[name], listed[name]["GpuInfo"]["Gpus"]
        network = facts["NetworkInfo"]
        expected = {
            "gpus": gpu["Count"],
            "gpu": gpu["Name"],
            "gpu_memory_gib": gpu["MemoryInfo"]["SizeInMiB"] // 1024,
            "vcpus": facts["VCpuInfo"]["DefaultVCpus"],
            "memory_gib": facts["MemoryInfo"]["SizeInMiB"] // 1024,
            "efa": network["EfaInfo"]["MaximumEfaInterfaces"] if network.get("EfaSupported") else 0,
        }
        assert {key: getattr(INSTANCES[name], key) for key in expected} == expected, name
