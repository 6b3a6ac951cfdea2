"""The template of the EC2 cluster: what it creates with which parameters, in which order, and what it keeps."""

from __future__ import annotations

import itertools
import runpy
from functools import cache
from typing import Any

import pytest
from cfn_template import Stack, read_template
from ruamel.yaml import YAML

from maskfleet.launch.instances import INSTANCES
from maskfleet.system.deploy_files import deploy_path
from tools import ROOT

PATH = deploy_path("cloudformation") / "ec2-cluster.yaml"
TEMPLATE = read_template(PATH)
GIVEN = {"S3Bucket": "my-bucket", "KeyName": "me"}
EXISTING = {"VpcId": "vpc-0123456789abcdef0", "PrivateSubnetId": "subnet-0123456789abcdef0"}
CREATE_LIMIT = 51_200  # bytes of a template that is sent to CloudFormation directly
POLICIES = ("DeletionPolicy", "UpdateReplacePolicy")
USER_DATA_LIMIT = 16_384  # bytes, before base64


def stack(**parameters: Any) -> Stack:
    """The template with parameters that it must accept."""
    found = Stack(TEMPLATE, **{**GIVEN, **parameters})
    assert found.refusals() == []
    return found


@cache
def all_stacks() -> list[Stack]:
    """Every combination of the choices that change which resources exist."""
    choices: list[tuple[dict[str, Any], ...]] = [
        ({}, {**EXISTING, "PublicSubnetId": "subnet-00000000"}),
        ({}, {"SshCidr": "203.0.113.7/32"}),
        ({}, {"EfsId": "fs-01234567"}, {"EfsId": "fs-0123456789abcdef0", "EfsSecurityGroupId": "sg-01234567"}),
        ({}, {"LustreStorageGiB": 1200}, {"LustreStorageGiB": 2400, "LustreDeploymentType": "PERSISTENT_2"}),
        ({}, {"PurchaseOption": "spot"}, {"CapacityReservationId": "cr-0123456789abcdef0"}),
    ]
    return [stack(**{k: v for one in chosen for k, v in one.items()}) for chosen in itertools.product(*choices)]


def test_the_generated_parts_are_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "cluster_template.py"))
    text = PATH.read_text(encoding="utf-8")
    assert script["updated"](text) == text, "run scripts/cluster_template.py"


def test_the_template_needs_no_transform() -> None:
    # With AWS::LanguageExtensions, CloudFormation refuses RetainExceptOnCreate, and asks for CAPABILITY_AUTO_EXPAND.
    assert "Transform" not in TEMPLATE
    policies = [body[key] for body in TEMPLATE["Resources"].values() for key in POLICIES if key in body]
    assert {next(iter(one)) for one in policies if not isinstance(one, str)} == {"Fn::If"}


def test_no_iam_resource_has_a_name_which_would_need_another_capability() -> None:
    names = {"RoleName", "InstanceProfileName", "ManagedPolicyName", "UserName", "GroupName"}
    for one in all_stacks():
        for name, body in one.resources.items():
            assert not body["Type"].startswith("AWS::IAM") or names.isdisjoint(body["Properties"]), name


def test_the_template_can_be_sent_to_cloudformation_directly() -> None:
    assert len(PATH.read_bytes()) < CREATE_LIMIT


def test_every_combination_refers_only_to_resources_that_exist() -> None:
    for one in all_stacks():
        for name in one.resources:
            text = repr({key: one.resources[name].get(key) for key in ("Properties", "Metadata", "DependsOn")})
            for other in TEMPLATE["Resources"].keys() - one.resources.keys():
                assert f"<{other}>" not in text, (name, other, one.parameters)
                assert f"<{other}." not in text, (name, other, one.parameters)
        assert all(one.outputs.values())


@pytest.mark.parametrize(
    "cidr",
    [
        "0.0.0.0/0",
        "::/0",
        "0.0.0.0/8",
        "128.0.0.0/1",
        "10.0.0.0/7",
        "203.0.113.7",
        "203.0.113.300/32",
        "1.2.3.4/33",
        "x",
    ],
)
def test_ssh_from_everywhere_and_malformed_ranges_are_refused(cidr: str) -> None:
    assert Stack(TEMPLATE, **GIVEN, SshCidr=cidr).refusals() == ["SshCidr"]


