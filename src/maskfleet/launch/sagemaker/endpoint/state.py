"""The state of an endpoint, waiting for it, and why it failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC
from pathlib import Path
from typing import Any

from maskfleet.errors import LaunchError
from maskfleet.launch.causes import Cause, causes_in, read_tables
from maskfleet.launch.sagemaker.endpoint.request import TAG
from maskfleet.launch.sagemaker.logs import last_events
from maskfleet.launch.sagemaker.services import Json, Services, asking, is_transient
from maskfleet.system.aws import aws_exceptions, code_of

CAUSES = causes_in(read_tables(Path(__file__).with_name("causes.toml")))
LOG_GROUP = "/aws/sagemaker/Endpoints"
LOG_LINES = 20  # of a container that failed
POLL_S = 10.0
SAY_EVERY_S = 60.0
ANSWERS = ("InService", "Updating", "SystemUpdating", "RollingBack")  # states in which the endpoint answers
ENDED = ("InService", "Failed", "OutOfService", "UpdateRollbackFailed")
PERMISSIONS = "sagemaker:DescribeEndpoint and ListTags"


@dataclass(frozen=True, slots=True)
class EndpointStatus:
    """One endpoint, for people and for JSON."""

    name: str
    state: str
    created: str  # UTC
    kind: str  # real-time, asynchronous or serverless
    instances: str
    model: str  # name of the model, which ends with the digest of its content
    model_uri: str
    image: str
    environment: dict[str, str]
    is_ours: bool
    reason: str = ""  # of a failure


def describe(services: Services, name: str) -> Json | None:
    """What SageMaker reports about the endpoint; None if there is none of this name."""
    with asking(f"describe endpoint {name}", permissions=PERMISSIONS):
        return _found(services.client("sagemaker").describe_endpoint, EndpointName=name)


def needed(services: Services, name: str) -> Json:
    """As `describe`, but the endpoint must exist."""
    found = describe(services, name)
    if found is None:
        raise LaunchError(
            f"there is no endpoint {name} in {services.region}",
            remedy="`maskfleet endpoint list` shows those of the region; check AWS_PROFILE and --region",
        )
    return found


def is_ours(services: Services, arn: str, name: str) -> bool:
    """Whether maskfleet created what `arn` names, for the endpoint `name`."""
    with asking(f"read the tags of {arn}", permissions="sagemaker:ListTags"):
        pages = services.client("sagemaker").get_paginator("list_tags").paginate(ResourceArn=arn)
        return any(one["Key"] == TAG and one["Value"] == name for page in pages for one in page["Tags"])


def refuse_foreign(services: Services, endpoint: Json, *, remedy: str) -> None:
    """Raise if someone else made the endpoint."""
    name = str(endpoint["EndpointName"])
    if not is_ours(services, str(endpoint["EndpointArn"]), name):
        raise LaunchError(f"endpoint {name} was not made by maskfleet: it has no tag {TAG}={name}", remedy=remedy)


def status_of(services: Services, endpoint: Json) -> EndpointStatus:
    """All about one endpoint; its configuration and model may be gone already."""
    client, name = services.client("sagemaker"), str(endpoint["EndpointName"])
    with asking(f"describe the model of {name}", permissions="sagemaker:DescribeEndpointConfig and DescribeModel"):
        config = _found(client.describe_endpoint_config, EndpointConfigName=endpoint["EndpointConfigName"]) or {}
        variants = config.get("ProductionVariants") or [{}]
        model_name = str(variants[0].get("ModelName", ""))
        model = (_found(client.describe_model, ModelName=model_name) if model_name else None) or {}
    container = model.get("PrimaryContainer", {})
    return EndpointStatus(
        name=name,
        state=str(endpoint["EndpointStatus"]),
        created=f"{endpoint['CreationTime'].astimezone(UTC):%Y-%m-%d %H:%M:%S}",
        kind=_kind(config, variants[0]),
        instances=_instances(variants[0]),
        model=model_name,
        model_uri=str(container.get("ModelDataUrl", "")),
        image=str(container.get("Image", "")),
        environment=dict(container.get("Environment", {})),
        is_ours=is_ours(services, str(endpoint["EndpointArn"]), name),
        reason=str(endpoint.get("FailureReason", "")),
    )


def our_endpoints(services: Services) -> Iterator[EndpointStatus]:
    """The endpoints of the region that maskfleet created, the newest first."""
    with asking("list endpoints", permissions="sagemaker:ListEndpoints"):
        pages = services.client("sagemaker").get_paginator("list_endpoints").paginate(SortBy="CreationTime")
        names = [str(one["EndpointName"]) for page in pages for one in page["Endpoints"]]
    for name in names:
        endpoint = describe(services, name)
        if endpoint is not None and is_ours(services, str(endpoint["EndpointArn"]), name):
            yield status_of(services, endpoint)


def wait(
    services: Services,
    name: str,
    config: str,
    say: Callable[[str], None],
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Wait until the endpoint answers with the configuration `config`; raise, with the reason, if it fails."""
    began = said_at = clock()
    said = ""
    while True:
        endpoint = _patient_description(services, name)
        state = str(endpoint["EndpointStatus"])
        if state != said or clock() - said_at >= SAY_EVERY_S:
            said, said_at = state, clock()
            say(f"{name}: {state} after {clock() - began:.0f} s")
        if state in ENDED:
            break
        sleep(POLL_S)
    if state == "InService" and endpoint["EndpointConfigName"] == config:
        return
    raise _failure(services, endpoint, is_rolled_back=state == "InService")


