"""What CloudFormation does and moto does not, played on top of moto.

- A stack that is only a change set so far has no tags.
- A request to execute a change set or to delete a stack is answered before anything happens: the first look at the
  stack and at its events shows what was there before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from maskfleet.infra.cloudformation.client import Aws

_STARTS = ("execute_change_set", "delete_stack")


def play(monkeypatch: pytest.MonkeyPatch) -> None:
    """Play them from now on, in every request of maskfleet to CloudFormation."""
    call, pages = Aws.call, Aws.pages
    old_stacks: dict[str, Any] = {}
    old_events: dict[str, Any] = {}

    def called(aws: Aws, service: str, operation: str, **arguments: Any) -> Any:
        stack = arguments.get("StackName", "")
        if operation in _STARTS:
            if operation == "execute_change_set":
                stack = call(aws, service, "describe_change_set", **arguments)["StackId"]
            old_stacks[stack] = called(aws, service, "describe_stacks", StackName=stack)
            old_events[stack] = list(pages(aws, service, "describe_stack_events", StackName=stack))
        if operation == "describe_stacks" and stack in old_stacks:
            return old_stacks.pop(stack)
        answer = call(aws, service, operation, **arguments)
        if operation == "describe_stacks":
            for one in answer["Stacks"]:
                if one["StackStatus"] == "REVIEW_IN_PROGRESS":
                    one["Tags"] = []
        return answer

    def paged(aws: Aws, service: str, operation: str, **arguments: Any) -> Iterator[Any]:
        if operation == "describe_stack_events" and arguments["StackName"] in old_events:
            return iter(old_events.pop(arguments["StackName"]))
        return pages(aws, service, operation, **arguments)

    monkeypatch.setattr(Aws, "call", called)
    monkeypatch.setattr(Aws, "pages", paged)
