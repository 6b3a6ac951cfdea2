"""A small AWS for jobs on SageMaker: real boto3 clients, whose requests botocore's service models validate, and answers
from the state of this object instead of the network."""

from __future__ import annotations

import io
import json
import os
import re
from collections import deque
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
from botocore.model import OperationModel
from botocore.response import StreamingBody
from botocore.validate import ParamValidator

from maskfleet.config.launch import SageMakerLaunch
from maskfleet.launch.sagemaker import services
from maskfleet.system.aws import aws_client, aws_session

REGION, ACCOUNT = "us-west-2", "123456789012"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/training"
IMAGE = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/maskfleet-train:1"
START = datetime(2026, 11, 16, 12, 0, tzinfo=UTC)
PAGE = 3  # events of a page of CloudWatch
GROUP = "/aws/sagemaker/TrainingJobs"
Json = dict[str, Any]


def launch(**changes: Any) -> SageMakerLaunch:
    """A launch section that the world accepts, with changes."""
    section: Json = {
        "image": IMAGE,
        "role_arn": ROLE,
        "instance": "g5.12xlarge",
        "output_uri": "s3://lab/out",
        "channels": [{"name": "train", "uri": "s3://lab/coco"}],
        "region": REGION,
    }
    return SageMakerLaunch.model_validate({**section, **changes})


class Refusal(Exception):  # noqa: N818 - an answer
    """An error that a service answers with."""

    def __init__(self, code: str, message: str = "no") -> None:
        super().__init__(message)
        self.code = code
        self.members: Json = {}  # that its kind of error has beside code and message


