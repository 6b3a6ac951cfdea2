"""Deletes an endpoint, its configurations and its models, if maskfleet made them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from maskfleet.errors import LaunchError
from maskfleet.launch.sagemaker.endpoint.request import is_version_of
from maskfleet.launch.sagemaker.endpoint.state import POLL_S, describe, is_ours, refuse_foreign
from maskfleet.launch.sagemaker.services import Services, asking
from maskfleet.system.aws import aws_exceptions, code_of

Say = Callable[[str], None]
DELETE_S = 900.0  # longest wait for an endpoint to be gone


@dataclass(frozen=True, slots=True)
class Removal:
    """One thing to delete."""

    kind: Literal["endpoint", "configuration", "model"]
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def owned(services: Services, name: str) -> list[Removal]:
    """All that maskfleet made for the endpoint `name`, in the order in which it can be deleted.

    An endpoint of this name that someone else made is an error.
    """
    endpoint = describe(services, name)
    found: list[Removal] = []
    if endpoint is not None:
        refuse_foreign(services, endpoint, remedy="delete it with the tool that made it")
        found.append(Removal("endpoint", name))
    return [*found, *versions(services, name)]


def versions(services: Services, name: str) -> Iterator[Removal]:
    """Configurations, then models, that maskfleet made for the endpoint `name`."""
    client = services.client("sagemaker")
    with asking(f"list what belongs to {name}", permissions="sagemaker:ListEndpointConfigs and ListModels"):
        pages = client.get_paginator("list_endpoint_configs").paginate(NameContains=name)
        configs = [
            (one["EndpointConfigName"], one["EndpointConfigArn"]) for page in pages for one in page["EndpointConfigs"]
        ]
        pages = client.get_paginator("list_models").paginate(NameContains=name)
        models = [(one["ModelName"], one["ModelArn"]) for page in pages for one in page["Models"]]
    for found, arn in configs:
        if is_version_of(name, found) and is_ours(services, arn, name):
            yield Removal("configuration", found)
    for found, arn in models:
        if is_version_of(name, found) and is_ours(services, arn, name):
            yield Removal("model", found)


def remove_versions(services: Services, name: str, say: Say, *, keep: str) -> None:
    """Delete configurations and models of earlier deployments."""
    remove_all(services, [one for one in versions(services, name) if one.name != keep], say)


def remove_all(
    services: Services,
    removals: Iterable[Removal],
    say: Say,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Delete each of `removals`; an endpoint is gone before its configuration is deleted, as SageMaker wants it."""
    client = services.client("sagemaker")
    for one in removals:
        with asking(f"delete {one}", permissions="sagemaker:DeleteEndpoint, DeleteEndpointConfig and DeleteModel"):
            try:
                match one.kind:
                    case "endpoint":
                        client.delete_endpoint(EndpointName=one.name)
                    case "configuration":
                        client.delete_endpoint_config(EndpointConfigName=one.name)
                    case "model":
                        client.delete_model(ModelName=one.name)
            except aws_exceptions() as error:
                if code_of(error) == "ValidationException" and "in-progress" in str(error):
                    raise LaunchError(
                        f"{one} is being created or updated, and SageMaker deletes it only afterwards",
                        remedy=f"wait until `maskfleet endpoint status {one.name}` is InService or Failed",
                    ) from error
                if code_of(error) != "ValidationException" or "could not find" not in str(error).lower():
                    raise
        if one.kind == "endpoint":
            _wait_until_gone(services, one.name, sleep, clock)
        say(f"deleted {one}")


def _wait_until_gone(services: Services, name: str, sleep: Callable[[float], None], clock: Callable[[], float]) -> None:
    began = clock()
    while (found := describe(services, name)) is not None:
        if clock() - began > DELETE_S:
            raise LaunchError(
                f"endpoint {name} is still {found['EndpointStatus']} after {DELETE_S:.0f} s",
                remedy=f"run `maskfleet endpoint delete {name}` again later",
            )
        sleep(POLL_S)
