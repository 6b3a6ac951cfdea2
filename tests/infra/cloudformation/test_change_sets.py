"""Change sets as CloudFormation treats them: stacks under review, refusals, and states that lag behind a request."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.stub import ANY
from small_stack import CHANGES, ID, TAGS, TOPIC, Screen, StubbedAws, described, happened, has_change_sets, proposed
from test_up import CREATED, MADE, executes, no_stack, proposes

from maskfleet.errors import InfraError
from maskfleet.infra.cloudformation.down import StackDownOptions, down
from maskfleet.infra.cloudformation.plan import plan
from maskfleet.infra.cloudformation.up import up

EARLY = (
    "The following hook(s)/validation failed: [AWS::EarlyValidation::ResourceExistenceCheck]. To troubleshoot Early"
    " Validation errors, use the DescribeEvents API for detailed failure information."
)
TAKEN = {
    "EventId": "1",
    "EventType": "VALIDATION_ERROR",
    "LogicalResourceId": "First",
    "ResourceType": "AWS::SNS::Topic",
    "ValidationName": "NAME_CONFLICT_VALIDATION",
    "ValidationStatus": "FAILED",
    "ValidationFailureMode": "FAIL",
    "ValidationStatusReason": "Resource of type 'AWS::SNS::Topic' with identifier 'first' already exists.",
    "ValidationPath": "/Resources/First/Properties",
}
HOOK = {
    "EventId": "2",
    "EventType": "HOOK_INVOCATION_ERROR",
    "LogicalResourceId": "Files",
    "ResourceType": "AWS::EFS::FileSystem",
    "HookType": "Ours::Security::Check",
    "HookStatus": "HOOK_COMPLETE_FAILED",
    "HookFailureMode": "FAIL",
    "HookStatusReason": "file systems need the tag owner",
}
WARNING = {**TAKEN, "EventId": "3", "ValidationFailureMode": "WARN", "ValidationStatusReason": "only a warning"}
BARE = {"EventId": "4", "EventType": "STACK_EVENT", "OperationStatus": "FAILED"}


def is_refused(aws: StubbedAws) -> None:
    """CloudFormation makes an empty stack and a change set for it, and refuses the change set."""
    aws.identity()
    no_stack(aws)
    aws.answer("cloudformation", "create_change_set", MADE)
    aws.answer("cloudformation", "describe_change_set", proposed(status="FAILED", reason=EARLY))


def is_cleaned_up(aws: StubbedAws) -> None:
    aws.answer("cloudformation", "delete_change_set", {}, ChangeSetName=CHANGES)
    aws.answer("cloudformation", "describe_stacks", described("REVIEW_IN_PROGRESS"), StackName=ID)
    aws.answer("cloudformation", "delete_stack", {}, StackName=ID)


def test_a_refused_change_set_is_explained_resource_by_resource(stubbed: StubbedAws, screen: Screen) -> None:
    is_refused(stubbed)
    stubbed.answer(
        "cloudformation",
        "describe_events",
        {"OperationEvents": [TAKEN, HOOK, WARNING, BARE, TAKEN]},
        ChangeSetName=CHANGES,
        Filters={"FailedEvents": True},
    )
    is_cleaned_up(stubbed)
    with pytest.raises(InfraError) as caught:
        plan(screen.session(aws=stubbed))
    assert caught.value.what == (
        f"CloudFormation does not accept the settings of stack fleet: {EARLY}\n"
        "  First (AWS::SNS::Topic): Resource of type 'AWS::SNS::Topic' with identifier 'first' already exists. (at"
        " /Resources/First/Properties)\n"
        "  Files (AWS::EFS::FileSystem): file systems need the tag owner"
    )
    assert "something with this name exists outside of the stack" in caught.value.remedy


def test_a_refusal_whose_details_may_not_be_read_says_what_is_missing(stubbed: StubbedAws, screen: Screen) -> None:
    is_refused(stubbed)
    stubbed.refuse("cloudformation", "describe_events", "AccessDenied", "not authorized")
    is_cleaned_up(stubbed)
    with pytest.raises(InfraError) as caught:
        up(screen.session(aws=stubbed))
    assert "AWS::EarlyValidation::ResourceExistenceCheck" in caught.value.what
    assert "\n  the details are missing: " in caught.value.what
    assert "cloudformation:DescribeEvents" in caught.value.what


def test_a_change_set_asks_for_no_more_than_iam_resources(stubbed: StubbedAws, screen: Screen) -> None:
    given = {"StackName": "fleet", "ChangeSetType": "CREATE", "Capabilities": ["CAPABILITY_IAM"]}
    named = {"ChangeSetName": ANY, "TemplateBody": ANY, "Parameters": ANY, "Tags": TAGS}
    stubbed.identity()
    no_stack(stubbed)
    stubbed.answer("cloudformation", "create_change_set", MADE, **given, **named)
    stubbed.answer("cloudformation", "describe_change_set", proposed(TOPIC))
    is_cleaned_up(stubbed)
    assert plan(screen.session(aws=stubbed)) is True


@pytest.mark.parametrize("tags", [(), (TAGS,), (TAGS, TAGS)], ids=["no change set", "one", "two"])
def test_up_takes_over_a_stack_that_is_only_a_change_set_of_ours(
    stubbed: StubbedAws, screen: Screen, tags: tuple[list[dict[str, str]], ...]
) -> None:
    stubbed.identity()
    stubbed.answer("cloudformation", "describe_stacks", described("REVIEW_IN_PROGRESS"))
    has_change_sets(stubbed, *tags)
    proposes(stubbed, TOPIC)
    executes(stubbed, "REVIEW_IN_PROGRESS", "CREATE_COMPLETE", CREATED)
    up(screen.session(aws=stubbed))
    assert screen.shown().endswith("stack fleet in us-east-1 is CREATE_COMPLETE\n")


@pytest.mark.parametrize(
    ("tags", "what"),
    [
        ([{"Key": "maskfleet", "Value": "large"}], "is a stack large of maskfleet"),
        ([{"Key": "owner", "Value": "them"}], "is not one of maskfleet's"),
    ],
)
def test_a_change_set_of_somebody_else_is_not_touched(
    stubbed: StubbedAws, screen: Screen, tags: list[dict[str, str]], what: str
) -> None:
    stubbed.identity()
    stubbed.answer("cloudformation", "describe_stacks", described("REVIEW_IN_PROGRESS"))
    has_change_sets(stubbed, TAGS, tags)
    with pytest.raises(InfraError, match=f"the name is in use: stack fleet in us-east-1 {what}") as caught:
        down(screen.session(aws=stubbed), StackDownOptions())
    assert "delete it in the CloudFormation console" in caught.value.remedy


@pytest.mark.parametrize(("before", "after"), [("REVIEW_IN_PROGRESS", "CREATE"), ("UPDATE_COMPLETE", "UPDATE")])
def test_a_state_that_an_earlier_operation_left_is_not_the_end(
    stubbed: StubbedAws, screen: Screen, before: str, after: str
) -> None:
    history: tuple[Any, ...] = (
        f"fleet {before}",
        f"fleet {after}_IN_PROGRESS User Initiated",
        f"First {after}_FAILED no",
        f"fleet {after}_COMPLETE",
    )
    stubbed.identity()
    if after == "CREATE":
        no_stack(stubbed)
    else:
        stubbed.answer("cloudformation", "describe_stacks", described(before))
    proposes(stubbed, TOPIC)
    stubbed.answer("cloudformation", "describe_stacks", described(before))
    stubbed.answer("cloudformation", "describe_stack_events", happened(*history[:1]))
    stubbed.answer("cloudformation", "execute_change_set", {}, ChangeSetName=CHANGES)
    # As it was; as it was, with the first event of the operation; the end, whose event comes late; the end.
    for status, seen in ((before, 1), (before, 2), (f"{after}_COMPLETE", 3), (f"{after}_COMPLETE", 4)):
        stubbed.answer("cloudformation", "describe_stacks", described(status))
        stubbed.answer("cloudformation", "describe_stack_events", happened(*history[:seen]))
    up(screen.session(aws=stubbed))
    assert screen.shown().endswith(f"stack fleet in us-east-1 is {after}_COMPLETE\n")