@pytest.mark.parametrize("cidr", ["", "203.0.113.7/32", "10.0.0.0/8", "198.51.100.0/24"])
def test_ssh_is_admitted_from_a_given_range_only(cidr: str) -> None:
    one = stack(SshCidr=cidr)
    found = [
        rule
        for resource in one.resources.values()
        if resource["Type"] == "AWS::EC2::SecurityGroup"
        for rule in resource["Properties"].get("SecurityGroupIngress", [])
    ]
    assert [(rule["CidrIp"], rule["FromPort"], rule["ToPort"]) for rule in found] == ([(cidr, 22, 22)] if cidr else [])


@pytest.mark.parametrize(
    ("parameters", "refusal"),
    [
        ({"S3Bucket": "s3://my-bucket"}, "S3Bucket"),
        ({"S3Prefix": "/data"}, "S3Prefix"),
        ({"S3Prefix": "data/"}, "S3Prefix"),
        ({"S3Prefix": "data/*"}, "S3Prefix"),
        ({"EfsId": "fs-0123"}, "EfsId"),
        ({"EfsId": "fs-0123456789abcdef"}, "EfsId"),
        ({"LoginUser": "a'; reboot; '"}, "LoginUser"),
        ({"WorkerInstanceType": "p3.16xlarge"}, "WorkerInstanceType"),
        ({"HeadInstanceType": "p5.48xlarge"}, "HeadInstanceType"),
        ({"WorkerCount": 0}, "WorkerCount"),
        ({"VpcId": "vpc-01234567"}, "VpcId requires PrivateSubnetId"),
        ({**EXISTING, "SshCidr": "203.0.113.7/32"}, "VpcId with SshCidr requires PublicSubnetId"),
        ({"PrivateSubnetId": "subnet-01234567"}, "PrivateSubnetId and PublicSubnetId require VpcId"),
        ({"EfsSecurityGroupId": "sg-01234567"}, "EfsSecurityGroupId requires EfsId"),
        ({"PurchaseOption": "capacity-block"}, "capacity-block requires CapacityReservationId"),
        (
            {"PurchaseOption": "spot", "CapacityReservationId": "cr-0123456789abcdef0"},
            "Spot instances cannot use a capacity reservation",
        ),
    ],
)
def test_bad_parameters_are_refused(parameters: dict[str, Any], refusal: str) -> None:
    assert Stack(TEMPLATE, **{**GIVEN, **parameters}).refusals() == [refusal]


@pytest.mark.parametrize("instance", INSTANCES.values(), ids=lambda one: one.name)
def test_a_worker_has_as_many_efa_interfaces_as_its_type(instance: Any) -> None:
    found = stack(WorkerInstanceType=instance.name).properties("WorkerTemplate")["LaunchTemplateData"]
    interfaces = found["NetworkInterfaces"]
    assert [one["InterfaceType"] for one in interfaces if one["InterfaceType"] != "interface"] == (
        ["efa"] if instance.efa == 1 else ["efa-only"] * instance.efa
    )
    # AWS's advice: the first card has IP and EFA, every other one EFA alone; an EFA-only interface is never the first.
    places = [(one["NetworkCardIndex"], one["DeviceIndex"]) for one in interfaces]
    cards = range(1, instance.efa)
    assert places == ([(0, 0)] if instance.efa < 2 else [(0, 0), (0, 1), *((card, 0) for card in cards)])
    assert all(one["Groups"] == ["<NodeSg>"] for one in interfaces)
    assert f"GPUS={instance.gpus}\n" in found["UserData"]


def test_every_security_group_of_an_efa_interface_admits_itself_in_both_directions() -> None:
    # A rule for 0.0.0.0/0 does not cover EFA, whose packets have no IP address.
    one = stack(SshCidr="203.0.113.7/32", HeadInstanceType="g6.12xlarge")
    [interface] = one.properties("HeadTemplate")["LaunchTemplateData"]["NetworkInterfaces"]
    assert interface["InterfaceType"] == "efa"
    for kind, peer in (("Ingress", "SourceSecurityGroupId"), ("Egress", "DestinationSecurityGroupId")):
        rules = [r["Properties"] for r in one.resources.values() if r["Type"] == f"AWS::EC2::SecurityGroup{kind}"]
        inside = {rule["GroupId"] for rule in rules if rule["GroupId"] == rule[peer] and rule["IpProtocol"] == "-1"}
        assert inside >= set(interface["Groups"])


