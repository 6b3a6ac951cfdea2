"""Jobs from launch to their end: status, cancel and explain, against a small stateful AWS."""

from __future__ import annotations

from collections import deque

import pytest
from sagemaker_world import REGION, Refusal, World, launch
from typer.testing import CliRunner

from maskfleet.cli.main import app
from maskfleet.config.recipes import recipe
from maskfleet.errors import LaunchError
from maskfleet.launch.backend import backend_of, parse_handle
from maskfleet.launch.job import JobHandle, JobState
from maskfleet.launch.sagemaker.backend import SageMakerBackend

pytestmark = pytest.mark.slow  # it loads many service models
HANDLE = f"sagemaker://{REGION}/r50"
FIRST, SECOND = "r50/algo-1-1794830400", "r50/algo-2-1794830400"


def start(name: str = "r50", nodes: int = 1) -> JobHandle:
    backend = SageMakerBackend(launch(nodes=nodes))
    return backend.submit(backend.render(backend.job(recipe("demo"), name=name)))


def state() -> JobState:
    handle = parse_handle(HANDLE)
    return backend_of(handle).status(handle).state


def explain() -> str:
    handle = parse_handle(HANDLE)
    return backend_of(handle).explain(handle)


def test_a_job_from_launch_to_its_end(world: World) -> None:
    assert str(start(nodes=2)) == HANDLE
    assert state() is JobState.PENDING
    world.move("r50", "Downloading", "Downloading input data")
    assert state() is JobState.PENDING
    world.move("r50", "Training", "Training in-progress")
    world.write(FIRST, "step: 10  epoch: 0  total_cost: 2.5", "saving", "step: 20  epoch: 0", "hello")
    handle = parse_handle(HANDLE)
    found = backend_of(handle).status(handle)
    assert (found.state, found.step, found.restarts) == (JobState.RUNNING, 20, 0)
    assert [(host.address, host.state) for host in found.hosts] == [("algo-1", "started"), ("algo-2", "not started")]
    assert found.events[-1].endswith("Training: Training in-progress")
    world.move("r50", "Completed", "Training job completed", "Completed")
    assert state() is JobState.DONE
    assert explain() == "The run is done; there is nothing to explain."


def test_a_spot_job_that_was_interrupted_counts_its_restarts(world: World) -> None:
    start()
    for secondary in ("Training", "Interrupted", "Starting"):
        world.move("r50", secondary, "Insufficient capacity error" if secondary == "Starting" else "")
    found = backend_of(parse_handle(HANDLE)).status(parse_handle(HANDLE))
    assert (found.state, found.restarts) == (JobState.PENDING, 1)
    assert "cause: capacity" in explain()


def test_the_command_line(world: World) -> None:
    start()
    shown = CliRunner().invoke(app, ["status", HANDLE])
    assert shown.exit_code == 0
    assert "pending: Starting, Launching requested ML instances" in shown.stdout
    assert "cancelled" in CliRunner().invoke(app, ["cancel", HANDLE]).stdout
    assert CliRunner().invoke(app, ["status", f"sagemaker://{REGION}/other"]).exit_code == 1


def test_cancel_is_safe_to_repeat(world: World) -> None:
    handle = start()
    backend = backend_of(handle)
    backend.cancel(handle)
    backend.cancel(handle)
    assert len(world.sent("StopTrainingJob")) == 1
    world.move("r50", "Stopped", "", "Stopped")
    backend.cancel(handle)
    assert len(world.sent("StopTrainingJob")) == 1
    assert state() is JobState.CANCELLED
    assert "--launch-set checkpoint_uri=s3://lab/out/r50/checkpoints" in explain()
    backend.cancel(JobHandle("sagemaker", REGION, "other"))


