"""`maskfleet endpoint` on the command line: where model, image, role and network come from, and what is refused."""

from __future__ import annotations

import json
from collections import deque

import pytest
from endpoint_world import Command, EndpointWorld
from sagemaker_world import ACCOUNT, IMAGE, REGION, ROLE, launch

from maskfleet.config.recipes import recipe
from maskfleet.launch.sagemaker.backend import SageMakerBackend

pytestmark = pytest.mark.slow
HANDLE = f"sagemaker://{REGION}/r50"
OUTPUTS = {
    "HostingRoleArn": f"arn:aws:iam::{ACCOUNT}:role/hosting",
    "Subnets": "subnet-1,subnet-2",
    "SecurityGroups": "sg-1",
    "DataUri": "s3://lab/maskfleet",
}


@pytest.fixture
def job(hosting: EndpointWorld) -> EndpointWorld:
    """A finished job r50; endpoints answer at once."""
    hosting.states = deque(["InService"])
    hosting.routes["subnet-9"] = hosting.routes["subnet-1"]
    backend = SageMakerBackend(launch(subnets=["subnet-9"], security_groups=["sg-1"]))
    backend.submit(backend.render(backend.job(recipe("demo"), name="r50")))
    hosting.move("r50", "Completed", status="Completed")
    return hosting


def stack(world: EndpointWorld, **outputs: str) -> None:
    rows = [{"OutputKey": key, "OutputValue": value} for key, value in outputs.items()]
    world.stacks["sm"] = {"StackStatus": "CREATE_COMPLETE", "Outputs": rows}


def test_a_job_gives_its_model_image_role_and_network(job: EndpointWorld, command: Command) -> None:
    code, printed, said = command("endpoint", "deploy", "shapes", HANDLE, "--step", 9, "--score", 0.4, "--dry-run")
    assert code == 0, said
    requests = json.loads(printed)
    container = requests["CreateModel"]["PrimaryContainer"]
    assert container["ModelDataUrl"] == "s3://lab/out/r50/output/model.tar.gz"
    assert container["Environment"] == {"MASKFLEET_SCORE": "0.4", "MASKFLEET_STEP": "9"}
    assert (container["Image"], requests["CreateModel"]["ExecutionRoleArn"]) == (IMAGE, ROLE)
    assert requests["CreateModel"]["VpcConfig"]["Subnets"] == ["subnet-9"]
    variant = requests["CreateEndpointConfig"]["ProductionVariants"][0]
    assert variant["InferenceAmiVersion"] == "al2023-ami-sagemaker-inference-gpu-4-1"
    assert not job.sent("CreateModel")
    assert command("endpoint", "deploy", "shapes", HANDLE, "--wait")[:2] == (0, "shapes\n")
    assert [one["EndpointName"] for one in job.sent("CreateEndpoint")] == ["shapes"]


def test_the_stack_gives_role_network_and_bucket(job: EndpointWorld, command: Command) -> None:
    stack(job, **OUTPUTS)
    options = (
        "endpoint",
        "deploy",
        "shapes",
        HANDLE,
        "--stack",
        "sm",
        "--instance",
        "c5.xlarge",
        "--async",
        "--dry-run",
    )
    code, printed, said = command(*options)
    assert code == 0, said
    requests = json.loads(printed)
    assert requests["CreateModel"]["ExecutionRoleArn"] == OUTPUTS["HostingRoleArn"]
    assert requests["CreateModel"]["VpcConfig"] == {"SecurityGroupIds": ["sg-1"], "Subnets": ["subnet-1", "subnet-2"]}
    output = requests["CreateEndpointConfig"]["AsyncInferenceConfig"]["OutputConfig"]
    assert output["S3FailurePath"] == "s3://lab/maskfleet/async/shapes/failure"
    variant = requests["CreateEndpointConfig"]["ProductionVariants"][0]
    assert variant["InstanceType"] == "ml.c5.xlarge"
    assert "InferenceAmiVersion" not in variant, "it has no GPU"


@pytest.mark.parametrize(
    ("arguments", "what", "advice"),
    [
        (("shapes", HANDLE, "--last"), "only by its number", "--step N"),
        (("shapes", HANDLE, "--best", "--step", "3"), "exclude each other", "give one"),
        (("shapes", f"sagemaker://{REGION}/none"), "there is no job none", "check the handle"),
        (("shapes", HANDLE, "--region", "eu-west-1"), "is in us-west-2, not in eu-west-1", "--region"),
        (("shapes", "ssh://a/runs/r50"), "is no job on SageMaker", "maskfleet fetch"),
        (("shapes", HANDLE, "--async"), "no S3 prefix to write to", "--upload"),
        (("sha_pes", HANDLE), "cannot be the name of an endpoint", "letters, digits"),
        (("shapes", HANDLE, "--stack", "none"), "there is no stack none", "check its name"),
        (("shapes", HANDLE, "--stack", "sm"), "has no role for endpoints", "maskfleet infra up sagemaker"),
        (("shapes", "no/such/run", "--upload", "s3://lab"), "there is no no/such/run", "run directory"),
    ],
)
def test_what_does_not_fit_is_refused(
    job: EndpointWorld, command: Command, arguments: tuple[str, ...], what: str, advice: str
) -> None:
    stack(job, Subnets="subnet-1", SecurityGroups="sg-1")
    code, _, said = command("endpoint", "deploy", *arguments)
    assert code == 2
    assert what in said
    assert advice in said
    assert not job.sent("CreateModel")


@pytest.mark.parametrize(("state", "what"), [("InProgress", "it has no model yet"), ("Failed", "left no model")])
def test_a_job_without_a_model_is_refused(job: EndpointWorld, command: Command, state: str, what: str) -> None:
    job.move("r50", "Training", status=state)
    code, _, said = command("endpoint", "deploy", "shapes", HANDLE)
    assert code == 2
    assert what in said


def test_status_list_and_delete(job: EndpointWorld, command: Command) -> None:
    command("endpoint", "deploy", "shapes", HANDLE, "--wait")
    code, printed, _ = command("endpoint", "status", "shapes", "--json")
    assert (code, json.loads(printed)["state"]) == (0, "InService")
    assert "shapes  InService" in command("endpoint", "list")[1]
    job.states, job.reason = deque(["Failed"]), "did not pass the ping health check"
    code, printed, _ = command("endpoint", "status", "shapes")
    assert code == 1
    assert "cause: ping." in printed
    assert "its container printed nothing" in printed
    assert command("endpoint", "delete", "shapes", "--yes")[0] == 0
    assert job.names() == [[], [], []]
    assert "nothing of shapes is in us-west-2" in command("endpoint", "delete", "shapes")[2]
    assert "maskfleet has no endpoint in us-west-2" in command("endpoint", "list")[2]


def test_an_identity_without_permission_is_told_what_it_needs(job: EndpointWorld, command: Command) -> None:
    job.user_denies = {"CreateModel"}
    code, _, said = command("endpoint", "deploy", "shapes", HANDLE)
    assert code == 2
    assert "not allowed to deploy endpoint shapes" in said
    assert "sagemaker:CreateModel" in said
    assert "iam:PassRole" in said
