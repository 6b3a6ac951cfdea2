"""`plan` and `up`: what they show, ask, refuse and repair, with answers as AWS gives them."""

from __future__ import annotations

from typing import Any

import pytest
from cfn_template import read_template
from small_stack import CHANGES, ID, TOPIC, Screen, StubbedAws, described, happened, proposed
from typer.testing import CliRunner

from maskfleet.cli.main import app
from maskfleet.errors import ConfigError, InfraError
from maskfleet.infra.cloudformation import events
from maskfleet.infra.cloudformation.kinds.ec2 import EC2
from maskfleet.infra.cloudformation.plan import plan
from maskfleet.infra.cloudformation.up import WAIT_S, up
from tools import ROOT

FILES = {
    "LogicalResourceId": "Files",
    "ResourceType": "AWS::EFS::FileSystem",
    "PhysicalResourceId": "fs-0123456789abcdef0",
    "Action": "Modify",
    "Replacement": "True",
    "PolicyAction": "ReplaceAndRetain",
    "Details": [{"Target": {"Attribute": "Properties", "Name": "Encrypted", "RequiresRecreation": "Always"}}],
}
MADE = {"Id": CHANGES, "StackId": ID}
CREATED = (
    "fleet REVIEW_IN_PROGRESS",
    "fleet CREATE_IN_PROGRESS User Initiated",
    "First CREATE_IN_PROGRESS",
    "First CREATE_IN_PROGRESS Resource creation Initiated",
    "First CREATE_COMPLETE",
    "fleet CREATE_COMPLETE",
)
FAILED = (
    "fleet REVIEW_IN_PROGRESS",
    "fleet CREATE_IN_PROGRESS User Initiated",
    "First CREATE_IN_PROGRESS",
    "Files CREATE_IN_PROGRESS",
    "Workers CREATE_IN_PROGRESS",
    "Files CREATE_FAILED Resource creation cancelled",  # events of one moment come in any order
    "Workers CREATE_FAILED We currently do not have sufficient p5.48xlarge capacity in zone us-east-1a",
    "fleet ROLLBACK_IN_PROGRESS The following resource(s) failed to create: [Workers, Files]. Rollback requested.",
    "First DELETE_COMPLETE",
    "fleet ROLLBACK_COMPLETE",
)


def no_stack(aws: StubbedAws) -> None:
    aws.refuse("cloudformation", "describe_stacks", "ValidationError", "Stack with id fleet does not exist")


def proposes(aws: StubbedAws, *changes: dict[str, Any], kind: str = "CREATE") -> None:
    """CloudFormation compares the stack with the template, after a moment."""
    aws.answer("cloudformation", "create_change_set", MADE)
    aws.answer("cloudformation", "describe_change_set", proposed(*changes), ChangeSetName=CHANGES)


def executes(aws: StubbedAws, before: str, after: str, history: tuple[str, ...]) -> None:
    """The change set is executed: `history` is all events, of which the first was there before."""
    aws.answer("cloudformation", "describe_stacks", described(before))
    aws.answer("cloudformation", "describe_stack_events", happened(*history[:1]))
    aws.answer("cloudformation", "execute_change_set", {}, ChangeSetName=CHANGES)
    aws.answer("cloudformation", "describe_stacks", described(f"{after.split('_')[0]}_IN_PROGRESS"))
    aws.answer("cloudformation", "describe_stack_events", happened(*history[:3]))
    aws.answer("cloudformation", "describe_stacks", described(after))
    aws.answer("cloudformation", "describe_stack_events", happened(*history))


def test_up_creates_a_stack_and_shows_each_step_once(stubbed: StubbedAws, screen: Screen) -> None:
    stubbed.identity()
    no_stack(stubbed)
    proposes(stubbed, TOPIC)
    executes(stubbed, "REVIEW_IN_PROGRESS", "CREATE_COMPLETE", CREATED)
    up(screen.session(aws=stubbed))
    lines = screen.shown().splitlines()
    assert lines[0] == "stack fleet in us-east-1: create, 1 to create"
    assert lines[2] == "  create  First     AWS::SNS::Topic"
    assert lines[-3:] == [
        "First: create started",
        "First: create done after 2s (1/1)",
        "stack fleet in us-east-1 is CREATE_COMPLETE",
    ]