def test_a_job_with_a_log_channel_resumes_from_its_directory(world: World) -> None:
    system = {"source": "efs", "file_system_id": "fs-01234567", "uri": "/logs/r50", "read_only": False}
    channels = [{"uri": "s3://lab/coco"}, {"name": "log", **system}]
    backend = SageMakerBackend(launch(channels=channels, subnets=["subnet-1"], security_groups=["sg-1"]))
    handle = backend.submit(backend.render(backend.job(recipe("demo"), name="r50")))
    world.move("r50", "Stopped", "", "Stopped")
    assert "checkpoint_uri" not in explain()
    assert "with the same channel log: its directory /logs/r50 of fs-01234567 has the checkpoints" in explain()
    with backend.files(handle) as files, pytest.raises(LaunchError, match="has no such file in S3") as absent:
        files.entries()
    assert "/logs/r50 of fs-01234567" in absent.value.remedy


def test_cancel_of_a_job_that_ends_meanwhile_does_nothing(world: World) -> None:
    handle = start()
    world.failing["StopTrainingJob"] = deque([Refusal("ValidationException", "the job is in status Completed")])
    backend_of(handle).cancel(handle)


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("CapacityError: Unable to provision requested ML compute capacity.", "capacity"),
        ("ClientError: Cannot pull algorithm container. Either the image does not exist or its permissions …", "image"),
        ("ClientError: Data download failed:S3 key: s3://lab/coco matched no files on s3", "empty channel"),
        ("ClientError: Data download failed:AccessDenied (403): Access Denied", "permission"),
        ("ClientError: Unable to mount file system: fs-1 directory path: /a", "file system"),
        ("ClientError: Not enough IP: subnet-1 has not enough free IP addresses", "network"),
        ("InternalServerError: We encountered an internal error. Please try again.", "internal error"),
        ("ClientError: No space left on device", "disk full"),
        (
            "ClientError: Artifact upload failed:Please ensure that the subnet's route table has a route to an S3 VPC "
            "endpoint or a NAT device, and both the security groups and the subnet's network ACL allow …",
            "network",
        ),
        ("ClientError: Failed to download data. ListObjectsV2 failed: Unable to execute request to S3", "network"),
        ("ClientError: Data download failed:PermanentRedirect (301): The bucket is in this region: …", "bucket region"),
        ("ClientError: Please use an instance type with more memory, or reduce the size of job data", "host memory"),
        (
            "ClientError: CannotStartContainerError. Please make sure the container can be run with 'docker run "
            "<image> train'.",
            "entry point",
        ),
    ],
)
def test_reasons_that_sagemaker_gives(world: World, reason: str, cause: str) -> None:
    start()
    world.move("r50", "Failed", "", "Failed", reason)
    assert state() is JobState.FAILED
    text = explain()
    assert f"cause: {cause}." in text
    assert f"seen in: {reason}" in text


def test_a_failing_rank_is_named_with_its_words(world: World) -> None:
    start(nodes=2)
    world.write(FIRST, "step: 10  epoch: 0", at_ms=0)
    world.write(
        SECOND,
        "[rank5]: Traceback (most recent call last):",
        '[rank5]:   File "a.py", line 1, in f',
        "[rank5]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        at_ms=5000,
    )
    world.write(FIRST, "error: lost another rank", "  → see its log", at_ms=9000)
    world.move("r50", "Failed", "", "Failed", "AlgorithmError: rank 5: internal error, exit code: 1")
    handle = parse_handle(HANDLE)
    assert backend_of(handle).status(handle).exit_code == 1
    text = explain()
    assert "First to fail was rank 5" in text
    assert "cause: gpu memory." in text


def test_without_a_log_the_reason_has_the_words(world: World) -> None:
    start()
    world.move("r50", "Failed", "", "Failed", "AlgorithmError: rank 0: error: there is no folder /x, exit code: 2")
    assert "there is no folder /x" in explain()


@pytest.mark.parametrize(
    ("secondary", "field"), [("MaxRuntimeExceeded", "max_run_s"), ("MaxWaitTimeExceeded", "max_wait_s")]
)
def test_a_job_that_reached_a_limit_has_failed(world: World, secondary: str, field: str) -> None:
    start()
    world.move("r50", secondary, "", "Stopped")
    assert state() is JobState.FAILED
    assert f"raise launch.{field}" in explain()
    assert "checkpoint_uri=s3://lab/out/r50/checkpoints" in explain()


