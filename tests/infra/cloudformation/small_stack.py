"""A small kind of stack with a screen, and AWS with prepared answers, for the tests of this folder."""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rich.console import Console

from maskfleet.cli.infra_view import TerminalView
from maskfleet.config.base import Config
from maskfleet.infra.cloudformation.client import Aws
from maskfleet.infra.cloudformation.kinds.kind import Needs, StackKind
from maskfleet.infra.cloudformation.session import StackSession
from maskfleet.infra.costs import Billed, read_prices
from maskfleet.system.aws import aws_session

TEMPLATE = Path(__file__).parent / "small.yaml"


class SmallStack(Config):
    """Settings of the small stack."""

    name: str = "fleet"
    region: str | None = "us-east-1"
    topics: int = 1
    title: str = "first"

    def parameters(self) -> dict[str, str]:
        return {"Topics": str(self.topics), "Title": self.title}

    def needs(self) -> Needs:
        return Needs()

    def billed(self) -> list[Billed]:
        return [Billed("NAT gateway", "hour/nat_gateway")]


# pathlib keeps an absolute path when it is joined to deploy/.
SMALL = StackKind(
    name="small",
    title="small stack",
    template=str(TEMPLATE),
    read=SmallStack.model_validate,
    fields=tuple(SmallStack.model_fields),
    outputs=("FilesId", "FirstArn"),
)


@dataclass
class Screen:
    """What the user sees; `yes` answers every question."""

    text: io.StringIO = field(default_factory=io.StringIO)

    def session(self, *, aws: Aws | None = None, yes: bool = True, **settings: Any) -> StackSession:
        config = SmallStack(**settings)
        view = TerminalView(yes=yes, console=Console(file=self.text, soft_wrap=True, highlight=False))
        return StackSession(SMALL, config, aws or Aws(config.region), view, read_prices())

    def shown(self) -> str:
        """Output since the last call."""
        text = self.text.getvalue()
        self.text.seek(0)
        self.text.truncate()
        return text


@functools.cache
def _session() -> Any:
    """One session for all tests: it keeps the service models, which take long to read."""
    return aws_session("tests", region="us-east-1")


_CLIENTS: dict[str, Any] = {}  # shared for the same reason


class StubbedAws(Aws):
    """AWS with prepared answers, in the order of the requests; botocore checks both against its service models."""

    def __init__(self) -> None:
        self._session = _session()
        self._clients = _CLIENTS
        self._stubs: dict[str, Any] = {}

    def answer(self, service: str, operation: str, response: Mapping[str, Any], **expected: Any) -> None:
        """Answer the next request to `service`, which must be `operation`, with the arguments given."""
        self._stub(service).add_response(operation, dict(response), expected or None)

    def refuse(self, service: str, operation: str, code: str, message: str) -> None:
        self._stub(service).add_client_error(operation, service_error_code=code, service_message=message)

    def identity(self) -> None:
        """The answer to who asks, which every command that changes something wants first."""
        self.answer("sts", "get_caller_identity", {"Account": "123456789012"})

    def close(self) -> None:
        for stub in self._stubs.values():
            stub.deactivate()

    def assert_all_asked(self) -> None:
        for stub in self._stubs.values():
            stub.assert_no_pending_responses()

    def client(self, service: str) -> Any:
        """The client with its stub: a request without an answer is an error, and reaches nobody."""
        self._stub(service)
        return _CLIENTS[service]

    def _stub(self, service: str) -> Any:
        from botocore.stub import Stubber

        if service not in self._stubs:
            self._stubs[service] = Stubber(super().client(service))
            self._stubs[service].activate()
        return self._stubs[service]


ID = "arn:aws:cloudformation:us-east-1:123456789012:stack/fleet/0123"
CHANGES = "arn:aws:cloudformation:us-east-1:123456789012:changeSet/maskfleet/4567"
TAGS = [{"Key": "maskfleet", "Value": "small"}]
NOW = datetime(2026, 11, 16, 12, 0, tzinfo=UTC)


def described(status: str, **more: Any) -> dict[str, Any]:
    """The answer of DescribeStacks for the stack `fleet` of maskfleet; without tags until a change set is executed."""
    tags = TAGS if status != "REVIEW_IN_PROGRESS" else []
    stack = {"StackId": ID, "StackName": "fleet", "CreationTime": NOW, "StackStatus": status, "Tags": tags}
    return {"Stacks": [{**stack, **more}]}


def happened(*lines: str) -> dict[str, Any]:
    """The answer of DescribeStackEvents for lines such as `Workers CREATE_FAILED why`, given oldest first."""
    events = []
    for number, line in enumerate(lines):
        address, status, *reason = line.split(" ", 2)
        kind = {"fleet": "AWS::CloudFormation::Stack", "Files": "AWS::EFS::FileSystem"}.get(address, "AWS::SNS::Topic")
        event = {
            "StackId": ID,
            "StackName": "fleet",
            "EventId": f"{number:03d}-{address}-{status}",
            "Timestamp": NOW + timedelta(seconds=number),
            "LogicalResourceId": address,
            "PhysicalResourceId": ID if address == "fleet" else f"{address.lower()}-id",
            "ResourceType": kind,
            "ResourceStatus": status,
        }
        events.append(event | ({"ResourceStatusReason": reason[0]} if reason else {}))
    return {"StackEvents": events[::-1]}


def proposed(*changes: dict[str, Any], status: str = "CREATE_COMPLETE", reason: str = "") -> dict[str, Any]:
    """The answer of DescribeChangeSet."""
    found: dict[str, Any] = {"Status": status, "ChangeSetId": CHANGES, "StackId": ID}
    found["Changes"] = [{"Type": "Resource", "ResourceChange": change} for change in changes]
    return found | ({"StatusReason": reason} if reason else {})


def has_change_sets(aws: StubbedAws, *tags: list[dict[str, str]]) -> None:
    """The stack has change sets that would give it these tags."""
    ids = [f"{CHANGES}-{number}" for number in range(len(tags))]
    aws.answer("cloudformation", "list_change_sets", {"Summaries": [{"ChangeSetId": one} for one in ids]}, StackName=ID)
    for identity, found in zip(ids, tags, strict=True):
        aws.answer("cloudformation", "describe_change_set", {**proposed(), "Tags": found}, ChangeSetName=identity)


def resources(*lines: str) -> dict[str, Any]:
    """The answer of ListStackResources for lines such as `Vpc AWS::EC2::VPC vpc-1 DELETE_FAILED why`."""
    found = []
    for line in lines:
        address, kind, identity, status, *reason = line.split(" ", 4)
        one = {"LogicalResourceId": address, "ResourceType": kind, "PhysicalResourceId": identity}
        one |= {"ResourceStatus": status, "LastUpdatedTimestamp": NOW}
        found.append(one | ({"ResourceStatusReason": reason[0]} if reason else {}))
    return {"StackResourceSummaries": found}


TOPIC = {"Action": "Add", "LogicalResourceId": "First", "ResourceType": "AWS::SNS::Topic"}