def test_a_failure_is_explained_by_the_first_resource_that_failed(stubbed: StubbedAws, screen: Screen) -> None:
    stubbed.identity()
    no_stack(stubbed)
    proposes(stubbed, TOPIC)
    executes(stubbed, "REVIEW_IN_PROGRESS", "ROLLBACK_COMPLETE", FAILED)
    with pytest.raises(InfraError) as caught:
        up(screen.session(aws=stubbed))
    assert caught.value.what == (
        "creating stack fleet in us-east-1 failed at Workers (AWS::SNS::Topic): We currently do not have sufficient"
        " p5.48xlarge capacity in zone us-east-1a; 1 more failed because of it; the stack is ROLLBACK_COMPLETE"
    )
    assert "choose another zone or instance type" in caught.value.remedy
    assert caught.value.remedy.endswith("then maskfleet infra up small resumes")


def test_up_deletes_what_a_failed_creation_left_and_creates_it_again(stubbed: StubbedAws, screen: Screen) -> None:
    stubbed.identity()
    stubbed.answer("cloudformation", "describe_stacks", described("ROLLBACK_COMPLETE"))
    stubbed.answer("cloudformation", "describe_stack_events", happened(*FAILED))
    stubbed.answer("cloudformation", "describe_stack_events", happened(*FAILED))
    stubbed.answer("cloudformation", "delete_stack", {}, StackName=ID)
    stubbed.answer("cloudformation", "describe_stacks", described("DELETE_COMPLETE"))
    stubbed.answer("cloudformation", "describe_stack_events", happened(*FAILED, "fleet DELETE_COMPLETE"))
    proposes(stubbed, TOPIC)
    executes(stubbed, "REVIEW_IN_PROGRESS", "CREATE_COMPLETE", CREATED)
    up(screen.session(aws=stubbed))
    shown = screen.shown()
    assert "its creation failed: Workers (AWS::SNS::Topic): We currently do not have sufficient" in shown
    assert shown.endswith("stack fleet in us-east-1 is CREATE_COMPLETE\n")


def test_up_continues_a_rollback_that_failed_and_then_updates(stubbed: StubbedAws, screen: Screen) -> None:
    stubbed.identity()
    stubbed.answer("cloudformation", "describe_stacks", described("UPDATE_ROLLBACK_FAILED"))
    stubbed.answer("cloudformation", "describe_stack_events", happened("fleet UPDATE_ROLLBACK_FAILED"))
    stubbed.answer("cloudformation", "continue_update_rollback", {}, StackName=ID)
    stubbed.answer("cloudformation", "describe_stacks", described("UPDATE_ROLLBACK_COMPLETE"))
    stubbed.answer(
        "cloudformation",
        "describe_stack_events",
        happened("fleet UPDATE_ROLLBACK_FAILED", "fleet UPDATE_ROLLBACK_COMPLETE"),
    )
    stubbed.answer("cloudformation", "create_change_set", MADE)
    stubbed.answer(
        "cloudformation",
        "describe_change_set",
        proposed(status="FAILED", reason="The submitted information didn't contain changes."),
    )
    stubbed.answer("cloudformation", "delete_change_set", {})
    up(screen.session(aws=stubbed))
    assert screen.shown().endswith("nothing to do: the stack matches the settings\n")


def test_a_rollback_that_fails_again_names_the_resource_to_skip(stubbed: StubbedAws, screen: Screen) -> None:
    stubbed.identity()
    stubbed.answer("cloudformation", "describe_stacks", described("UPDATE_ROLLBACK_FAILED"))
    stubbed.answer("cloudformation", "describe_stack_events", happened("fleet UPDATE_ROLLBACK_FAILED"))
    stubbed.answer("cloudformation", "continue_update_rollback", {})
    stubbed.answer("cloudformation", "describe_stacks", described("UPDATE_ROLLBACK_FAILED"))
    history = ("fleet UPDATE_ROLLBACK_FAILED", "First UPDATE_FAILED it is gone", "fleet UPDATE_ROLLBACK_FAILED again")
    stubbed.answer("cloudformation", "describe_stack_events", happened(*history))
    with pytest.raises(InfraError, match=r"failed at First \(AWS::SNS::Topic\): it is gone") as caught:
        up(screen.session(aws=stubbed))
    assert "continue-update-rollback --stack-name fleet --resources-to-skip First" in caught.value.remedy


def test_up_refuses_a_stack_whose_deletion_failed(stubbed: StubbedAws, screen: Screen) -> None:
    stubbed.identity()
    stubbed.answer("cloudformation", "describe_stacks", described("DELETE_FAILED"))
    with pytest.raises(InfraError, match="DELETE_FAILED") as caught:
        up(screen.session(aws=stubbed))
    assert caught.value.remedy.startswith("maskfleet infra down small continues the deletion")