def test_a_name_in_use_is_refused_before_anything_is_sent(world: World) -> None:
    start()
    with pytest.raises(LaunchError, match="is pending already"):
        start()
    world.move("r50", "Stopped", "", "Stopped")
    with pytest.raises(LaunchError, match="uses each name only once") as caught:
        start()
    assert "checkpoint_uri=s3://lab/out/r50/checkpoints" in caught.value.remedy
    assert len(world.sent("CreateTrainingJob")) == 1


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        (Refusal("ResourceInUse"), "at the same moment"),
        (Refusal("ResourceLimitExceeded", "The account-level service limit is 0 Instances"), "quota for this instance"),
        (
            Refusal("ValidationException", "Could not assume role arn:aws:iam::1:role/a"),
            "may not use the execution role",
        ),
        (
            Refusal("AccessDeniedException", "User is not authorized to perform: iam:PassRole"),
            "not allowed to start job",
        ),
        (Refusal("ValidationException", "1 validation error detected"), "1 validation error detected"),
    ],
)
def test_what_sagemaker_refuses(world: World, refusal: Refusal, words: str) -> None:
    world.failing["CreateTrainingJob"] = deque([refusal])
    with pytest.raises(LaunchError, match=words):
        start()


@pytest.mark.parametrize(
    "handle", ["sagemaker://nowhere/r50", "sagemaker:///r50", f"sagemaker://{REGION}/a_b", f"{HANDLE}/x"]
)
def test_handles_that_name_no_job(world: World, handle: str) -> None:
    with pytest.raises(LaunchError):
        backend_of(parse_handle(handle)).status(parse_handle(handle))
    assert world.requests == []


def test_outputs_of_a_stack_complete_the_launch_section(world: World) -> None:
    outputs = {
        "TrainingRoleArn": "arn:aws:iam::123456789012:role/training",
        "Subnets": "subnet-1",
        "SecurityGroups": "sg-1",
        "DataUri": "s3://lab/teams",
        "FsxFileSystemId": "fs-0123456789abcdef1",
        "FsxMountName": "abcdefgh",
    }
    rows = [{"OutputKey": name, "OutputValue": value} for name, value in outputs.items()]
    world.stacks["sm"] = {"StackStatus": "CREATE_COMPLETE", "Outputs": rows}
    section = launch(
        stack="sm", role_arn=None, output_uri=None, channels=[{"name": "train", "source": "fsx", "uri": "/coco"}]
    )
    backend = SageMakerBackend(section)
    backend.submit(backend.render(backend.job(recipe("demo"), name="r50")))
    [sent] = world.sent("CreateTrainingJob")
    assert sent["OutputDataConfig"]["S3OutputPath"] == "s3://lab/teams/output"
    assert sent["VpcConfig"] == {"SecurityGroupIds": ["sg-1"], "Subnets": ["subnet-1"]}
    source = sent["InputDataConfig"][0]["DataSource"]["FileSystemDataSource"]
    assert (source["FileSystemId"], source["DirectoryPath"]) == ("fs-0123456789abcdef1", "/abcdefgh/coco")


@pytest.mark.parametrize("status", ["ROLLBACK_COMPLETE", "CREATE_IN_PROGRESS", "UPDATE_ROLLBACK_FAILED"])
def test_a_stack_that_is_not_complete_is_refused(world: World, status: str) -> None:
    world.stacks["sm"] = {"StackStatus": status}
    backend = SageMakerBackend(launch(stack="sm"))
    with pytest.raises(LaunchError, match=status):
        backend.job(recipe("demo"), name="a")
    with pytest.raises(LaunchError, match="there is no stack none"):
        SageMakerBackend(launch(stack="none")).job(recipe("demo"), name="a")


@pytest.mark.parametrize("code", ["ThrottlingException", "AccessDeniedException"])
def test_status_does_not_wait_for_a_log_that_cannot_be_read(world: World, code: str) -> None:
    handle = start()
    world.move("r50", "Training")
    world.write(FIRST, "step: 10")
    world.failing["GetLogEvents"] = deque([Refusal(code)])
    found = backend_of(handle).status(handle)
    assert (found.state, found.step) == (JobState.RUNNING, None)
    assert found.events[-1].startswith("step unknown: ")
