"""Deploying, replacing, watching and deleting endpoints, against an account in memory."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from endpoint_world import EndpointWorld, endpoint_spec
from sagemaker_world import Refusal

from maskfleet.errors import ConfigError, LaunchError
from maskfleet.launch.sagemaker.endpoint import state
from maskfleet.launch.sagemaker.endpoint.deploy import deploy
from maskfleet.launch.sagemaker.endpoint.model import WEIGHTS, pack, upload, uploaded_uri
from maskfleet.launch.sagemaker.endpoint.remove import owned, remove_all, remove_versions
from maskfleet.launch.sagemaker.endpoint.request import endpoint_requests
from maskfleet.launch.sagemaker.endpoint.state import describe, our_endpoints, status_of, wait
from maskfleet.launch.sagemaker.files import extract
from maskfleet.launch.sagemaker.services import Services


class Clock:
    """Time that passes only while someone sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, duration_s: float) -> None:
        self.now += duration_s


def send(services: Services, *, replace: bool = False, **changes: Any) -> bool:
    return deploy(services, endpoint_spec(**changes), replace=replace, say=print)


def await_endpoint(services: Services, said: list[str], **changes: Any) -> None:
    clock = Clock()
    version = endpoint_requests(endpoint_spec(**changes))["CreateModel"]["ModelName"]
    wait(services, "shapes", version, said.append, sleep=clock.sleep, clock=clock)


def delete(services: Services, name: str) -> list[str]:
    said: list[str] = []
    clock = Clock()
    remove_all(services, owned(services, name), said.append, sleep=clock.sleep, clock=clock)
    return said


def test_the_requests_are_what_is_sent(hosting: EndpointWorld, services: Services) -> None:
    environment = (("MASKFLEET_STEP", "9"),)
    spec = endpoint_spec(subnets=("subnet-1",), security_groups=("sg-1",), environment=environment, ami=None)
    assert deploy(services, spec, replace=False, say=print)
    requests = endpoint_requests(spec)
    for name, request in requests.items():
        assert hosting.sent(name) == [request]
    model, config = requests["CreateModel"], requests["CreateEndpointConfig"]
    assert model["PrimaryContainer"]["Environment"] == {"MASKFLEET_STEP": "9"}
    assert model["VpcConfig"] == {"SecurityGroupIds": ["sg-1"], "Subnets": ["subnet-1"]}
    assert model["EnableNetworkIsolation"] is True
    assert config["ProductionVariants"][0]["InstanceType"] == "ml.g5.xlarge"
    assert {json.dumps(one["Tags"]) for one in requests.values()} == {'[{"Key": "maskfleet", "Value": "shapes"}]'}


def test_an_asynchronous_and_a_serverless_endpoint(hosting: EndpointWorld, services: Services) -> None:
    assert send(services, async_uri="s3://lab/async/shapes")
    output = hosting.sent("CreateEndpointConfig")[0]["AsyncInferenceConfig"]["OutputConfig"]
    assert output["S3OutputPath"] == "s3://lab/async/shapes/output"
    assert send(services, name="tiny", serverless_mib=4096, subnets=("subnet-1",), security_groups=("sg-1",), ami=None)
    model, config = hosting.sent("CreateModel")[1], hosting.sent("CreateEndpointConfig")[1]
    assert not model.keys() & {"VpcConfig", "EnableNetworkIsolation"}, "serverless endpoints have neither"
    serverless = {"MemorySizeInMB": 4096, "MaxConcurrency": 1}
    assert config["ProductionVariants"][0]["ServerlessConfig"] == serverless
    assert "InstanceType" not in config["ProductionVariants"][0]
    with pytest.raises(ConfigError, match="no asynchronous serverless"):
        endpoint_spec(serverless_mib=4096, async_uri="s3://lab/async")
    with pytest.raises(ConfigError, match="serverless endpoints have 1024, 2048, "):
        endpoint_spec(serverless_mib=4000)
    with pytest.raises(ConfigError, match="at most 200 requests at once, not 201"):
        endpoint_spec(serverless_mib=4096, count=201)