def test_no_security_group_keeps_the_rule_that_allows_everything_out() -> None:
    for one in all_stacks():
        for name, resource in one.resources.items():
            if resource["Type"] == "AWS::EC2::SecurityGroup":
                rules = resource["Properties"]["SecurityGroupEgress"]
                assert rules, name
                assert all(rule["IpProtocol"] != "-1" for rule in rules), name


def test_lustre_is_created_after_the_rules_that_it_needs() -> None:
    # FSx answers InvalidNetworkSettings otherwise.
    one = stack(LustreStorageGiB=1200)
    assert one.needs("Lustre") >= {"LustreFromLustre", "LustreToLustre"}
    for name in ("LustreFromLustre", "LustreToLustre"):
        rule = one.properties(name)
        assert rule["FromPort"] <= 988
        assert rule["ToPort"] >= 1023


@pytest.mark.parametrize("group", ["HeadGroup", "WorkerGroup"])
def test_nodes_start_when_they_can_mount_and_reach_everything(group: str) -> None:
    for one in all_stacks():
        rules = {name for name, body in one.resources.items() if "SecurityGroup" in body["Type"]}
        before = one.needs(group)
        assert before >= rules
        routes = {f"{kind}{what}" for kind in ("Public", "Private") for what in ("DefaultRoute", "SubnetRoutes")}
        others = {"InstancePolicy", "EfsMountTarget", "Lustre", "LustreLink", "NatGateway", "S3Endpoint"}
        assert before >= (routes | others) & one.resources.keys()
    assert "EfsFromNodes" in stack().needs("EfsMountTarget")


def test_a_group_is_complete_when_its_nodes_report_and_replaced_nodes_wait_for_their_mounts() -> None:
    one = stack(MinWorkerCount=3, WorkerCount=4)
    for group, count in (("HeadGroup", 1), ("WorkerGroup", 3)):
        assert one.resources[group]["CreationPolicy"]["ResourceSignal"]["Count"] == count
        [hook] = one.properties(group)["LifecycleHookSpecificationList"]
        assert hook["LifecycleHookName"] == "ready"
        assert hook["LifecycleTransition"] == "autoscaling:EC2_INSTANCE_LAUNCHING"
        assert hook["DefaultResult"] == "ABANDON"
        assert "--lifecycle-hook-name ready" in user_data(one, group)


def user_data(one: Stack, group: str) -> str:
    text = one.properties(group.replace("Group", "Template"))["LaunchTemplateData"]["UserData"]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("group", ["HeadGroup", "WorkerGroup"])
def test_user_data_is_a_script_within_the_limit_of_ec2(group: str) -> None:
    for one in all_stacks():
        text = user_data(one, group)
        assert text.startswith("#!/bin/bash\nROLE=")
        assert len(text.encode()) < USER_DATA_LIMIT
        assert ("LUSTRE=''\n" in text) == ("Lustre" not in one.resources)


def test_the_names_that_a_script_reports_are_those_of_the_template() -> None:
    one = stack()
    for role, group in (("head", "HeadGroup"), ("worker", "WorkerGroup")):
        assert one.properties(group)["AutoScalingGroupName"] == f"fleet-{role}"
        assert f"ROLE='{role}'\n" in user_data(one, group)
        tags = {tag["Key"]: tag["Value"] for tag in one.properties(group)["Tags"] if tag["PropagateAtLaunch"]}
        assert tags == {"Name": f"fleet-{role}", "maskfleet:cluster": "fleet", "maskfleet:role": role}
        [alarm] = [
            body["Properties"]
            for body in one.resources.values()
            if body["Type"] == "AWS::CloudWatch::Alarm"
            and {"Name": "Role", "Value": role} in body["Properties"]["Dimensions"]
        ]
        assert alarm["Namespace"] == "maskfleet"
        assert alarm["MetricName"] == "UnhealthyGpus"


@pytest.mark.parametrize("name", ["Efs", "Lustre", "LustreLink"])
def test_file_systems_are_kept(name: str) -> None:
    body = stack(LustreStorageGiB=1200).resources[name]
    assert body["DeletionPolicy"] == "RetainExceptOnCreate"  # an empty one of a failed creation is deleted
    assert body["UpdateReplacePolicy"] == "Retain"