@pytest.mark.parametrize("delete_data", [False, True])
def test_a_file_system_is_replaced_only_on_request(stubbed: StubbedAws, screen: Screen, delete_data: bool) -> None:
    stubbed.identity()
    stubbed.answer("cloudformation", "describe_stacks", described("CREATE_COMPLETE"))
    proposes(stubbed, FILES)
    if delete_data:
        history = (
            "fleet CREATE_COMPLETE",
            "fleet UPDATE_IN_PROGRESS",
            "Files UPDATE_COMPLETE",
            "fleet UPDATE_COMPLETE",
        )
        executes(stubbed, "CREATE_COMPLETE", "UPDATE_COMPLETE", history)
        up(screen.session(aws=stubbed), delete_data=True)
    else:
        stubbed.answer("cloudformation", "delete_change_set", {})
        stubbed.answer("cloudformation", "describe_stacks", described("CREATE_COMPLETE"))
        with pytest.raises(InfraError, match=r"would take Files \(fs-0123456789abcdef0\) with all data") as caught:
            up(screen.session(aws=stubbed))
        assert "--delete-data" in caught.value.remedy
    assert (
        "replace  Files     AWS::EFS::FileSystem  fs-0123456789abcdef0; Encrypted; HOLDS DATA: the old one remains"
        in (screen.shown())
    )


def test_a_notebook_instance_is_replaced_only_on_request_because_its_disk_goes_with_it(
    stubbed: StubbedAws, screen: Screen
) -> None:
    kind = "AWS::SageMaker::NotebookInstance"
    notebook = {"LogicalResourceId": "Notebook", "ResourceType": kind, "PhysicalResourceId": "n", "Action": "Modify"}
    stubbed.identity()
    stubbed.answer("cloudformation", "describe_stacks", described("CREATE_COMPLETE"))
    proposes(stubbed, {**notebook, "Replacement": "True"})
    stubbed.answer("cloudformation", "delete_change_set", {})
    stubbed.answer("cloudformation", "describe_stacks", described("CREATE_COMPLETE"))
    with pytest.raises(InfraError, match=r"would take Notebook \(n\) with all data in it away"):
        up(screen.session(aws=stubbed))
    assert "ALL DATA IN IT IS DELETED" in screen.shown()


