"""The account of sagemaker_world with endpoints: models, configurations and what SageMaker does with them."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from botocore.response import StreamingBody
from sagemaker_world import ACCOUNT, IMAGE, REGION, ROLE, START, Json, Refusal, World

from maskfleet.launch.sagemaker.endpoint.request import EndpointSpec

MODEL = "s3://lab/out/r50/output/model.tar.gz"
Command = Callable[..., tuple[int, str, str]]  # exit code, standard output, standard error
ARN = f"arn:aws:sagemaker:{REGION}:{ACCOUNT}"


def endpoint_spec(**changes: Any) -> EndpointSpec:
    """An endpoint that the world accepts, with changes."""
    return EndpointSpec(**{"name": "shapes", "model_uri": MODEL, "image": IMAGE, "role_arn": ROLE, **changes})


class EndpointWorld(World):
    """`states` are those that an endpoint has at the next descriptions; the last one stays."""

    def __init__(self) -> None:
        super().__init__()
        self.objects["lab", "out/r50/output/model.tar.gz"] = b"weights"
        self.quotas |= {"ml.g5.xlarge for endpoint usage": 2.0}
        self.models: dict[str, Json] = {}
        self.configs: dict[str, Json] = {}
        self.hosted: dict[str, Json] = {}
        self.tags: dict[str, list[Json]] = {}
        self.states: deque[str] = deque(["Creating", "InService"])
        self.reason = ""
        self.deleting_for = 0  # descriptions until a deleted endpoint is gone
        self.invocations: deque[Refusal | bytes] = deque()
        self.answers: dict[str, bytes] = {}  # of asynchronous requests, by the last part of their place

    def names(self) -> list[list[str]]:
        """What exists: endpoints, configurations, models."""
        return [sorted(self.hosted), sorted(self.configs), sorted(self.models)]

    def _create_model(self, *, ModelName: str, Tags: list[Json], **given: Any) -> Json:
        return {"ModelArn": self._add(self.models, "model", "Model", ModelName, Tags, given)}

    def _create_endpoint_config(self, *, EndpointConfigName: str, Tags: list[Json], **given: Any) -> Json:
        for variant in given["ProductionVariants"]:
            self._get(self.models, "model", variant["ModelName"])
        arn = self._add(self.configs, "endpoint-config", "EndpointConfig", EndpointConfigName, Tags, given)
        return {"EndpointConfigArn": arn}

    def _create_endpoint(self, *, EndpointName: str, EndpointConfigName: str, Tags: list[Json]) -> Json:
        self._get(self.configs, "endpoint configuration", EndpointConfigName)
        given = {"EndpointConfigName": EndpointConfigName, "EndpointStatus": "Creating", "LastModifiedTime": START}
        return {"EndpointArn": self._add(self.hosted, "endpoint", "Endpoint", EndpointName, Tags, given)}

    def _update_endpoint(self, *, EndpointName: str, EndpointConfigName: str) -> Json:
        endpoint = self._get(self.hosted, "endpoint", EndpointName)
        self._get(self.configs, "endpoint configuration", EndpointConfigName)
        if endpoint["EndpointStatus"] not in ("InService", "UpdateRollbackFailed"):
            raise Refusal("ValidationException", f"Cannot update in-progress endpoint {EndpointName}")
        self.states = self.states if len(self.states) > 1 else deque(["Updating", "InService"])
        endpoint |= {"EndpointConfigName": EndpointConfigName, "EndpointStatus": "Updating"}
        return {"EndpointArn": endpoint["EndpointArn"]}

    def _describe_endpoint(self, *, EndpointName: str) -> Json:
        endpoint = self._get(self.hosted, "endpoint", EndpointName)
        endpoint["EndpointStatus"] = self.states.popleft() if len(self.states) > 1 else self.states[0]
        if endpoint["EndpointStatus"] == "gone":
            del self.hosted[EndpointName]
            raise Refusal("ValidationException", f'Could not find endpoint "{EndpointName}".')
        if self.reason:
            endpoint["FailureReason"] = self.reason
        config = self.configs.get(endpoint["EndpointConfigName"], {})
        if "AsyncInferenceConfig" in config:
            endpoint["AsyncInferenceConfig"] = config["AsyncInferenceConfig"]
        variant = config.get("ProductionVariants", [{}])[0]
        current = {"CurrentServerlessConfig": variant["ServerlessConfig"]} if "ServerlessConfig" in variant else {}
        return {**endpoint, "ProductionVariants": [{"VariantName": "AllTraffic", **current}]}

    def _describe_endpoint_config(self, *, EndpointConfigName: str) -> Json:
        return dict(self._get(self.configs, "endpoint configuration", EndpointConfigName))

    def _describe_model(self, *, ModelName: str) -> Json:
        return dict(self._get(self.models, "model", ModelName))

    def _delete_endpoint(self, *, EndpointName: str) -> None:
        if self._get(self.hosted, "endpoint", EndpointName)["EndpointStatus"] == "Creating":
            raise Refusal("ValidationException", "Cannot delete in-progress endpoint")
        if self.deleting_for:
            self.states = deque(["Deleting"] * self.deleting_for + ["gone"])
        else:
            del self.hosted[EndpointName]

    def _delete_endpoint_config(self, *, EndpointConfigName: str) -> None:
        self._get(self.configs, "endpoint configuration", EndpointConfigName)
        users = [one for one in self.hosted.values() if one["EndpointConfigName"] == EndpointConfigName]
        assert not users, "an endpoint still uses the configuration"
        del self.configs[EndpointConfigName]

    def _delete_model(self, *, ModelName: str) -> None:
        self._get(self.models, "model", ModelName)
        del self.models[ModelName]

    def _list_tags(self, *, ResourceArn: str, **_: Any) -> Json:
        return {"Tags": self.tags[ResourceArn]}

    def _list_endpoints(self, **_: Any) -> Json:
        keys = ("EndpointName", "EndpointArn", "CreationTime", "LastModifiedTime", "EndpointStatus")
        return {"Endpoints": [{key: one[key] for key in keys} for one in self.hosted.values()]}

    def _list_endpoint_configs(self, *, NameContains: str, **_: Any) -> Json:
        keys = ("EndpointConfigName", "EndpointConfigArn", "CreationTime")
        return {"EndpointConfigs": [{key: one[key] for key in keys} for one in self.configs.values()]}

    def _list_models(self, *, NameContains: str, **_: Any) -> Json:
        return {
            "Models": [
                {key: one[key] for key in ("ModelName", "ModelArn", "CreationTime")} for one in self.models.values()
            ]
        }

    def _describe_log_streams(self, *, logGroupName: str, **_: Any) -> Json:  # type: ignore[override]
        names = [name for name in self.streams if name.startswith(f"{logGroupName}|")]
        if not names:
            raise Refusal("ResourceNotFoundException", "The specified log group does not exist.")
        return {"logStreams": [{"logStreamName": name.partition("|")[2]} for name in names]}

    def _get_log_events(  # type: ignore[override]
        self, *, logGroupName: str, logStreamName: str, limit: int, nextToken: str | None = None, **_: Any
    ) -> Json:
        return self.events_backward(self.streams[f"{logGroupName}|{logStreamName}"], nextToken, limit)

    def _put_object(self, *, Bucket: str, Key: str, Body: Any) -> Json:
        self.objects[Bucket, Key] = Body if isinstance(Body, bytes) else Body.read()
        return {"ETag": '"1"'}

    def _head_object(self, *, Bucket: str, Key: str, **_: Any) -> Json:
        if (Bucket, Key) not in self.objects:
            raise Refusal("404", "Not Found")
        return super()._head_object(Bucket=Bucket, Key=Key)

    def _get_object(self, *, Bucket: str, Key: str, **_: Any) -> Json:
        if (Bucket, Key) not in self.objects:
            raise Refusal("NoSuchKey", "The specified key does not exist.")
        return super()._get_object(Bucket=Bucket, Key=Key)

    def _invoke_endpoint(self, **_: Any) -> Json:
        answer = self.invocations.popleft()
        if isinstance(answer, Refusal):
            raise answer
        return {"Body": StreamingBody(io.BytesIO(answer), len(answer)), "ContentType": "application/json"}

    def _invoke_endpoint_async(self, *, EndpointName: str, InputLocation: str, **_: Any) -> Json:
        output = self.configs[self.hosted[EndpointName]["EndpointConfigName"]]["AsyncInferenceConfig"]["OutputConfig"]
        for place, data in self.answers.items():
            bucket, _, prefix = output[place].removeprefix("s3://").partition("/")
            self.objects[bucket, f"{prefix}/1.out"] = data
        places = {
            "OutputLocation": f"{output['S3OutputPath']}/1.out",
            "FailureLocation": f"{output['S3FailurePath']}/1.out",
        }
        return {"InferenceId": "1", **places}

    def _add(self, known: dict[str, Json], kind: str, word: str, name: str, tags: list[Json], given: Json) -> str:
        if name in known:
            raise Refusal("ValidationException", f'Cannot create already existing {kind} "{ARN}:{kind}/{name}".')
        arn = f"{ARN}:{kind}/{name}"
        stamp = START + timedelta(minutes=len(self.requests))
        known[name] = {f"{word}Name": name, f"{word}Arn": arn, "CreationTime": stamp, **given}
        self.tags[arn] = tags
        return arn

    @staticmethod
    def _get(known: dict[str, Json], kind: str, name: str) -> Json:
        if name not in known:
            raise Refusal("ValidationException", f'Could not find {kind} "{name}".')
        return known[name]
