"""The AWS calls of the stack commands, and what CloudFormation says about a stack."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from maskfleet.errors import InfraError
from maskfleet.system.aws import aws_client, aws_error, aws_exceptions, aws_session, code_of

# The services by their names in boto3, as IAM's actions and people name them.
_SERVICES = {
    "cloudformation": ("cloudformation", "CloudFormation"),
    "ec2": ("ec2", "EC2"),
    "efs": ("elasticfilesystem", "EFS"),
    "fsx": ("fsx", "FSx"),
    "s3": ("s3", "S3"),
    "service-quotas": ("servicequotas", "Service Quotas"),
    "sts": ("sts", "STS"),
}


class Aws:
    """The AWS services in one region; whatever they refuse is an InfraError with AWS's error as its cause."""

    def __init__(self, region: str | None) -> None:
        self._session = aws_session("stacks", region=region)
        self._clients: dict[str, Any] = {}

    @property
    def region(self) -> str:
        found = self._session.region_name
        if not found:
            raise InfraError(
                "no AWS region is set", remedy="write `region: us-west-2` into the file, or set AWS_REGION"
            )
        return str(found)

    def known_regions(self) -> list[str]:
        """The regions that this version of boto3 knows, of all partitions."""
        partitions = self._session.get_available_partitions()
        found = [self._session.get_available_regions("cloudformation", partition_name=one) for one in partitions]
        return sorted(region for regions in found for region in regions)

    def client(self, service: str) -> Any:
        if service not in self._clients:
            self._clients[service] = aws_client(self._session, service)
        return self._clients[service]

    def call(self, service: str, operation: str, **arguments: Any) -> Any:
        """One request, such as call("ec2", "describe_vpcs")."""
        try:
            return getattr(self.client(service), operation)(**arguments)
        except aws_exceptions() as error:
            raise _infra_error(error, service, operation) from error

    def pages(self, service: str, operation: str, **arguments: Any) -> Iterator[Any]:
        """The pages of a request that has several."""
        try:
            yield from self.client(service).get_paginator(operation).paginate(**arguments)
        except aws_exceptions() as error:
            raise _infra_error(error, service, operation) from error


def _infra_error(error: Exception, service: str, operation: str) -> InfraError:
    prefix, title = _SERVICES[service]
    action = "".join(part.capitalize() for part in operation.split("_"))
    found = aws_error(
        error,
        operation.replace("_", " "),
        service=title,
        permissions=f"the permission {prefix}:{action}",
        kind=InfraError,
    )
    assert isinstance(found, InfraError)
    return found


def aws_code(error: InfraError) -> str:
    """AWS's code for the error, or an empty text."""
    return code_of(error.__cause__)


@dataclass(frozen=True, slots=True)
class LiveStack:
    """A stack as CloudFormation describes it."""

    id: str
    name: str
    status: str
    reason: str = ""
    tags: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    is_protected: bool = False

    @property
    def is_busy(self) -> bool:
        """Whether CloudFormation works on it; a stack that is only a change set so far is not."""
        return self.status.endswith("_IN_PROGRESS") and self.status != "REVIEW_IN_PROGRESS"

    @property
    def is_created(self) -> bool:
        """Whether it exists and can be updated."""
        return bool(re.fullmatch(r"(CREATE|UPDATE|IMPORT|UPDATE_ROLLBACK|IMPORT_ROLLBACK)_COMPLETE", self.status))


@dataclass(frozen=True, slots=True)
class StackResource:
    """One resource of a stack."""

    address: str
    type: str
    id: str
    status: str
    reason: str = ""


def find_stack(aws: Aws, name: str) -> LiveStack | None:
    """The stack with this name or id; None if there is none. One that was deleted is found by its id only."""
    try:
        found = aws.call("cloudformation", "describe_stacks", StackName=name)["Stacks"]
    except InfraError as error:
        if aws_code(error) == "ValidationError" and "does not exist" in str(error.__cause__):
            return None
        raise
    stack = found[0]
    return LiveStack(
        id=stack["StackId"],
        name=stack["StackName"],
        status=stack["StackStatus"],
        reason=stack.get("StackStatusReason", ""),
        tags={tag["Key"]: tag["Value"] for tag in stack.get("Tags", ())},
        outputs={output["OutputKey"]: output["OutputValue"] for output in stack.get("Outputs", ())},
        is_protected=stack.get("EnableTerminationProtection", False),
    )


def change_set_tags(aws: Aws, stack_id: str) -> list[dict[str, str]]:
    """The tags that each change set of a stack would give to it."""
    pages = aws.pages("cloudformation", "list_change_sets", StackName=stack_id)
    ids = [one["ChangeSetId"] for page in pages for one in page["Summaries"]]
    found = [aws.call("cloudformation", "describe_change_set", ChangeSetName=one) for one in ids]
    return [{tag["Key"]: tag["Value"] for tag in one.get("Tags", ())} for one in found]


def stack_resources(aws: Aws, stack: str) -> list[StackResource]:
    """The resources of a stack, also those that were deleted or kept."""
    return [
        StackResource(
            one["LogicalResourceId"],
            one["ResourceType"],
            one.get("PhysicalResourceId", ""),
            one["ResourceStatus"],
            one.get("ResourceStatusReason", ""),
        )
        for page in aws.pages("cloudformation", "list_stack_resources", StackName=stack)
        for one in page["StackResourceSummaries"]
    ]
