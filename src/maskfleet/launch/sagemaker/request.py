"""The CreateTrainingJob request of a job."""

from __future__ import annotations

import json
import posixpath
from typing import Any

from maskfleet.config.base import replaced
from maskfleet.config.launch import SageMakerChannel, SageMakerLaunch
from maskfleet.config.load import differences, resolve
from maskfleet.config.recipes import recipe
from maskfleet.config.run import DataConfig, RunConfig
from maskfleet.config.yaml import parse_value
from maskfleet.errors import ConfigError, LaunchError
from maskfleet.launch.job import JobSpec
from maskfleet.launch.sagemaker.metrics import metric_definitions
from maskfleet.launch.sagemaker.services import Json

REQUEST_FILE = "create-training-job.json"
TRAIN_CHANNEL = "train"
CHANNELS = "/opt/ml/input/data"  # where a job finds its channels
CHECKPOINTS = "/opt/ml/checkpoints"
MAX_PARAMETERS, MAX_VALUE = 100, 2500  # of a job; characters of a value
DAY_S = 86_400
_FILE_SYSTEMS = {"efs": "EFS", "fsx": "FSxLustre"}
_PAGE = "docs/run-anywhere/sagemaker.md"


def training_request(job: JobSpec, launch: SageMakerLaunch) -> Json:
    """The request that starts `job`; `launch` is complete, with what its stack gives."""
    run = RunConfig.model_validate(parse_value(job.run_yaml, where="the run"))
    output = _needed(launch.output_uri, "launch.output_uri", "output_uri=s3://bucket/prefix").rstrip("/")
    request: Json = {
        "TrainingJobName": job.name,
        "HyperParameters": hyper_parameters(run),
        "AlgorithmSpecification": {
            "TrainingImage": _needed(launch.image, "the training image", "image=ECR_IMAGE, or --image ECR_IMAGE"),
            "TrainingInputMode": "File",
            "MetricDefinitions": metric_definitions(run),
        },
        "RoleArn": _needed(launch.role_arn, "launch.role_arn", "role_arn=arn:aws:iam::…:role/…, or stack=NAME"),
        "InputDataConfig": [_channel(one) for one in launch.channels],
        "OutputDataConfig": {"S3OutputPath": output},
        "ResourceConfig": {
            "InstanceType": f"ml.{launch.instance.removeprefix('ml.')}",
            "InstanceCount": job.nodes,
            "VolumeSizeInGB": launch.volume_gib,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": launch.max_run_s},
        "CheckpointConfig": {
            "S3Uri": launch.checkpoint_uri or f"{output}/{job.name}/checkpoints",
            "LocalPath": CHECKPOINTS,
        },
        "EnableManagedSpotTraining": launch.spot,
        "EnableInterContainerTrafficEncryption": launch.encrypt_traffic,
        "Tags": [
            {"Key": name, "Value": value} for name, value in sorted({"maskfleet": job.name, **launch.tags}.items())
        ],
    }
    return {**request, **_optional(request, launch)}


def _optional(request: Json, launch: SageMakerLaunch) -> Json:
    """The parts of the request that only some launches have."""
    found: Json = {}
    if launch.subnets:
        found["VpcConfig"] = {"SecurityGroupIds": list(launch.security_groups), "Subnets": list(launch.subnets)}
    elif any(one.source != "s3" for one in launch.channels):
        raise LaunchError(
            "a file system is reached only from its own network, but the job has no subnets",
            remedy="--launch-set stack=NAME, or subnets and security_groups in the launch section",
        )
    if launch.warm_pool_s:
        found["ResourceConfig"] = {**request["ResourceConfig"], "KeepAlivePeriodInSeconds": launch.warm_pool_s}
    if launch.spot:
        longest = launch.max_wait_s or launch.max_run_s + DAY_S
        found["StoppingCondition"] = {**request["StoppingCondition"], "MaxWaitTimeInSeconds": longest}
    if launch.retries:
        found["RetryStrategy"] = {"MaximumRetryAttempts": launch.retries}
    if launch.experiment:
        trial = {"TrialName": launch.trial} if launch.trial else {}
        found["ExperimentConfig"] = {
            "ExperimentName": launch.experiment, **trial, "TrialComponentDisplayName": "Training",
        }  # fmt: skip
    return found


def hyper_parameters(run: RunConfig) -> dict[str, str]:
    """The settings of `run` as texts: its recipe, and the fields that differ from it.

    The container gives them to the same code as `--set`, so that the run there is the run here.
    """
    changed = {name: now for name, (_, now) in differences(recipe(run.recipe), run).items()}
    found = {"recipe": run.recipe, **{name: _text(value) for name, value in sorted(changed.items())}}
    too_long = [name for name, value in found.items() if len(value) > MAX_VALUE]
    if too_long or len(found) > MAX_PARAMETERS:
        what = f"{too_long[0]} has more than {MAX_VALUE} characters" if too_long else f"{len(found)} fields differ"
        raise LaunchError(
            f"the run does not fit into a job's hyper-parameters: {what}",
            remedy=f"start from a recipe that is closer; SageMaker allows {MAX_PARAMETERS} of {MAX_VALUE} characters",
        )
    sets = [f"{name}={value}" for name, value in found.items() if name != "recipe"]
    assert resolve(recipe_name=run.recipe, sets=sets).config == run, "hyper-parameters describe the whole run"
    return found


def _text(value: Any) -> str:
    """`value` as `--set` reads it, without quotes where it can be."""
    if isinstance(value, str) and "\n" not in value and value == value.strip():
        try:
            if parse_value(value, where="") == value:
                return value
        except ConfigError:
            return json.dumps(value)
    return json.dumps(value)


def data_in_channel(run: RunConfig, launch: SageMakerLaunch) -> RunConfig:
    """`run` with data.root as the container needs it: the folder in the channel `train`, or the channel itself."""
    if all(one.name != TRAIN_CHANNEL for one in launch.channels):
        raise LaunchError(
            f"no channel {TRAIN_CHANNEL} is set, so the job would have no data",
            remedy=f"write launch.channels as in {_PAGE}, with the S3 prefix or directory of the data",
        )
    for field, path in (("train.weights", run.train.weights), ("model.backbone.weights", run.model.backbone.weights)):
        if path is not None and path.startswith(("/", "~")) and not path.startswith(f"{CHANNELS}/"):
            raise LaunchError(
                f"{field} {path} is a file on this machine, and the job sees only its channels and its image",
                remedy=f"copy it into a channel, such as pretrained-models/ of {TRAIN_CHANNEL}, and set "
                f"{field}={CHANNELS}/{TRAIN_CHANNEL}/…",
            )
    channel = f"{CHANNELS}/{TRAIN_CHANNEL}"
    root = posixpath.normpath(run.data.root)
    if root == DataConfig().root:
        return replaced(run, {"data.root": channel, "log.all_metrics": True})
    folder = posixpath.normpath(posixpath.join(channel, root))
    if root.startswith("~") or not f"{folder}/".startswith(f"{channel}/"):
        raise LaunchError(
            f"data.root {run.data.root} is not in the channel {TRAIN_CHANNEL} of the job",
            remedy="leave data.root out, or set it to a folder in the channel, such as data.root=coco",
        )
    return replaced(run, {"data.root": folder, "log.all_metrics": True})


def _channel(channel: SageMakerChannel) -> Json:
    if channel.source == "s3":
        source: Json = {
            "S3DataSource": {
                "S3DataType": "S3Prefix",
                "S3Uri": f"{channel.uri.rstrip('/')}/",  # without a slash, s3://b/coco takes s3://b/coco-old/ too
                "S3DataDistributionType": "FullyReplicated",  # each rank reads its share of every epoch itself
            }
        }
        return {"ChannelName": channel.name, "DataSource": source, "InputMode": channel.input_mode}
    if channel.file_system_id is None:
        raise LaunchError(
            f"channel {channel.name} names no {channel.source} file system",
            remedy="set its file_system_id, or --launch-set stack=NAME with a stack that has one",
        )
    source = {
        "FileSystemDataSource": {
            "FileSystemId": channel.file_system_id,
            "FileSystemAccessMode": "ro" if channel.read_only else "rw",
            "FileSystemType": _FILE_SYSTEMS[channel.source],
            "DirectoryPath": channel.uri.rstrip("/") or "/",
        }
    }
    return {"ChannelName": channel.name, "DataSource": source}


def _needed(value: str | None, what: str, example: str) -> str:
    if not value:
        raise LaunchError(f"{what} is not set", remedy=f"--launch-set {example}; see {_PAGE}")
    return value