@pytest.mark.parametrize("size", [0, 1200])
def test_what_a_kept_lustre_needs_is_kept_with_it(size: int) -> None:
    one = stack(LustreStorageGiB=size)
    kept = {name for name, body in one.resources.items() if body.get("DeletionPolicy", "Delete") != "Delete"}
    if size == 0:
        assert kept == {"Efs"}
    else:
        # Nothing that is deleted may be used by what stays; the groups of the nodes are not.
        assert one.needs("Lustre") <= kept
        assert kept == {"Efs", "Lustre", "LustreLink"} | one.needs("Lustre")


def test_encryption_and_metadata_service() -> None:
    key = "arn:aws:kms:us-west-2:111122223333:key/abc"
    for one, expected in ((stack(LustreStorageGiB=1200), None), (stack(StorageKmsKeyArn=key), key)):
        for name in ("HeadTemplate", "WorkerTemplate"):
            data = one.properties(name)["LaunchTemplateData"]
            assert data["MetadataOptions"] == {"HttpTokens": "required", "HttpPutResponseHopLimit": 1}
            [volume] = data["BlockDeviceMappings"]
            assert volume["Ebs"]["Encrypted"] is True
            assert volume["Ebs"]["VolumeType"] == "gp3"
            assert volume["Ebs"].get("KmsKeyId") == expected
        assert one.properties("Efs")["Encrypted"] is True
        assert one.properties("Efs").get("KmsKeyId") == expected


def test_workers_have_no_public_address_and_the_head_node_only_with_ssh() -> None:
    for cidr in ("", "203.0.113.7/32"):
        one = stack(SshCidr=cidr)
        [head] = one.properties("HeadTemplate")["LaunchTemplateData"]["NetworkInterfaces"]
        worker = one.properties("WorkerTemplate")["LaunchTemplateData"]["NetworkInterfaces"][0]
        assert head["AssociatePublicIpAddress"] is bool(cidr)
        assert worker["AssociatePublicIpAddress"] is False
        assert one.properties("HeadGroup")["VPCZoneIdentifier"] == ["<PublicSubnet>" if cidr else "<PrivateSubnet>"]
        assert one.properties("WorkerGroup")["VPCZoneIdentifier"] == ["<PrivateSubnet>"]
        assert one.outputs["Access"] == ("ssh" if cidr else "session-manager")


@pytest.mark.parametrize(
    ("parameters", "market", "placed"),
    [
        ({}, None, True),
        ({"PurchaseOption": "spot"}, "spot", True),
        ({"CapacityReservationId": "cr-0123456789abcdef0"}, None, False),
        (
            {"PurchaseOption": "capacity-block", "CapacityReservationId": "cr-0123456789abcdef0"},
            "capacity-block",
            False,
        ),
    ],
)
def test_how_workers_are_paid(parameters: dict[str, Any], market: str | None, placed: bool) -> None:
    data = stack(**parameters).properties("WorkerTemplate")["LaunchTemplateData"]
    assert data.get("InstanceMarketOptions", {}).get("MarketType") == market
    assert ("Placement" in data) == placed
    wanted = parameters.get("CapacityReservationId")
    target = data.get("CapacityReservationSpecification", {}).get("CapacityReservationTarget", {})
    assert target.get("CapacityReservationId") == wanted


def test_an_existing_vpc_gets_no_network_of_ours() -> None:
    one = stack(**EXISTING)
    kinds = {body["Type"] for body in one.resources.values()}
    assert kinds.isdisjoint({f"AWS::EC2::{kind}" for kind in ("VPC", "Subnet", "Route", "NatGateway", "VPCEndpoint")})
    assert one.outputs["VpcId"] == EXISTING["VpcId"]
    assert one.outputs["PrivateSubnetId"] == EXISTING["PrivateSubnetId"]


def test_every_parameter_is_used_and_shown_in_a_group() -> None:
    text = PATH.read_text(encoding="utf-8")
    groups = TEMPLATE["Metadata"]["AWS::CloudFormation::Interface"]["ParameterGroups"]
    shown = [name for group in groups for name in group["Parameters"]]
    assert sorted(shown) == sorted(TEMPLATE["Parameters"])
    for name in TEMPLATE["Parameters"]:
        assert f"!Ref {name}" in text or f"${{{name}}}" in text, name


def test_the_shipped_file_has_no_yaml_aliases_which_cloudformation_does_not_document() -> None:
    events = YAML(typ="safe", pure=True).parse(PATH.read_text(encoding="utf-8"))
    assert [event for event in events if getattr(event, "anchor", None)] == []
