"""From a run to the CreateTrainingJob request, which botocore's service model validates."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from sagemaker_world import IMAGE, ROLE, Json, World, launch
from typer.testing import CliRunner

from maskfleet.cli.main import app
from maskfleet.config.base import replaced
from maskfleet.config.launch import SageMakerLaunch
from maskfleet.config.load import resolve
from maskfleet.config.recipes import RECIPES, recipe
from maskfleet.config.run import RunConfig
from maskfleet.errors import ConfigError, LaunchError
from maskfleet.launch.sagemaker.backend import SageMakerBackend
from maskfleet.launch.sagemaker.metrics import MORE_METRICS, metric_definitions
from maskfleet.launch.sagemaker.request import REQUEST_FILE, hyper_parameters
from maskfleet.log import SAGEMAKER_METRICS, metric_line

EFS = {"name": "train", "source": "efs", "uri": "/coco", "file_system_id": "fs-0123456789abcdef0"}
LOG = {"name": "log", "source": "efs", "uri": "/logs", "file_system_id": "fs-0123456789abcdef0", "read_only": False}
FSX = {"name": "train", "source": "fsx", "uri": "/abcdefgh/coco", "file_system_id": "fs-0123456789abcdef1"}
NETWORK = {"subnets": ["subnet-1"], "security_groups": ["sg-1"]}


def request(section: SageMakerLaunch, run: RunConfig | None = None, name: str = "r50") -> Json:
    backend = SageMakerBackend(section)
    found: Json = json.loads(backend.render(backend.job(run or recipe("demo"), name=name)).files[REQUEST_FILE])
    return found


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_hyper_parameters_describe_the_whole_run(name: str) -> None:
    changes = {
        "train.seed": 7,
        "train.base_lr": 1e-05,
        "data.train": ("a", "b: c", "null", "#d"),
        "train.weights": "/opt/ml/input/data/train/x y.npz",
        "model.backbone.weights": None,
        "checkpoint.every_minutes": 5.5,
    }
    run = replaced(recipe(name), changes)
    found = hyper_parameters(run)
    assert all(isinstance(value, str) for value in found.values())
    sets = [f"{field}={value}" for field, value in found.items() if field != "recipe"]
    assert resolve(recipe_name=found["recipe"], sets=sets).config == run


def test_a_run_that_does_not_fit_is_refused() -> None:
    run = replaced(recipe("demo"), {"data.train": tuple(f"set-{number}" for number in range(400))})
    with pytest.raises(LaunchError, match=r"data\.train has more than 2500 characters"):
        hyper_parameters(run)


@pytest.mark.parametrize("name", ["r50_fpn_1x", "faster_r50_fpn_1x", "r50_fpn_cascade_1x"])
def test_definitions_find_their_metric_and_no_other(name: str) -> None:
    definitions = metric_definitions(recipe(name))
    assert len(definitions) <= 40
    names = [one["Name"] for one in definitions]
    assert len(set(names)) == len(names)
    values = {one: float(index) + 0.5 for index, one in enumerate(names)}
    # A longer name that ends or begins like a defined one must not be taken for it.
    others = {f"x-{one}": -1.0 for one in names if "IoU" not in one}
    line = f"12:00:00 {metric_line(values | others)}"
    for one in definitions:
        assert [float(text) for text in re.findall(one["Regex"], line)] == [values[one["Name"]]]


def test_all_22_names_of_the_notebooks_are_defined_and_as_many_more_as_fit() -> None:
    names = [one["Name"] for one in metric_definitions(recipe("r50_fpn_1x"))]
    assert names == [name for name, _ in SAGEMAKER_METRICS] + list(MORE_METRICS)
    assert len(SAGEMAKER_METRICS) == 22
    assert "maskrcnn_loss/accuracy" not in [one["Name"] for one in metric_definitions(recipe("faster_demo"))]
    cascade = [one["Name"] for one in metric_definitions(recipe("r50_fpn_cascade_1x"))]
    assert "cascade_loss_stage3/fastrcnn_losses/box_loss" in cascade


def test_a_plain_job() -> None:
    found = request(launch(nodes=2))
    assert found["TrainingJobName"] == "r50"
    assert found["RoleArn"] == ROLE
    assert found["AlgorithmSpecification"]["TrainingImage"] == IMAGE
    assert found["ResourceConfig"] == {"InstanceType": "ml.g5.12xlarge", "InstanceCount": 2, "VolumeSizeInGB": 100}
    assert found["StoppingCondition"] == {"MaxRuntimeInSeconds": 400_000}
    assert found["CheckpointConfig"] == {"S3Uri": "s3://lab/out/r50/checkpoints", "LocalPath": "/opt/ml/checkpoints"}
    assert found["HyperParameters"]["data.root"] == "/opt/ml/input/data/train"
    assert found["HyperParameters"]["log.all_metrics"] == "true"
    assert found["RetryStrategy"] == {"MaximumRetryAttempts": 1}
    assert not {"VpcConfig", "ExperimentConfig"} & set(found)
    [channel] = found["InputDataConfig"]
    assert channel["InputMode"] == "File"
    assert channel["DataSource"]["S3DataSource"]["S3DataDistributionType"] == "FullyReplicated"


@pytest.mark.parametrize("uri", ["s3://lab", "s3://lab/", "s3://lab/data/coco", "s3://lab/data/coco/"])
def test_an_s3_channel_is_a_folder_because_a_prefix_also_fits_longer_names(uri: str) -> None:
    channels = request(launch(channels=[{"uri": uri}, {"name": "more", "uri": uri}]))["InputDataConfig"]
    sources = [one["DataSource"]["S3DataSource"] for one in channels]
    assert [one["S3DataType"] for one in sources] == ["S3Prefix", "S3Prefix"]
    # s3://lab/data/coco would copy s3://lab/data/coco-old/… too.
    assert {one["S3Uri"] for one in sources} == {f"{uri.rstrip('/')}/"}


def test_ranks_follow_from_the_instance_type() -> None:
    backend = SageMakerBackend(launch(), nodes=3)
    assert backend.job(recipe("demo"), name="a").slots == (4, 4, 4)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"spot": True}, {"EnableManagedSpotTraining": True}),
        (
            {"spot": True, "max_run_s": 100},
            {"StoppingCondition": {"MaxRuntimeInSeconds": 100, "MaxWaitTimeInSeconds": 86_500}},
        ),
        ({"warm_pool_s": 600}, {"ResourceConfig": {"KeepAlivePeriodInSeconds": 600}}),
        ({"retries": 0}, {"RetryStrategy": None}),
        ({"tags": {"team": "a"}}, {"Tags": [{"Key": "maskfleet", "Value": "r50"}, {"Key": "team", "Value": "a"}]}),
        ({"experiment": "e", "trial": "t"}, {"ExperimentConfig": {"ExperimentName": "e", "TrialName": "t"}}),
        (NETWORK, {"VpcConfig": {"SecurityGroupIds": ["sg-1"], "Subnets": ["subnet-1"]}}),
        ({"checkpoint_uri": "s3://lab/c"}, {"CheckpointConfig": {"S3Uri": "s3://lab/c"}}),
        ({"encrypt_traffic": True}, {"EnableInterContainerTrafficEncryption": True}),
        ({"volume_gib": 500}, {"ResourceConfig": {"VolumeSizeInGB": 500}}),
    ],
)
def test_fields_of_the_launch_section_reach_the_request(changes: Json, expected: Json) -> None:
    found = request(launch(**changes))
    for name, value in expected.items():
        if isinstance(value, dict):
            assert found[name] == {**found[name], **value}
        else:
            assert found.get(name) == value


def test_channels_on_file_systems() -> None:
    found = request(launch(channels=[EFS, LOG], **NETWORK))
    sources = [one["DataSource"]["FileSystemDataSource"] for one in found["InputDataConfig"]]
    assert [(one["FileSystemType"], one["FileSystemAccessMode"], one["DirectoryPath"]) for one in sources] == [
        ("EFS", "ro", "/coco"),
        ("EFS", "rw", "/logs"),
    ]
    [lustre] = request(launch(channels=[FSX], **NETWORK))["InputDataConfig"]
    assert lustre["DataSource"]["FileSystemDataSource"]["FileSystemType"] == "FSxLustre"
    assert "InputMode" not in lustre


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"spot": True, "experiment": "e", "trial": "t", "tags": {"a": "b"}},
        {"channels": [EFS, LOG], **NETWORK},
        {"channels": [FSX], **NETWORK},
        {"channels": [{"uri": "s3://lab/coco", "input_mode": "FastFile"}], "warm_pool_s": 600},
    ],
)
def test_what_dry_run_prints_is_what_is_sent(world: World, changes: Json) -> None:
    backend = SageMakerBackend(launch(**changes))
    rendered = backend.render(backend.job(recipe("demo"), name="r50"))
    backend.submit(rendered)  # the world validates it by botocore's model
    [body] = [body for name, _, body in world.requests if name == "CreateTrainingJob"]
    assert body == rendered.files[REQUEST_FILE].rstrip("\n").encode()


def test_dry_run_by_the_command_line_sends_nothing(world: World, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"recipe: demo\nlaunch:\n  on: sagemaker\n  image: {IMAGE}\n  role_arn: {ROLE}\n  instance: g5.12xlarge\n"
        "  output_uri: s3://lab/out\n  channels: [{uri: s3://lab/coco}]\n"
    )
    arguments = ["launch", "-c", str(file), "--name", "r50", "--nodes", "2", "--set", "TRAIN.BASE_LR=0.01", "--dry-run"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    head, body = done.stdout.split("\n", 1)
    assert head == f'# file "{REQUEST_FILE}"'
    found = json.loads(body)
    assert found["HyperParameters"]["train.base_lr"] == "0.01"
    assert world.requests == []
    done = CliRunner().invoke(app, [*arguments, "--set", "TRAIN.BASE_RL=1"])
    assert isinstance(done.exception, ConfigError)
    assert world.requests == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image": None}, "the training image is not set"),
        ({"role_arn": None}, r"launch\.role_arn is not set"),
        ({"output_uri": None}, r"launch\.output_uri is not set"),
        ({"channels": []}, "no channel train is set"),
        ({"channels": [EFS]}, "the job has no subnets"),
        ({"channels": [{**EFS, "file_system_id": None}], **NETWORK}, "names no efs file system"),
        ({"instance": "ml.p3.16xlarge"}, "V100"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_sent(changes: Json, words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        request(launch(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"data.root": "/home/me/coco"},
        {"data.root": "~/coco"},
        {"data.root": "../coco"},
        {"train.weights": "/home/me/w.npz"},
        {"model.backbone.weights": "~/w.npz"},
    ],
)
def test_files_of_this_machine_are_refused(changes: Json) -> None:
    with pytest.raises(LaunchError, match=next(iter(changes)).replace(".", r"\.")):
        request(launch(), replaced(recipe("demo"), changes))


def test_a_folder_in_the_channel_is_kept() -> None:
    run = replaced(recipe("demo"), {"data.root": "coco/2017"})
    assert request(launch(), run)["HyperParameters"]["data.root"] == "/opt/ml/input/data/train/coco/2017"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"channels": [{"uri": "/coco"}]}, "is not s3://bucket/prefix"),
        ({"channels": [{**EFS, "uri": "s3://lab/coco"}]}, "is a directory on efs"),
        ({"channels": [{**EFS, "input_mode": "FastFile"}]}, "only S3 data has input_mode FastFile"),
        ({"channels": [{"uri": "s3://lab/coco", "read_only": False}]}, "can only read S3 data"),
        ({"channels": [{"uri": "s3://lab/coco", "file_system_id": "fs-01234567"}]}, "belongs to source efs or fsx"),
        ({"channels": [{**LOG, "read_only": True}]}, "the job writes to channel log"),
        ({"channels": [EFS, EFS]}, "two channels have the same name"),
        ({"subnets": ["subnet-1"]}, "belong together"),
        ({"max_wait_s": 5}, "max_wait_s belongs to spot"),
        ({"spot": True, "max_wait_s": 5}, "at least max_run_s"),
        ({"spot": True, "warm_pool_s": 5}, "no warm pools of Spot"),
        ({"trial": "t"}, "trial belongs to an experiment"),
        ({"role_arn": "training"}, "role_arn"),
        ({"retries": 31}, "retries"),
        ({"max_run_s": 2_419_201}, "less than or equal to 2419200"),
        ({"tags": {"aws:team": "a"}}, "AWS refuses the tag aws:team=a"),
        ({"tags": {"team": "a*b"}}, r"AWS refuses the tag team=a\*b"),
        ({"tags": {"": "a"}}, "AWS refuses the tag =a"),
        ({"tags": {"team": "a" * 257}}, "AWS refuses the tag team="),
        ({"tags": {f"t{number}": "" for number in range(50)}}, "at most 49"),
    ],
)
def test_contradictions_in_the_launch_section(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        launch(**changes)