def test_without_a_yes_nothing_happens_and_the_change_set_is_deleted(
    stubbed: StubbedAws, screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubbed.identity()
    no_stack(stubbed)
    proposes(stubbed, TOPIC)
    stubbed.answer("cloudformation", "delete_change_set", {}, ChangeSetName=CHANGES)
    stubbed.answer("cloudformation", "describe_stacks", described("REVIEW_IN_PROGRESS"))
    stubbed.answer("cloudformation", "delete_stack", {}, StackName=ID)
    session = screen.session(aws=stubbed, yes=False)
    monkeypatch.setattr(session.view, "confirm", lambda question: False)
    with pytest.raises(InfraError, match="nothing was changed"):
        up(session)


def test_plan_leaves_nothing_behind(stubbed: StubbedAws, screen: Screen) -> None:
    stubbed.identity()
    no_stack(stubbed)
    proposes(stubbed, TOPIC)
    stubbed.answer("cloudformation", "delete_change_set", {}, ChangeSetName=CHANGES)
    stubbed.answer("cloudformation", "describe_stacks", described("REVIEW_IN_PROGRESS"))
    stubbed.answer("cloudformation", "delete_stack", {}, StackName=ID)
    assert plan(screen.session(aws=stubbed)) is True
    assert "0.0450  NAT gateway" in screen.shown()


def test_a_value_that_the_template_does_not_allow_is_refused_before_aws_is_asked(
    stubbed: StubbedAws, screen: Screen
) -> None:
    with pytest.raises(ConfigError, match=r"Topics is '3', which .*small\.yaml does not allow") as caught:
        up(screen.session(aws=stubbed, topics=3))
    assert caught.value.remedy.endswith("It is one of 1, 2")


def test_settings_that_cloudformation_refuses_are_quoted(stubbed: StubbedAws, screen: Screen) -> None:
    stubbed.identity()
    no_stack(stubbed)
    reason = "Parameters: [Topics] must be a number"
    stubbed.refuse("cloudformation", "create_change_set", "ValidationError", reason)
    with pytest.raises(InfraError, match=r"does not accept the settings of stack fleet: .*must be a number"):
        up(screen.session(aws=stubbed))


def test_a_stack_of_somebody_else_is_not_touched(stubbed: StubbedAws, screen: Screen) -> None:
    stubbed.identity()
    stubbed.answer("cloudformation", "describe_stacks", described("CREATE_COMPLETE", Tags=[]))
    with pytest.raises(InfraError, match=r"the name is in use: stack fleet in us-east-1 is not one of") as caught:
        up(screen.session(aws=stubbed))
    assert "add the tag maskfleet=small" in caught.value.remedy


def test_up_follows_an_operation_that_runs_already(stubbed: StubbedAws, screen: Screen) -> None:
    stubbed.identity()
    stubbed.answer("cloudformation", "describe_stacks", described("CREATE_IN_PROGRESS"))
    stubbed.answer("cloudformation", "describe_stack_events", happened(*CREATED[:3]))
    stubbed.answer("cloudformation", "describe_stacks", described("CREATE_COMPLETE"))
    stubbed.answer("cloudformation", "describe_stack_events", happened(*CREATED))
    stubbed.refuse("cloudformation", "create_change_set", "ValidationError", "No updates are to be performed.")
    up(screen.session(aws=stubbed))
    shown = screen.shown()
    assert "is CREATE_IN_PROGRESS: waiting for the end" in shown
    assert "First: create done after 2s" in shown
    assert shown.endswith("nothing to do: the stack matches the settings\n")


def test_ctrl_c_leaves_the_stack_to_cloudformation(
    stubbed: StubbedAws, screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(events, "_pause", interrupted)
    stubbed.identity()
    no_stack(stubbed)
    proposes(stubbed, TOPIC)
    stubbed.answer("cloudformation", "describe_stacks", described("REVIEW_IN_PROGRESS"))
    stubbed.answer("cloudformation", "describe_stack_events", happened(*CREATED[:1]))
    stubbed.answer("cloudformation", "execute_change_set", {})
    stubbed.answer("cloudformation", "describe_stacks", described("CREATE_IN_PROGRESS"))
    stubbed.answer("cloudformation", "describe_stack_events", happened(*CREATED[:3]))
    with pytest.raises(InfraError, match="CloudFormation continues by itself") as caught:
        up(screen.session(aws=stubbed))
    assert caught.value.exit_code == 130
    assert caught.value.remedy.startswith("maskfleet infra up small continues to wait")


def test_a_wait_ends(stubbed: StubbedAws, screen: Screen) -> None:
    stubbed.identity()
    no_stack(stubbed)
    proposes(stubbed, TOPIC)
    stubbed.answer("cloudformation", "describe_stacks", described("REVIEW_IN_PROGRESS"))
    stubbed.answer("cloudformation", "describe_stack_events", happened(*CREATED[:1]))
    stubbed.answer("cloudformation", "execute_change_set", {})
    stubbed.answer("cloudformation", "describe_stacks", described("CREATE_IN_PROGRESS"))
    stubbed.answer("cloudformation", "describe_stack_events", happened(*CREATED[:3]))
    with pytest.raises(InfraError, match="still CREATE_IN_PROGRESS after 0 s") as caught:
        up(screen.session(aws=stubbed), wait_s=0)
    assert caught.value.remedy == "maskfleet infra up small continues to wait; --wait SECONDS allows more time"


def test_the_wait_is_longer_than_the_stack_waits_for_its_nodes() -> None:
    resources = read_template(EC2.template_file())["Resources"].values()
    signals = [one["CreationPolicy"]["ResourceSignal"]["Timeout"] for one in resources if "CreationPolicy" in one]
    limits = {"PT30M": 1800, "PT1H": 3600}
    # Before the nodes come the network, its NAT gateway and Lustre; after nodes that failed, the rollback.
    assert max(limits[one] for one in signals) + 1800 <= WAIT_S
    page = (ROOT / "docs" / "run-anywhere" / "infra.md").read_text(encoding="utf-8")
    assert f"`--wait` seconds ({WAIT_S:.0f})" in page


@pytest.mark.parametrize("verb", ["up", "down"])
def test_the_help_names_the_wait(verb: str) -> None:
    shown = CliRunner().invoke(app, ["infra", verb, "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    assert f"{WAIT_S:.0f}" in shown
