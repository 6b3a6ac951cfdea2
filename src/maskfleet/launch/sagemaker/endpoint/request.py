"""The requests that create an endpoint: a model, an endpoint configuration and the endpoint itself."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from maskfleet.config.launch import ROLE_ARN
from maskfleet.errors import ConfigError
from maskfleet.launch.sagemaker.services import NAMES, Json

VARIANT = "AllTraffic"
TAG = "maskfleet"  # on everything that belongs to an endpoint, with the name of the endpoint as value
# Drivers for CUDA 13, which run programs for older versions too. What SageMaker takes by itself is older.
GPU_AMI = "al2023-ami-sagemaker-inference-gpu-4-1"
STARTUP_S = 900  # for a container to load its model and answer /ping
DOWNLOAD_S = 1800  # for an instance to download model.tar.gz
SERVERLESS_MIB = range(1024, 6145, 1024)
SERVERLESS_REQUESTS = 200  # at once, of one endpoint
_DIGITS = 8  # of the digest at the end of a version's name
_LONGEST = NAMES.longest - _DIGITS - 1
_GPU_TYPE = re.compile(r"ml\.[gp]\d")
Call = Literal["CreateModel", "CreateEndpointConfig", "CreateEndpoint"]


@dataclass(frozen=True, slots=True)
class EndpointSpec:
    """What an endpoint is; two that are equal have the same names everywhere."""

    name: str
    model_uri: str  # s3://…/model.tar.gz
    image: str
    role_arn: str
    instance: str = "ml.g5.xlarge"
    count: int = 1
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    async_uri: str | None = None  # s3://… for requests and answers of an asynchronous endpoint
    serverless_mib: int | None = None  # memory of a serverless endpoint, which has no instances and no VPC
    ami: str | None = None

    def __post_init__(self) -> None:
        refuse_bad_name(self.name)
        if self.async_uri and self.serverless_mib:
            raise ConfigError("SageMaker has no asynchronous serverless endpoints", remedy="give one of the two")
        if self.serverless_mib is not None and self.serverless_mib not in SERVERLESS_MIB:
            sizes = ", ".join(map(str, SERVERLESS_MIB))
            raise ConfigError(f"serverless endpoints have {sizes} MiB of memory", remedy="give one of them")
        if self.serverless_mib is not None and self.count > SERVERLESS_REQUESTS:
            raise ConfigError(
                f"a serverless endpoint answers at most {SERVERLESS_REQUESTS} requests at once, not {self.count}",
                remedy="give a smaller --count",
            )
        if re.fullmatch(ROLE_ARN, self.role_arn) is None:
            raise ConfigError(
                f"{self.role_arn!r} is not the ARN of a role", remedy="write arn:aws:iam::ACCOUNT:role/NAME"
            )

    @property
    def instance_type(self) -> str:
        return f"ml.{self.instance.removeprefix('ml.')}"


def refuse_bad_name(name: str) -> None:
    """Raise if SageMaker cannot call an endpoint, its model and its configuration `name`, with what is added."""
    if not NAMES.pattern.fullmatch(name) or len(name) > _LONGEST:
        raise ConfigError(
            f"{name!r} cannot be the name of an endpoint",
            remedy=f"use letters, digits and single dashes between them, at most {_LONGEST} characters",
        )


def is_gpu_type(instance: str) -> bool:
    """Whether the instance type has GPUs."""
    return _GPU_TYPE.match(f"ml.{instance.removeprefix('ml.')}") is not None


def is_version_of(name: str, found: str) -> bool:
    """Whether `found` can be the name of a model or a configuration of the endpoint `name`."""
    return re.fullmatch(rf"{re.escape(name)}-[0-9a-f]{{{_DIGITS}}}", found) is not None


def endpoint_requests(spec: EndpointSpec) -> dict[Call, Json]:
    """The requests in their order. Model and configuration are named after their content, which cannot change."""
    tags = [{"Key": TAG, "Value": spec.name}]
    model, config = _model(spec), _config(spec)
    text = json.dumps([model, config], sort_keys=True)
    version = f"{spec.name}-{hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]}"
    config["ProductionVariants"][0] |= {"ModelName": version}
    return {
        "CreateModel": {"ModelName": version, **model, "Tags": tags},
        "CreateEndpointConfig": {"EndpointConfigName": version, **config, "Tags": tags},
        "CreateEndpoint": {"EndpointName": spec.name, "EndpointConfigName": version, "Tags": tags},
    }


def _model(spec: EndpointSpec) -> Json:
    container: Json = {"Image": spec.image, "ModelDataUrl": spec.model_uri, "Environment": dict(spec.environment)}
    found: Json = {"PrimaryContainer": container, "ExecutionRoleArn": spec.role_arn}
    if spec.serverless_mib is not None:
        return found
    if spec.subnets:
        found["VpcConfig"] = {"SecurityGroupIds": list(spec.security_groups), "Subnets": list(spec.subnets)}
    # The program reads its model and answers requests; it needs no network of its own.
    return {**found, "EnableNetworkIsolation": True}


def _config(spec: EndpointSpec) -> Json:
    variant: dict[str, Any] = {"VariantName": VARIANT}
    if spec.serverless_mib is not None:
        variant["ServerlessConfig"] = {"MemorySizeInMB": spec.serverless_mib, "MaxConcurrency": spec.count}
        return {"ProductionVariants": [variant]}
    variant |= {
        "InstanceType": spec.instance_type,
        "InitialInstanceCount": spec.count,
        "ModelDataDownloadTimeoutInSeconds": DOWNLOAD_S,
        "ContainerStartupHealthCheckTimeoutInSeconds": STARTUP_S,
    }
    if spec.ami:
        variant["InferenceAmiVersion"] = spec.ami
    if not spec.async_uri:
        return {"ProductionVariants": [variant]}
    output = {"S3OutputPath": f"{spec.async_uri}/output", "S3FailurePath": f"{spec.async_uri}/failure"}
    return {"ProductionVariants": [variant], "AsyncInferenceConfig": {"OutputConfig": output}}