@pytest.mark.parametrize("role", ["hosting", "arn:aws:iam::111122223333:user/hosting", ""])
def test_a_role_without_its_arn_is_refused_before_anything_is_asked(role: str) -> None:
    with pytest.raises(ConfigError, match="is not the ARN of a role"):
        endpoint_spec(role_arn=role)


def test_the_same_deployment_twice_sends_nothing_the_second_time(hosting: EndpointWorld, services: Services) -> None:
    assert send(services)
    sent = len(hosting.requests)
    assert not send(services)
    assert all(name.startswith(("Describe", "ListTags")) for name, _, _ in hosting.requests[sent:])


def test_another_model_replaces_the_first_only_with_replace(hosting: EndpointWorld, services: Services) -> None:
    send(services)
    hosting.states = deque(["InService"])
    with pytest.raises(LaunchError, match="exists with another model") as refused:
        send(services, instance="ml.g5.2xlarge")
    assert "--replace" in refused.value.remedy
    before = hosting.names()
    assert send(services, replace=True, instance="ml.g5.2xlarge")
    said: list[str] = []
    await_endpoint(services, said, instance="ml.g5.2xlarge")
    assert said == ["shapes: Updating after 0 s", "shapes: InService after 10 s"]
    kept = endpoint_requests(endpoint_spec(instance="ml.g5.2xlarge"))["CreateModel"]["ModelName"]
    remove_versions(services, "shapes", said.append, keep=kept)
    assert hosting.names() == [["shapes"], [kept], [kept]]
    assert hosting.names()[1] != before[1]


@pytest.mark.parametrize("action", ["deploy", "replace", "delete"])
def test_an_endpoint_of_someone_else_is_never_touched(hosting: EndpointWorld, services: Services, action: str) -> None:
    send(services)
    hosting.states = deque(["InService"])
    hosting.tags[hosting.hosted["shapes"]["EndpointArn"]] = [{"Key": "maskfleet", "Value": "other"}]
    before = hosting.names()
    actions = {
        "deploy": lambda: send(services, instance="ml.g5.2xlarge"),
        "replace": lambda: send(services, replace=True, instance="ml.g5.2xlarge"),
        "delete": lambda: delete(services, "shapes"),
    }
    with pytest.raises(LaunchError, match="was not made by maskfleet"):
        actions[action]()
    assert hosting.names() == before
    assert list(our_endpoints(services)) == []


def test_what_was_created_before_a_refusal_is_removed(hosting: EndpointWorld, services: Services) -> None:
    message = "The account-level service limit 'ml.g5.xlarge for endpoint usage' is 0 Instances"
    hosting.failing["CreateEndpoint"] = deque([Refusal("ResourceLimitExceeded", message)])
    with pytest.raises(LaunchError, match="quota for this instance type is too small") as refused:
        send(services)
    assert "Service Quotas" in refused.value.remedy
    assert hosting.names() == [[], [], []]
    hosting.failing["CreateEndpoint"] = deque([Refusal("AccessDeniedException", "not authorized to perform")])
    with pytest.raises(LaunchError, match="not allowed to deploy endpoint shapes"):
        send(services)
    assert hosting.names() == [[], [], []]


