"""What can be known before a job is sent: the doctor reports it, and a launch is refused for it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sagemaker_world import ACCOUNT, REGION, Json, World, launch
from typer.testing import CliRunner

from maskfleet.cli.main import app
from maskfleet.config.recipes import recipe
from maskfleet.errors import LaunchError
from maskfleet.launch.findings import Finding, Verdict
from maskfleet.launch.sagemaker.backend import SageMakerBackend
from maskfleet.launch.sagemaker.checks.image import TrainingImage
from maskfleet.launch.sagemaker.doctor import examine
from maskfleet.launch.sagemaker.services import Services

NETWORK = {"subnets": ["subnet-1"], "security_groups": ["sg-1"]}
EFS = {"name": "train", "source": "efs", "uri": "/coco", "file_system_id": "fs-0123456789abcdef0"}
FSX = {"name": "train", "source": "fsx", "uri": "/abcdefgh/coco", "file_system_id": "fs-0123456789abcdef1"}
INTERNET = {"DestinationCidrBlock": "0.0.0.0/0", "GatewayId": "igw-1"}
ENDPOINT = {"VpcEndpointId": "vpce-1", "VpcEndpointType": "Gateway", "State": "available"}

pytestmark = pytest.mark.slow  # it loads many service models


def refused(world: World, section: Json) -> LaunchError:
    """The error of a launch; nothing was sent for it."""
    backend = SageMakerBackend(launch(**section))
    rendered = backend.render(backend.job(recipe("demo"), name="r50"))
    with pytest.raises(LaunchError) as caught:
        backend.submit(rendered)
    assert world.sent("CreateTrainingJob") == []
    return caught.value


def accepted(world: World, **section: Any) -> None:
    backend = SageMakerBackend(launch(**section))
    backend.submit(backend.render(backend.job(recipe("demo"), name="r50")))
    assert len(world.sent("CreateTrainingJob")) == 1


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"image": "docker.io/me/train:1"}, "is not an image in ECR"),
        ({"image": f"{ACCOUNT}.dkr.ecr.eu-west-1.amazonaws.com/maskfleet-train:1"}, "the image is in eu-west-1"),
        ({"image": f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/maskfleet-train:2"}, "there is no image"),
        ({"image": f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/other:1"}, "there is no image"),
        ({"channels": [{"uri": "s3://lab/cocoa"}]}, "s3://lab/cocoa, the data of channel train, is empty"),
        ({"channels": [{"uri": "s3://lab/coc"}]}, "s3://lab/coc, the data of channel train, is empty"),
        ({"channels": [{"uri": "s3://other/coco"}]}, "there is no bucket other"),
        ({"output_uri": "s3://labb/out"}, "there is no bucket labb"),
        ({"checkpoint_uri": "s3://labb/out"}, "there is no bucket labb"),
        ({"role_arn": f"arn:aws:iam::{ACCOUNT}:role/other"}, "there is no role"),
        ({"nodes": 3}, "quota is 2 of ml.g5.12xlarge for training job usage, and 3 are needed"),
        ({"nodes": 2, "spot": True}, "quota is 1 of ml.g5.12xlarge for spot training job usage"),
        ({**NETWORK, "subnets": ["subnet-2"]}, "has not all of the subnets subnet-2"),
        ({**NETWORK, "security_groups": ["sg-2"]}, "not all in one VPC"),
        ({"experiment": "none"}, "there is no experiment none"),
        ({"experiment": "e", "trial": "none"}, "there is no trial none"),
        ({"experiment": "e", "trial": "u"}, "trial u belongs to experiment other"),
        ({"channels": [{**FSX, "uri": "/coco"}], **NETWORK}, "does not begin with the mount name /abcdefgh"),
    ],
)
def test_unfit_launches_are_refused(world: World, section: Json, words: str) -> None:
    error = refused(world, section)
    assert words in error.what
    assert error.remedy


def test_a_role_without_permission_is_named_with_what_it_lacks(world: World) -> None:
    world.role_denies = {"s3:PutObject", "ecr:BatchGetImage"}
    what = refused(world, {}).what
    assert "s3:PutObject on arn:aws:s3:::lab/out/*" in what
    assert f"ecr:BatchGetImage on arn:aws:ecr:{REGION}:{ACCOUNT}:repository/maskfleet-train" in what


def test_the_simulator_is_asked_about_the_resources_of_the_job(world: World) -> None:
    accepted(world, channels=[{"uri": "s3://lab/coco/"}], **NETWORK)
    asked = {
        (action, resource): request.get("ContextEntries")
        for request in world.sent("SimulatePrincipalPolicy")
        for action in request["ActionNames"]
        for resource in request["ResourceArns"]
    }
    assert asked["s3:GetObject", "arn:aws:s3:::lab/coco/*"] is None
    assert ("s3:PutObject", "arn:aws:s3:::lab/coco/*") not in asked
    assert ("s3:PutObject", "arn:aws:s3:::lab/out/*") in asked
    prefixes = [
        request["ContextEntries"][0]["ContextKeyValues"]
        for request in world.sent("SimulatePrincipalPolicy")
        if request["ActionNames"] == ["s3:ListBucket"]
    ]
    assert prefixes == [["coco/"], ["out/"]]
    group = f"arn:aws:logs:{REGION}:{ACCOUNT}:log-group:/aws/sagemaker/TrainingJobs:log-stream:job/algo-1"
    assert ("logs:PutLogEvents", group) in asked
    assert ("ec2:CreateNetworkInterface", f"arn:aws:ec2:{REGION}:{ACCOUNT}:network-interface/*") in asked


def test_a_role_that_sagemaker_may_not_assume(world: World) -> None:
    world.trusted = "ec2.amazonaws.com"
    assert "does not let sagemaker.amazonaws.com assume it" in refused(world, {}).what


@pytest.mark.parametrize("routes", [[], [INTERNET], [{"DestinationPrefixListId": "pl-1", "GatewayId": "vpce-2"}]])
def test_a_subnet_without_a_route_to_s3(world: World, routes: list[Json]) -> None:
    world.routes["subnet-1"] = routes
    world.endpoints = [ENDPOINT]
    assert "subnet subnet-1 has no route to S3" in refused(world, NETWORK).what


@pytest.mark.parametrize(
    ("routes", "endpoints"),
    [
        ([{"DestinationPrefixListId": "pl-1", "GatewayId": "vpce-1"}], [ENDPOINT]),
        ([], [{**ENDPOINT, "VpcEndpointType": "Interface", "PrivateDnsEnabled": True}]),
        ([{"DestinationCidrBlock": "0.0.0.0/0", "TransitGatewayId": "tgw-1"}], []),
    ],
)
def test_ways_to_s3(world: World, routes: list[Json], endpoints: list[Json]) -> None:
    world.routes["subnet-1"], world.endpoints = routes, endpoints
    accepted(world, **NETWORK)


@pytest.mark.parametrize(
    ("rules", "verdict"),
    [
        ([{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": "sg-1"}]}], Verdict.OK),
        ([{"IpProtocol": "tcp", "FromPort": 0, "ToPort": 65535, "IpRanges": [{"CidrIp": "10.0.0.0/16"}]}], Verdict.OK),
        ([{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": "sg-9"}]}], Verdict.WARN),
        ([{"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}], Verdict.WARN),
        ([], Verdict.WARN),
    ],
)
def test_groups_that_keep_the_instances_of_a_job_apart_are_a_warning(
    world: World, region: Services, rules: list[Json], verdict: Verdict
) -> None:
    world.rules = rules

    def groups(nodes: int) -> Finding:
        [found] = [one for one in examine(region, launch(nodes=nodes, **NETWORK)) if one.name == "security groups"]
        return found

    assert groups(2).verdict is verdict
    assert groups(1).verdict is Verdict.OK


def test_a_zone_without_a_mount_target(world: World) -> None:
    world.mount_zones = {"usw2-az2"}
    assert "has no mount target in us-west-2a" in refused(world, {"channels": [EFS], **NETWORK}).what
    world.mount_zones = {"usw2-az1"}
    accepted(world, channels=[EFS], **NETWORK)


def test_what_may_not_be_checked_is_a_warning_and_no_reason_to_refuse(world: World, region: Services) -> None:
    world.user_denies = {"GetRole", "ListServiceQuotas", "DescribeImages", "DescribeSubnets", "ListObjectsV2"}
    findings = examine(region, launch(**NETWORK))
    warned = {one.name for one in findings if one.verdict is Verdict.WARN}
    assert warned == {"role", "quota", "image", "subnets", "channel train"}
    assert all("it takes " in one.remedy for one in findings if one.verdict is Verdict.WARN)
    accepted(world, **NETWORK)


def test_the_doctor_by_the_command_line(world: World) -> None:
    sets = {"image": launch().image, "role_arn": launch().role_arn, "output_uri": "s3://lab/out"}
    options = [part for name, value in sets.items() for part in ("--launch-set", f"{name}={value}")]
    options += ["--launch-set", "channels=[{uri: s3://lab/coco}]", "--instance", "ml.g5.12xlarge", "--json"]
    done = CliRunner().invoke(app, ["doctor", "--on", "sagemaker", "--nodes", "2", *options])
    assert done.exit_code == 0, done.output
    assert {one["verdict"] for one in json.loads(done.stdout)} == {"ok"}
    done = CliRunner().invoke(app, ["doctor", "--on", "sagemaker", "--nodes", "9", *options])
    assert done.exit_code == 1
    assert [one["name"] for one in json.loads(done.stdout) if one["verdict"] == "fail"] == ["quota"]
    bare = CliRunner().invoke(app, ["doctor", "--on", "sagemaker", "--instance", "g5.12xlarge", "--json"])
    unset = [one["name"] for one in json.loads(bare.stdout) if one["found"] == "not set"]
    assert unset == ["image", "channel train", "output_uri", "role_arn"]
    assert {name for name, *_ in world.requests} & {"CreateTrainingJob", "StopTrainingJob"} == set()


def test_an_image_with_a_manifest_that_sagemaker_refuses(world: World, region: Services) -> None:
    world.manifest = "application/vnd.oci.image.manifest.v1+json"
    [image] = [one for one in examine(region, launch()) if one.name == "image"]
    assert image.verdict is Verdict.WARN
    assert world.manifest in image.found
    with pytest.raises(LaunchError, match="takes images only with docker's kind of manifest") as caught:
        accepted(world)
    assert "sagemaker-container.md" in caught.value.remedy


def test_a_quota_of_warm_pools_that_keeps_nothing_is_a_warning(world: World, region: Services) -> None:
    """SageMaker runs such a job, and releases its instances without a word."""

    def warm_pool() -> Finding:
        [found] = [one for one in examine(region, launch(warm_pool_s=600)) if one.name == "warm pool"]
        return found

    assert warm_pool().verdict is Verdict.WARN  # AWS lists no such quota
    world.quotas["ml.g5.12xlarge for training warm pool usage"] = 0.0
    assert warm_pool().verdict is Verdict.WARN
    assert "quota L-1" in warm_pool().remedy
    accepted(world, warm_pool_s=600)
    world.quotas["ml.g5.12xlarge for training warm pool usage"] = 1.0
    assert warm_pool().verdict is Verdict.OK
    assert not [one for one in examine(region, launch()) if one.name == "warm pool"]


def test_images_of_ecr() -> None:
    digest = f"sha256:{'0' * 64}"
    image = TrainingImage.parse(f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/team/train@{digest}")
    assert image is not None
    assert (image.repository, image.identifier) == ("team/train", {"imageDigest": digest})
    plain = TrainingImage.parse(f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/train")
    assert plain is not None
    assert plain.identifier == {"imageTag": "latest"}
    assert TrainingImage.parse("train:1") is None
