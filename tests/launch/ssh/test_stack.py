"""Hosts of a stack, against moto's CloudFormation, EC2 and Auto Scaling."""

from __future__ import annotations

import gzip
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from maskfleet.config.launch import SshLaunch
from maskfleet.config.recipes import recipe
from maskfleet.errors import LaunchError
from maskfleet.launch.findings import Finding, Verdict
from maskfleet.launch.instances import INSTANCES
from maskfleet.launch.job import JobHandle
from maskfleet.launch.ssh import stack as stack_module
from maskfleet.launch.ssh.backend import SshBackend
from maskfleet.launch.ssh.hosts import HOSTS_COMMAND, cluster_of
from maskfleet.launch.ssh.route import DIRECT, session_command
from maskfleet.launch.ssh.stack import (
    StackHosts,
    TooFewHostsError,
    _address,
    _Member,
    hosts_of_stack,
    wait_for_hosts,
)
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
    hosts = hosts_of_stack(stack, region=None, known=INSTANCES, default_slots=1).hosts
    private = {one["PrivateIpAddress"] for one in instances_of(stack) if one["InstanceType"] == "p4d.24xlarge"}
    assert len(private) == 3  # moto gives the instances of a group no public address
    assert {host.address for host in hosts} == private
    assert [host.slots for host in hosts] == [8, 8, 8]

    backend = SshBackend(SshLaunch(stack=stack, user="ubuntu"), nodes=2)
    assert backend.slots == (8, 8)
    assert [host.address for host in backend.hosts] == [f"ubuntu@{host.address}" for host in hosts[:2]]


@pytest.mark.parametrize("stack", [{"nodes": 2, "kind": "c5.large", "login": True}], indirect=True)
def test_without_gpus_every_instance_is_a_host_of_one_rank(stack: str) -> None:
    hosts = hosts_of_stack(stack, region=None, known=INSTANCES, default_slots=1).hosts
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
    assert _address(instance, DIRECT) == address


@pytest.mark.parametrize("stack", [{"nodes": 0, "kind": "p4d.24xlarge"}], indirect=True)
def test_a_stack_without_instances_is_refused(stack: str) -> None:
    with pytest.raises(LaunchError, match=f"stack {stack} has no running instance"):
        hosts_of_stack(stack, region=None, known=INSTANCES, default_slots=1)


@pytest.mark.parametrize("stack", [{"nodes": 2, "kind": "p4d.24xlarge", "login": True}], indirect=True)
def test_a_stack_that_is_smaller_than_it_should_be_is_not_used_silently(stack: str) -> None:
    login = next(one for one in instances_of(stack) if one["InstanceType"] == "t3.small")
    client("ec2").stop_instances(InstanceIds=[login["InstanceId"]])  # which no run needs
    worker = next(one for one in instances_of(stack) if one["InstanceType"] != "t3.small")
    client("autoscaling").set_instance_health(InstanceId=worker["InstanceId"], HealthStatus="Unhealthy")
    with pytest.raises(LaunchError, match=r"should have 2 instances, but only 1 are running .*InService, Unhealthy"):
        hosts_of_stack(stack, region=None, known=INSTANCES, default_slots=1)