def explained(services: Services, endpoint: Json) -> str:
    """Why the endpoint failed: what SageMaker says, what that means, and the last lines of its container."""
    reason = (
        str(endpoint.get("FailureReason", ""))
        or f"SageMaker gives no reason; its state is {endpoint['EndpointStatus']}"
    )
    cause = cause_of(reason)
    parts = [reason]
    if cause is not None:
        parts.append(f"cause: {cause.name}. {cause.meaning}")
    if cause is None or cause.name in ("ping", "container"):
        parts += last_lines(services, str(endpoint["EndpointName"]))
    return "\n".join(parts)


def cause_of(text: str) -> Cause | None:
    """The cause that a text of SageMaker shows."""
    return next((cause for cause in CAUSES if cause.pattern.search(text)), None)


def last_lines(services: Services, name: str) -> list[str]:
    """The last lines that a container of the endpoint printed, after a title; why there are none, if so."""
    client, group = services.client("logs"), f"{LOG_GROUP}/{name}"
    try:
        streams = client.describe_log_streams(logGroupName=group, orderBy="LastEventTime", descending=True, limit=1)
        if not streams["logStreams"]:
            return ["its container printed nothing"]
        stream = streams["logStreams"][0]["logStreamName"]
        events = last_events(client.get_log_events, group, stream, LOG_LINES)
    except aws_exceptions() as error:
        if code_of(error) == "ResourceNotFoundException":
            return ["its container printed nothing"]
        return [f"its log, {group}, cannot be read: {code_of(error) or error}"]
    return [f"last lines of {group}/{stream}:", *(f"  {one['message'].rstrip()}" for one in events)]


def _failure(services: Services, endpoint: Json, *, is_rolled_back: bool) -> LaunchError:
    name, text = endpoint["EndpointName"], explained(services, endpoint)
    cause = cause_of(str(endpoint.get("FailureReason", "")))
    fix = cause.next_step if cause else "fix what it names"
    if is_rolled_back:
        what = f"endpoint {name} could not be updated, and answers with its previous model: {text}"
        return LaunchError(what, remedy=f"{fix}; then deploy again with --replace")
    what = f"endpoint {name} is {endpoint['EndpointStatus']}: {text}"
    return LaunchError(what, remedy=f"{fix}; then `maskfleet endpoint delete {name}`, and deploy again")


def _patient_description(services: Services, name: str) -> Json:
    """As `needed`; a service that is busy for a moment does not end a wait of many minutes."""
    try:
        return needed(services, name)
    except LaunchError as error:
        if isinstance(error.__cause__, Exception) and is_transient(error.__cause__):
            return {"EndpointName": name, "EndpointStatus": "not known: SageMaker is busy", "EndpointConfigName": ""}
        raise


def _found(call: Callable[..., Any], **request: Any) -> Json | None:
    """The answer of `call`; None if there is no such resource, for which SageMaker has no code of its own."""
    try:
        return dict(call(**request))
    except aws_exceptions() as error:
        if code_of(error) == "ValidationException" and "could not find" in str(error).lower():
            return None
        raise


def _kind(config: Json, variant: Json) -> str:
    if config.get("AsyncInferenceConfig"):
        return "asynchronous"
    return "serverless" if variant.get("ServerlessConfig") else "real-time"


def _instances(variant: Json) -> str:
    serverless = variant.get("ServerlessConfig")
    if serverless:
        return f"{serverless['MemorySizeInMB']} MiB, up to {serverless['MaxConcurrency']} at once"
    return f"{variant.get('InitialInstanceCount', '?')} × {variant.get('InstanceType', '?')}"