class World:
    """The state of an account in one region. Fields may be changed by tests; requests are recorded."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, Json, bytes]] = []
        self.jobs: dict[str, Json] = {}
        self.streams: dict[str, list[tuple[int, str]]] = {}
        self.objects: dict[tuple[str, str], bytes] = {("lab", "coco/annotations/a.json"): b"{}"}
        self.quotas = {"ml.g5.12xlarge for training job usage": 2.0, "ml.g5.12xlarge for spot training job usage": 1.0}
        self.role_denies: set[str] = set()  # actions that the execution role may not do
        self.trusted = "sagemaker.amazonaws.com"
        self.user_denies: set[str] = set()  # operations that the user may not do
        self.images = {"maskfleet-train": {"1"}}
        self.manifest = "application/vnd.docker.distribution.manifest.v2+json"  # kind of those of the images
        self.routes: dict[str, list[Json]] = {
            "subnet-1": [{"DestinationCidrBlock": "0.0.0.0/0", "NatGatewayId": "nat-1"}]
        }
        self.endpoints: list[Json] = []
        self.rules: list[Json] = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": "sg-1"}]}]  # of each group
        self.mount_zones = {"usw2-az1", "usw2-az2"}
        self.stacks: dict[str, Json] = {}
        self.experiments = {"e": {"t"}, "other": {"u"}}
        self.failing: dict[str, deque[Refusal]] = {}  # by operation, answered before the real answer

    # What happens to jobs

    def move(self, name: str, secondary: str, message: str = "", status: str = "InProgress", reason: str = "") -> None:
        """Put the job into another state."""
        job = self.jobs[name]
        stamp = START + timedelta(minutes=len(job["SecondaryStatusTransitions"]))
        job["SecondaryStatusTransitions"].append({"Status": secondary, "StartTime": stamp, "StatusMessage": message})
        job |= {"TrainingJobStatus": status, "SecondaryStatus": secondary}
        if reason:
            job["FailureReason"] = reason

    def write(self, stream: str, *lines: str, at_ms: int = 0, step_ms: int = 1000) -> None:
        """Append lines to a log stream, one each `step_ms`."""
        events = self.streams.setdefault(stream, [])
        events += [(at_ms + index * step_ms, line) for index, line in enumerate(lines)]

    def sent(self, operation: str) -> list[Json]:
        return [request for name, request, _ in self.requests if name == operation]

    # Answers

    def before_build(self, params: Json, **_: Any) -> None:
        self._given = dict(params)

    def answer(self, model: OperationModel, params: Json, **_: Any) -> tuple[Any, Json]:
        """Instead of sending the request; botocore has validated it already."""
        given, name = self._given, model.name
        body = params["body"] if isinstance(params["body"], bytes) else b""
        self.requests.append((name, given, body))
        if model.service_model.service_name in ("sagemaker", "logs"):
            refuse_invalid(given, model.input_shape, "")
        try:
            if name in self.user_denies:
                raise Refusal("AccessDeniedException", f"not authorized to perform {name}")
            if self.failing.get(name):
                raise self.failing[name].popleft()
            parsed = getattr(self, f"_{re.sub(r'(?<!^)(?=[A-Z])', '_', name).lower()}")(**given) or {}
        except Refusal as refusal:
            error = {"Code": refusal.code, "Message": str(refusal)}
            answer = {"Error": error, "ResponseMetadata": {"HTTPStatusCode": 400}, **refusal.members}
            return SimpleNamespace(status_code=400), answer
        plain = {key: b"" if isinstance(value, StreamingBody) else value for key, value in parsed.items()}
        if model.output_shape is not None:
            report = ParamValidator().validate(plain, model.output_shape)
            assert not report.has_errors(), report.generate_report()
        parsed.setdefault("ResponseMetadata", {"HTTPStatusCode": 200, "HTTPHeaders": {}, "RetryAttempts": 0})
        return SimpleNamespace(status_code=200), parsed

    def _create_training_job(self, **given: Any) -> Json:
        name = given["TrainingJobName"]
        if "docker" not in self.manifest:
            image = given["AlgorithmSpecification"]["TrainingImage"]
            words = f"Unsupported manifest media type {self.manifest} for image {image}."
            raise Refusal("ValidationException", f"{words} Ensure that valid manifest media type is used")
        if name in self.jobs:
            raise Refusal("ResourceInUse", "Training job names must be unique within an AWS account and region")
        job = {key: value for key, value in given.items() if key != "Tags"}
        self.jobs[name] = job | {
            "TrainingJobArn": f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:training-job/{name}",
            "CreationTime": START,
            "SecondaryStatusTransitions": [],
            "ModelArtifacts": {
                "S3ModelArtifacts": f"{given['OutputDataConfig']['S3OutputPath']}/{name}/output/model.tar.gz"
            },
        }
        self.move(name, "Starting", "Launching requested ML instances")
        return {"TrainingJobArn": self.jobs[name]["TrainingJobArn"]}

    def _describe_training_job(self, *, TrainingJobName: str) -> Json:
        if TrainingJobName not in self.jobs:
            raise Refusal("ValidationException", "Requested resource not found.")
        return dict(self.jobs[TrainingJobName])

    def _stop_training_job(self, *, TrainingJobName: str) -> None:
        job = self.jobs.get(TrainingJobName)
        if job is None or job["TrainingJobStatus"] != "InProgress":
            raise Refusal("ValidationException", "The request was rejected because the training job is in status …")
        self.move(TrainingJobName, "Stopping", "Stopping the training job", "Stopping")

    def _describe_log_streams(self, *, logStreamNamePrefix: str, nextToken: str = "0", **_: Any) -> Json:
        if not self.streams:
            raise Refusal("ResourceNotFoundException", "The specified log group does not exist.")
        names = sorted(name for name in self.streams if name.startswith(logStreamNamePrefix))
        start = int(nextToken)
        more = {"nextToken": str(start + 1)} if start + 1 < len(names) else {}
        return {"logStreams": [{"logStreamName": name} for name in names[start : start + 1]], **more}

    def _get_log_events(
        self,
        *,
        logStreamName: str,
        startFromHead: bool,
        nextToken: str | None = None,
        limit: int = PAGE,
        **_: Any,
    ) -> Json:
        events = self.streams[logStreamName]
        if not startFromHead:
            return self.events_backward(events, nextToken, limit)
        # As AWS does: the first page may be empty with a token that leads on.
        start = -1 if nextToken is None else int(nextToken.removeprefix("f/"))
        end = 0 if start < 0 else min(start + limit, len(events))
        found = [_event(*one) for one in events[max(start, 0) : end]]
        return {"events": found, "nextForwardToken": f"f/{end}", "nextBackwardToken": "b/0"}

    @staticmethod
    def events_backward(events: list[tuple[int, str]], token: str | None, limit: int) -> Json:
        """As AWS answers from the end: pages cover spans of time, of which the newest has no events, and are small."""
        end = len(events) if token is None else int(token.removeprefix("b/"))
        start = end if token is None else max(0, end - min(limit, 2 * PAGE))
        found = [_event(*one) for one in events[start:end]]
        return {"events": found, "nextForwardToken": f"f/{end}", "nextBackwardToken": f"b/{start}"}

    def _list_objects_v2(self, *, Bucket: str, Prefix: str = "", MaxKeys: int = 1000, **_: Any) -> Json:
        if not any(bucket == Bucket for bucket, _ in self.objects):
            raise Refusal("NoSuchBucket")
        keys = sorted(key for bucket, key in self.objects if bucket == Bucket and key.startswith(Prefix))[:MaxKeys]
        rows = [{"Key": key, "Size": len(self.objects[Bucket, key]), "LastModified": START} for key in keys]
        return {"Contents": rows, "KeyCount": len(rows), "IsTruncated": False} if rows else {"KeyCount": 0}

    def _head_object(self, *, Bucket: str, Key: str, **_: Any) -> Json:
        return {"ContentLength": len(self.objects[Bucket, Key]), "ETag": '"1"'}

    def _get_object(self, *, Bucket: str, Key: str, **_: Any) -> Json:
        data = self.objects[Bucket, Key]
        return {"Body": StreamingBody(io.BytesIO(data), len(data)), "ContentLength": len(data), "ETag": '"1"'}

    def _list_service_quotas(self, **_: Any) -> Json:
        rows = [{"QuotaName": name, "QuotaCode": "L-1", "Value": value} for name, value in self.quotas.items()]
        return {"Quotas": rows}

    def _get_role(self, *, RoleName: str) -> Json:
        if RoleName != "training":
            raise Refusal("NoSuchEntity")
        trust = {"Statement": [{"Effect": "Allow", "Principal": {"Service": self.trusted}, "Action": "sts:AssumeRole"}]}
        role = {"Path": "/", "RoleName": RoleName, "RoleId": "A" * 20, "Arn": ROLE, "CreateDate": START}
        return {"Role": {**role, "AssumeRolePolicyDocument": quote(json.dumps(trust))}}

    def _simulate_principal_policy(self, *, ActionNames: list[str], ResourceArns: list[str], **_: Any) -> Json:
        rows = [
            {
                "EvalActionName": action,
                "EvalResourceName": resource,
                "EvalDecision": "implicitDeny" if action in self.role_denies else "allowed",
            }
            for action in ActionNames
            for resource in ResourceArns
        ]
        return {"EvaluationResults": rows}

    def _describe_images(self, *, repositoryName: str, imageIds: list[Json], **_: Any) -> Json:
        if repositoryName not in self.images:
            raise Refusal("RepositoryNotFoundException")
        if imageIds[0].get("imageTag") not in self.images[repositoryName]:
            raise Refusal("ImageNotFoundException")
        return {"imageDetails": [{"repositoryName": repositoryName, "imageManifestMediaType": self.manifest}]}

    def _describe_subnets(self, *, SubnetIds: list[str]) -> Json:
        if not set(SubnetIds) <= set(self.routes):
            raise Refusal("InvalidSubnetID.NotFound")
        rows = [
            {
                "SubnetId": one,
                "VpcId": "vpc-01234567",
                "AvailabilityZone": f"us-west-2{'abc'[index]}",
                "AvailabilityZoneId": f"usw2-az{index + 1}",
                "AvailableIpAddressCount": 20,
            }
            for index, one in enumerate(SubnetIds)
        ]
        return {"Subnets": rows}

    def _describe_route_tables(self, *, Filters: list[Json]) -> Json:
        names = {one["Name"]: one["Values"][0] for one in Filters}
        if "association.main" in names:
            return {"RouteTables": [{"Routes": [{"DestinationCidrBlock": "10.0.0.0/16", "GatewayId": "local"}]}]}
        routes = self.routes[names["association.subnet-id"]]
        return {"RouteTables": [{"Routes": routes}] if routes else []}

    def _describe_vpc_endpoints(self, **_: Any) -> Json:
        return {"VpcEndpoints": self.endpoints}

    def _describe_security_groups(self, *, GroupIds: list[str]) -> Json:
        return {
            "SecurityGroups": [
                {"GroupId": one, "VpcId": "vpc-01234567" if one == "sg-1" else "vpc-2", "IpPermissions": self.rules}
                for one in GroupIds
            ]
        }

    def _describe_mount_targets(self, *, FileSystemId: str) -> Json:
        common = {"FileSystemId": FileSystemId, "SubnetId": "subnet-01234567", "LifeCycleState": "available"}
        rows = [
            {**common, "MountTargetId": "fsmt-01234567", "AvailabilityZoneId": zone}
            for zone in sorted(self.mount_zones)
        ]
        return {"MountTargets": rows}

    def _describe_file_systems(self, *, FileSystemIds: list[str]) -> Json:
        one = {
            "FileSystemId": FileSystemIds[0],
            "FileSystemType": "LUSTRE",
            "Lifecycle": "AVAILABLE",
            "VpcId": "vpc-01234567",
        }
        return {"FileSystems": [{**one, "LustreConfiguration": {"MountName": "abcdefgh"}}]}

    def _describe_experiment(self, *, ExperimentName: str) -> Json:
        if ExperimentName not in self.experiments:
            raise Refusal("ResourceNotFound", "Experiment not found")
        return {"ExperimentName": ExperimentName}

    def _describe_trial(self, *, TrialName: str) -> Json:
        found = [name for name, trials in self.experiments.items() if TrialName in trials]
        if not found:
            raise Refusal("ResourceNotFound", "Trial not found")
        return {"TrialName": TrialName, "ExperimentName": found[0]}

    def _describe_stacks(self, *, StackName: str) -> Json:
        if StackName not in self.stacks:
            raise Refusal("ValidationError", f"Stack with id {StackName} does not exist")
        return {"Stacks": [{"StackName": StackName, "CreationTime": START, **self.stacks[StackName]}]}

    def _get_caller_identity(self) -> Json:
        return {"Arn": f"arn:aws:iam::{ACCOUNT}:user/me", "Account": ACCOUNT, "UserId": "A"}


def _event(stamp: int, text: str) -> Json:
    return {"timestamp": stamp, "message": text, "ingestionTime": stamp + 5}


def refuse_invalid(value: Any, shape: Any, path: str) -> None:
    """What botocore leaves to the service: patterns, choices and upper limits of its model."""
    limits = shape.metadata
    if shape.type_name == "structure":
        for name, inner in value.items():
            refuse_invalid(inner, shape.members[name], f"{path}.{name}")
    elif shape.type_name == "list":
        assert len(value) <= limits.get("max", len(value)), f"{path} has {len(value)} entries"
        for inner in value:
            refuse_invalid(inner, shape.member, f"{path}[]")
    elif shape.type_name == "map":
        assert len(value) <= limits.get("max", len(value)), f"{path} has {len(value)} entries"
        for name, inner in value.items():
            refuse_invalid(name, shape.key, f"{path} key")
            refuse_invalid(inner, shape.value, f"{path}.{name}")
    elif shape.type_name == "string":
        assert len(value) <= limits.get("max", len(value)), f"{path} is too long"
        assert value in (limits.get("enum") or [value]), f"{path} = {value!r}"
        pattern = (
            limits.get("pattern", ".*").replace(r"\p{L}", "a-zA-Z").replace(r"\p{Z}", " ").replace(r"\p{N}", "0-9")
        )
        assert re.fullmatch(pattern, value, re.DOTALL), f"{path} = {value!r} does not match {pattern}"
    elif shape.type_name in ("integer", "long"):
        assert value <= limits.get("max", value), f"{path} = {value}"


_SESSIONS: dict[str | None, Any] = {}
_CLIENTS: dict[tuple[int, str], Any] = {}
_CONNECTED: list[World] = []


def connect(world: World, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let every client that the package makes ask `world`. Clients are kept: their service models load slowly."""
    _CONNECTED[:] = [world]

    def session(need: str, *, region: str | None = None) -> Any:
        if region not in _SESSIONS:
            _SESSIONS[region] = aws_session(need, region=region)
        return _SESSIONS[region]

    def client(session: Any, name: str, **options: Any) -> Any:
        key = (id(session), name)
        if key not in _CLIENTS:
            made = _CLIENTS[key] = aws_client(session, name, **options)
            made.meta.events.register("before-parameter-build", lambda **given: _CONNECTED[0].before_build(**given))
            made.meta.events.register("before-call", lambda **given: _CONNECTED[0].answer(**given))
        return _CLIENTS[key]

    monkeypatch.setattr(services, "aws_session", session)
    monkeypatch.setattr(services, "aws_client", client)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    settings = {
        "ACCESS_KEY_ID": "test",
        "SECRET_ACCESS_KEY": "test",
        "REGION": REGION,
        "CONFIG_FILE": str(folder / "none"),
        "SHARED_CREDENTIALS_FILE": str(folder / "none"),
        "EC2_METADATA_DISABLED": "true",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"AWS_{name}", value)