def test_an_endpoint_that_was_created_although_the_answer_got_lost_keeps_its_model(
    hosting: EndpointWorld, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = hosting._create_endpoint

    def lost(**given: Any) -> None:
        real(**given)
        raise Refusal("ValidationException", "Cannot create already existing endpoint")

    monkeypatch.setattr(hosting, "_create_endpoint", lost)
    with pytest.raises(LaunchError, match="already existing endpoint"):
        send(services)
    assert [len(names) for names in hosting.names()] == [1, 1, 1]
    assert not send(services)


def test_what_cannot_be_removed_after_a_refusal_is_said(hosting: EndpointWorld, services: Services) -> None:
    hosting.user_denies = {"CreateEndpoint", "DeleteEndpointConfig"}
    said: list[str] = []
    with pytest.raises(LaunchError, match="not allowed to deploy endpoint shapes"):
        deploy(services, endpoint_spec(), replace=False, say=said.append)
    assert "`maskfleet endpoint delete shapes` removes what is left" in said[0]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"model_uri": "s3://lab/out/none/model.tar.gz"}, "there is no model at s3://lab/out/none"),
        ({"image": "123456789012.dkr.ecr.us-west-2.amazonaws.com/maskfleet-train:2"}, "there is no image"),
        ({"image": "123456789012.dkr.ecr.eu-west-1.amazonaws.com/maskfleet-train:1"}, "the image is in eu-west-1"),
        ({"image": "docker.io/maskfleet:1"}, "not an image in ECR"),
        ({"role_arn": "arn:aws:iam::123456789012:role/none"}, "there is no role"),
        ({"count": 3}, "quota is 2 of ml.g5.xlarge for endpoint usage, and 3 are needed"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_created(
    hosting: EndpointWorld, services: Services, change: dict[str, Any], what: str
) -> None:
    with pytest.raises(LaunchError, match=what):
        send(services, **change)
    assert hosting.names() == [[], [], []]
    assert not hosting.sent("CreateModel")


def test_a_role_that_cannot_write_answers_is_refused_for_an_asynchronous_endpoint(
    hosting: EndpointWorld, services: Services
) -> None:
    hosting.role_denies = {"s3:PutObject"}
    with pytest.raises(LaunchError, match="may not s3:PutObject on arn:aws:s3:::lab/async/shapes/output/1"):
        send(services, async_uri="s3://lab/async/shapes")
    assert send(services), "a real-time endpoint writes nothing"


@pytest.mark.parametrize(
    ("reason", "cause", "has_lines"),
    [
        (
            "Unable to provision requested ML compute capacity due to InsufficientInstanceCapacity error.",
            "capacity",
            False,
        ),
        ("The primary container for production variant AllTraffic did not pass the ping health check.", "ping", True),
        ("CannotStartContainerError. Please ensure the model container starts correctly.", "container", True),
        ('Failed to download model data for container "container_1" from URL: "s3://lab/m".', "model data", False),
        ("The repository of your image 1.dkr.ecr/x does not grant ecr:BatchGetImage", "image", False),
        ("Image size 12704675783 is greater than supported size 10737418240", "image size", False),
        ("Something that AWS never said before.", None, True),
    ],
)
def test_a_failure_is_explained(
    hosting: EndpointWorld, services: Services, reason: str, cause: str | None, has_lines: bool
) -> None:
    send(services)
    hosting.states, hosting.reason = deque(["Creating", "Creating", "Failed"]), reason
    log = f"{state.LOG_GROUP}/shapes|AllTraffic/i-1"
    hosting.write(log, *(f"line {number}" for number in range(30)), "error: there is no checkpoint of step 9")
    said: list[str] = []
    with pytest.raises(LaunchError) as failed:
        await_endpoint(services, said)
    assert reason in failed.value.what
    assert (f"cause: {cause}." in failed.value.what) is (cause is not None)
    assert ("error: there is no checkpoint of step 9" in failed.value.what) is has_lines
    assert "line 9\n" not in failed.value.what
    assert "`maskfleet endpoint delete shapes`" in failed.value.remedy
    assert said[-1] == "shapes: Failed after 20 s"
    for instance in ("ml.g5.xlarge", "ml.g5.2xlarge"):
        with pytest.raises(LaunchError, match="is Failed and cannot be updated"):
            send(services, replace=True, instance=instance)


def test_an_update_that_fails_keeps_the_previous_model(hosting: EndpointWorld, services: Services) -> None:
    send(services)
    hosting.states = deque(["InService"])
    send(services, replace=True, instance="ml.g5.2xlarge")
    first = endpoint_requests(endpoint_spec())["CreateModel"]["ModelName"]
    hosting.hosted["shapes"]["EndpointConfigName"] = first  # as SageMaker does when it rolls back
    hosting.states, hosting.reason = deque(["RollingBack", "InService"]), "did not pass the ping health check"
    with pytest.raises(LaunchError, match="could not be updated, and answers with its previous model"):
        await_endpoint(services, [], instance="ml.g5.2xlarge")


def test_a_busy_service_does_not_end_the_wait(hosting: EndpointWorld, services: Services) -> None:
    send(services)
    hosting.failing["DescribeEndpoint"] = deque([Refusal("ThrottlingException", "Rate exceeded")] * 6)
    said: list[str] = []
    await_endpoint(services, said)
    assert said[0].startswith("shapes: not known: SageMaker is busy")
    assert said[-1].startswith("shapes: InService")


def test_delete_removes_all_versions_and_nothing_else(hosting: EndpointWorld, services: Services) -> None:
    send(services)
    hosting.states = deque(["InService"])
    send(services, replace=True, instance="ml.g5.2xlarge")
    send(services, name="shapes-0")  # its versions are called shapes-0-…
    hosting.states = deque(["InService"])
    foreign = endpoint_requests(endpoint_spec())["CreateModel"] | {"ModelName": "shapes-00000000", "Tags": []}
    hosting._create_model(**foreign)
    hosting.deleting_for = 2
    said = delete(services, "shapes")
    assert [text.split()[1] for text in said] == ["endpoint", "configuration", "configuration", "model", "model"]
    endpoints, configs, models = hosting.names()
    assert endpoints == ["shapes-0"]
    assert len(configs) == 1
    assert len(models) == 2
    assert "shapes-00000000" in models
    assert delete(services, "shapes") == []


def test_an_endpoint_in_creation_cannot_be_deleted_yet(hosting: EndpointWorld, services: Services) -> None:
    send(services)
    hosting.states = deque(["Creating"])
    with pytest.raises(LaunchError, match="is being created or updated") as refused:
        delete(services, "shapes")
    assert "endpoint status shapes" in refused.value.remedy


def test_the_status_names_model_image_and_checkpoint(hosting: EndpointWorld, services: Services) -> None:
    send(services, environment=(("MASKFLEET_STEP", "9"),))
    endpoint = describe(services, "shapes")
    assert endpoint is not None
    found = status_of(services, endpoint)
    assert (found.state, found.kind, found.instances) == ("Creating", "real-time", "1 × ml.g5.xlarge")
    assert found.model_uri.startswith("s3://lab/out/r50")
    assert found.environment == {"MASKFLEET_STEP": "9"}
    assert found.is_ours
    assert [one.name for one in our_endpoints(services)] == ["shapes"]
    assert describe(services, "none") is None


@pytest.mark.parametrize("name", ["", "a b", "-a", "a_b", "a" * 55, "a/b"])
def test_a_name_that_sagemaker_refuses_is_an_error_at_once(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be the name of an endpoint"):
        endpoint_spec(name=name)


def test_the_archive_is_the_same_for_the_same_weights_and_uploaded_once(
    hosting: EndpointWorld, services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tmp_path / "w.safetensors"
    weights.write_bytes(bytes(range(256)) * 100)
    first, second = tmp_path / "1.tar.gz", tmp_path / "2.tar.gz"
    pack(weights, first)
    weights.touch()
    with monkeypatch.context() as later:
        later.setattr("time.time", lambda: 2e9)
        pack(weights, second)
    assert first.read_bytes() == second.read_bytes()
    uri = uploaded_uri(first, "shapes", "s3://lab/maskfleet/")
    assert uri.startswith("s3://lab/maskfleet/endpoints/shapes/")
    assert upload(services, first, uri)
    assert not upload(services, first, uri)
    assert hosting.objects["lab", uri.removeprefix("s3://lab/")] == first.read_bytes()
    (tmp_path / "out").mkdir()
    assert extract(first, tmp_path / "out", []) == 1
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == weights.read_bytes()