@pytest.mark.parametrize("stack", [{"nodes": 2, "kind": "p4d.24xlarge"}], indirect=True)
def test_an_instance_that_ec2_does_not_know_yet_is_one_to_wait_for(stack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group lists a new instance before DescribeInstances does, which then refuses all ids."""
    members = stack_module._members
    new = _Member("i-0123456789abcdef0", f"{stack}-Workers", is_healthy=False, state="Pending, Healthy")

    def with_new(client: Any, groups: list[str]) -> tuple[int, list[_Member]]:
        desired, found = members(client, groups)
        return desired + 1, [*found, new]

    monkeypatch.setattr(stack_module, "_members", with_new)
    with pytest.raises(TooFewHostsError, match="i-0123456789abcdef0 is not described, Pending, Healthy"):
        hosts_of_stack(stack, region=None, known=INSTANCES, default_slots=1)
    assert len(hosts_of_stack(stack, region=None, known=INSTANCES, default_slots=1, enough=2).hosts) == 2


@pytest.mark.slow
@pytest.mark.parametrize("stack", [{"nodes": 2, "kind": "p4d.24xlarge"}], indirect=True)
def test_min_nodes_accepts_fewer_hosts_and_a_handle_finds_those_there_are(stack: str) -> None:
    client("autoscaling").set_instance_health(InstanceId=instances_of(stack)[0]["InstanceId"], HealthStatus="Unhealthy")
    [left] = hosts_of_stack(stack, region=None, known=INSTANCES, default_slots=1, enough=1).hosts
    with pytest.raises(LaunchError, match="only 1 are running"):
        SshBackend(SshLaunch(stack=stack, stack_wait_s=0))
    assert [host.address for host in SshBackend(SshLaunch(stack=stack, min_nodes=1)).hosts] == [left.address]
    # A handle names the stack, so that it finds the hosts that there are then.
    handle = JobHandle("ssh", f"stack={stack}@us-east-1", "/efs/runs/a")
    assert [host.address for host in SshBackend.for_handle(handle).hosts] == [left.address]


OUTPUTS = {
    "HeadGroup": "Head",
    "WorkerGroup": "Workers",
    "Access": "ssh",
    "LoginUser": "ubuntu",
    "Python": "/opt/pytorch/bin/python",
    "RunRoot": "/efs/maskfleet",
}


def ours(monkeypatch: pytest.MonkeyPatch, *, access: str = "ssh", head: str = "m6i.xlarge", workers: int = 2) -> None:
    """A stack of our template: AWS's answers for a head node with a public address, and for workers without one."""
    # Clients take a second to make, and nothing is asked of them here.
    monkeypatch.setattr(stack_module, "aws_session", lambda *_, **__: SimpleNamespace(region_name="us-east-1"))
    monkeypatch.setattr(stack_module, "aws_client", lambda *_: SimpleNamespace(close=lambda: None))
    kinds = {"i-head": head} | {f"i-{number}": "g5.12xlarge" for number in range(1, workers + 1)}
    addresses = {name: f"10.0.0.{number}" for number, name in enumerate(kinds)}
    monkeypatch.setattr(stack_module, "_resources", lambda *_: ({**OUTPUTS, "Access": access}, ["Head", "Workers"], []))
    members = [_Member(name, "Head" if name == "i-head" else "Workers") for name in kinds]
    monkeypatch.setattr(stack_module, "_members", lambda *_: (3, members))
    described = [
        {
            "InstanceId": name,
            "InstanceType": kind,
            "PrivateIpAddress": addresses[name],
            "State": {"Name": "running"},
            **({"PublicIpAddress": "203.0.113.7"} if name == "i-head" and access == "ssh" else {}),
        }
        for name, kind in kinds.items()
    ]
    monkeypatch.setattr(stack_module, "_described", lambda *_: described)


def test_workers_of_our_template_are_reached_through_the_head_node(monkeypatch: pytest.MonkeyPatch) -> None:
    ours(monkeypatch)
    cluster = cluster_of(SshLaunch(stack="fleet"))
    assert [host.address for host in cluster.hosts] == ["ubuntu@10.0.0.1", "ubuntu@10.0.0.2"]
    assert [host.slots for host in cluster.hosts] == [4, 4]
    routes = cluster.routes
    assert (routes.jump_for("10.0.0.1"), routes.target("10.0.0.0")) == ("10.0.0.0", "203.0.113.7")
    assert routes.options("10.0.0.1") == {"host_key_alias": "i-1"}
    launch = cluster.launch
    assert (launch.run_root, launch.python, launch.region) == ("/efs/maskfleet", "/opt/pytorch/bin/python", "us-east-1")
    assert launch.hosts_command == HOSTS_COMMAND


def test_what_the_launch_section_says_wins_over_the_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    ours(monkeypatch)
    launch = cluster_of(SshLaunch(stack="fleet", user="me", run_root="/fsx/runs", python="/usr/bin/python3.12")).launch
    assert (launch.user, launch.run_root, launch.python) == ("me", "/fsx/runs", "/usr/bin/python3.12")


def test_with_session_manager_no_head_node_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    ours(monkeypatch, access="session-manager")
    routes = cluster_of(SshLaunch(stack="fleet")).routes
    assert routes.jump_for("10.0.0.1") is None
    assert routes.options("10.0.0.1")["proxy_command"] == session_command("i-1", "us-east-1")


def test_a_head_node_with_gpus_trains_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ours(monkeypatch, head="g5.12xlarge")
    cluster = cluster_of(SshLaunch(stack="fleet"))
    assert [host.address for host in cluster.hosts] == ["ubuntu@10.0.0.0", "ubuntu@10.0.0.1", "ubuntu@10.0.0.2"]
    assert cluster.routes.jump_for("10.0.0.0") is None


def test_a_head_node_without_gpus_is_no_host_even_before_the_workers_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    ours(monkeypatch, workers=0)
    with pytest.raises(LaunchError, match="should have 2 instances, but only 0 are running"):
        cluster_of(SshLaunch(stack="fleet", stack_wait_s=0))


def test_a_launch_waits_for_hosts_and_says_so_once() -> None:
    looks = iter([TooFewHostsError("only 1", remedy="wait"), TooFewHostsError("only 1", remedy="wait"), None])
    found, said, slept = StackHosts([], 0, "us-east-1"), [], []  # type: ignore[var-annotated]

    def look() -> StackHosts:
        error = next(looks)
        if error is not None:
            raise error
        return found

    assert wait_for_hosts(look, limit_s=60, say=said.append, sleep=slept.append) is found
    assert (said, slept) == (["only 1; waiting up to 60 s"], [15.0, 15.0])


def test_the_doctor_refuses_nodes_that_cannot_train(monkeypatch: pytest.MonkeyPatch) -> None:
    ours(monkeypatch)
    backend = SshBackend(SshLaunch(stack="fleet"))
    findings = [
        Finding("10.0.0.1", "disk", Verdict.WARN, "3 GiB free", "free some"),
        Finding("10.0.0.2", "gpus", Verdict.FAIL, "3 of 4", "replace it"),
    ]
    monkeypatch.setattr("maskfleet.launch.ssh.backend.examine_hosts", lambda *_, **__: findings)
    with pytest.raises(LaunchError, match=r"stack fleet cannot train yet:\n  10\.0\.0\.2: gpus: 3 of 4") as caught:
        backend.submit(backend.render(backend.job(recipe("demo"), name="a")))
    assert caught.value.remedy == "replace it"


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
    # Newer than moto's copy; tests/deploy/train/test_node_memory.py compares them with Karpenter's.
    assert {name.split(".")[0] for name in unlisted} <= {"g7e"}
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
