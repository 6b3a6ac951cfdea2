"""Creates an endpoint, or replaces the model of one that is ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from maskfleet.errors import LaunchError
from maskfleet.launch.findings import Finding
from maskfleet.launch.sagemaker.checks.image import image_finding
from maskfleet.launch.sagemaker.checks.quota import quota_finding
from maskfleet.launch.sagemaker.checks.role import NeededPermission, container_permissions, role_finding
from maskfleet.launch.sagemaker.endpoint.model import bucket_and_key, object_size
from maskfleet.launch.sagemaker.endpoint.remove import Removal, remove_all, remove_versions
from maskfleet.launch.sagemaker.endpoint.request import VARIANT, EndpointSpec, endpoint_requests
from maskfleet.launch.sagemaker.endpoint.state import LOG_GROUP, cause_of, describe, refuse_foreign, wait
from maskfleet.launch.sagemaker.services import Json, Services, asking, is_denied
from maskfleet.system.aws import aws_exceptions, code_of

_BUSY = ("Creating", "Updating", "SystemUpdating", "RollingBack", "Deleting")
_PERMISSIONS = (
    "sagemaker:CreateModel, CreateEndpointConfig, CreateEndpoint, UpdateEndpoint and AddTags, and iam:PassRole on the "
    "role of the endpoint"
)
Say = Callable[[str], None]


def deploy(services: Services, spec: EndpointSpec, *, replace: bool, say: Say) -> bool:
    """Create the endpoint of `spec`, or update it with `replace`; returns whether anything had to be done.

    An endpoint that was not made by maskfleet is never touched. If a request is refused, what the ones before it
    created is removed again.
    """
    requests = endpoint_requests(spec)
    version = str(requests["CreateModel"]["ModelName"])
    existing = describe(services, spec.name)
    if existing is not None:
        if existing["EndpointConfigName"] == version and existing["EndpointStatus"] in ("InService", *_BUSY):
            refuse_foreign(services, existing, remedy="choose another name")
            return False
        _refuse_unless(services, existing, replace=replace)
    refuse_unfit(services, spec)
    client = services.client("sagemaker")
    created: list[Removal] = []
    with _undone_on_failure(services, spec.name, created, say), _refusals(spec.name):
        _create(client.create_model, requests["CreateModel"], Removal("model", version), created)
        _create(
            client.create_endpoint_config, requests["CreateEndpointConfig"], Removal("configuration", version), created
        )
        if existing is None:
            client.create_endpoint(**requests["CreateEndpoint"])
        else:
            client.update_endpoint(EndpointName=spec.name, EndpointConfigName=version)
    return True


def finish(services: Services, spec: EndpointSpec, say: Say) -> None:
    """Wait until the endpoint of `spec` answers, then remove models and configurations that it had before."""
    version = str(endpoint_requests(spec)["CreateModel"]["ModelName"])
    wait(services, spec.name, version, say)
    remove_versions(services, spec.name, say, keep=version)


def refuse_unfit(services: Services, spec: EndpointSpec) -> None:
    """Raise for the first thing that the endpoint needs and does not have, as far as it can be known before."""
    if object_size(services, spec.model_uri) is None:
        raise LaunchError(
            f"there is no model at {spec.model_uri}",
            remedy="deploy a job whose model is still in S3, or a run directory or weights file of this machine",
        )
    for finding in _requirements(services, spec):
        if finding.refusal:
            raise LaunchError(finding.refusal, remedy=finding.remedy)


def _requirements(services: Services, spec: EndpointSpec) -> Iterator[Finding]:
    yield image_finding(services, spec.image)
    yield role_finding(services, spec.role_arn, _permissions(services, spec), field="--role")
    if spec.serverless_mib is None:
        yield quota_finding(services, spec.instance, "endpoint usage", spec.count, option="--count")


def _permissions(services: Services, spec: EndpointSpec) -> Iterator[NeededPermission]:
    """What the role of the endpoint needs, on the very resources of the endpoint."""
    _, partition, _, _, account, _ = spec.role_arn.split(":", 5)
    bucket, key = bucket_and_key(spec.model_uri)
    yield NeededPermission(("s3:GetObject",), (f"arn:{partition}:s3:::{bucket}/{key}",))
    if spec.async_uri:
        bucket, key = bucket_and_key(spec.async_uri)
        yield NeededPermission(("s3:GetObject",), (f"arn:{partition}:s3:::{bucket}/{key}/input/1",))
        outputs = tuple(f"arn:{partition}:s3:::{bucket}/{key}/{name}/1" for name in ("output", "failure"))
        yield NeededPermission(("s3:PutObject",), outputs)
    group = f"{LOG_GROUP}/{spec.name}:log-stream:{VARIANT}/1"
    stream = f"arn:{partition}:logs:{services.region}:{account}:log-group:{group}"
    yield from container_permissions(spec.image, stream, in_vpc=bool(spec.subnets) and not spec.serverless_mib)


def _refuse_unless(services: Services, existing: Json, *, replace: bool) -> None:
    """Raise unless the endpoint may and can be updated."""
    refuse_foreign(services, existing, remedy="choose another name, or change it with the tool that made it")
    name, state = existing["EndpointName"], existing["EndpointStatus"]
    if state not in ("InService", *_BUSY):
        raise LaunchError(
            f"endpoint {name} is {state} and cannot be updated",
            remedy=f"see `maskfleet endpoint status {name}`, delete it with `maskfleet endpoint delete`, and deploy",
        )
    if not replace:
        raise LaunchError(
            f"endpoint {name} exists with another model or other settings",
            remedy="--replace updates it, and it answers meanwhile; or choose another name",
        )
    if state in _BUSY:
        raise LaunchError(f"endpoint {name} is {state}", remedy="wait until it is InService, then deploy again")


def _create(call: Callable[..., Any], request: Json, removal: Removal, created: list[Removal]) -> None:
    """Send `request`; what exists with the same name has the same content, because its name is that of its content."""
    try:
        call(**request)
        created.append(removal)
    except aws_exceptions() as error:
        if code_of(error) != "ValidationException" or "already existing" not in str(error):
            raise


@contextmanager
def _undone_on_failure(services: Services, name: str, created: list[Removal], say: Say) -> Iterator[None]:
    """Remove what was created, unless the endpoint uses it: an answer that got lost is no refusal."""
    try:
        yield
    except BaseException:
        try:
            endpoint = describe(services, name)
            if endpoint is None or endpoint["EndpointConfigName"] not in [one.name for one in created]:
                remove_all(services, reversed(created), say)
        except LaunchError as error:
            listed = ", ".join(map(str, created))
            say(f"not removed: {listed} ({error.what}); `maskfleet endpoint delete {name}` removes what is left")
        raise


@contextmanager
def _refusals(name: str) -> Iterator[None]:
    """What SageMaker refuses, with what it means where we know that."""
    with asking(f"deploy endpoint {name}", permissions=_PERMISSIONS):
        try:
            yield
        except aws_exceptions() as error:
            text = f"{code_of(error)}: {error}"
            cause = cause_of(text)
            if cause is None or is_denied(error):
                raise
            raise LaunchError(
                f"SageMaker refused endpoint {name}. {cause.meaning}\n{error}", remedy=cause.next_step
            ) from error
