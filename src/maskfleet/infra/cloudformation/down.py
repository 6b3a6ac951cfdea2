"""`maskfleet infra down`: delete the stack, keep the data unless told otherwise, and say what remains and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from maskfleet.errors import InfraError
from maskfleet.infra.cloudformation.checks import check_identity, check_region
from maskfleet.infra.cloudformation.client import LiveStack, StackResource, stack_resources
from maskfleet.infra.cloudformation.diagnose import failed
from maskfleet.infra.cloudformation.events import StackEvent, Watch, last_event, wait_for
from maskfleet.infra.cloudformation.kinds.kind import NOTEBOOK
from maskfleet.infra.cloudformation.leftovers import (
    Kept,
    delete_file_system,
    kept_file_systems,
    kept_networks,
    network_interfaces,
)
from maskfleet.infra.cloudformation.session import StackSession
from maskfleet.infra.cloudformation.up import WAIT_S, waited


@dataclass(frozen=True, slots=True)
class StackDownOptions:
    """What `down` deletes, and how long it waits."""

    delete_data: bool = False
    force: bool = False
    """Whether resources that cannot be deleted are left behind."""
    wait_s: float = WAIT_S


def down(session: StackSession, options: StackDownOptions) -> None:
    """Delete the stack; run again, it resumes."""
    check_region(session.aws)
    check_identity(session.aws)
    stack = session.find()
    if stack is not None and stack.is_busy and not stack.status.startswith(("CREATE", "DELETE")):
        session.view.say(f"{session.text} is {stack.status}: it can be deleted once that has ended")
        stack = waited(session, stack, options.wait_s, verb="down")
    data = kept_file_systems(session.aws, session.name, session.prices)
    if stack is None and not (data and options.delete_data):
        session.view.say(f"nothing is left to remove: there is no {session.text}")
        _say_kept(session, data)
        return
    resources = [] if stack is None else _present(session, stack)
    lost = data if options.delete_data else [one for one in data if one.id in _deleted_with_stack(session, resources)]
    _confirm(session, resources, lost=lost, kept=[one for one in data if one not in lost])
    if stack is not None:
        _delete(session, options, stack, resources)
        session.view.say(f"{session.text} is deleted")
        data = kept_file_systems(session.aws, session.name, session.prices)
        _say_lost(session, lost, data)
    if options.delete_data:
        for one in data:
            session.view.say(f"deleting {one.id} with all data in it ({one.text})")
            delete_file_system(session.aws, one)
        data = []
    _say_kept(session, data)


def _present(session: StackSession, stack: LiveStack) -> list[StackResource]:
    """The resources of a stack that may be deleted."""
    if stack.is_protected:
        unprotect = (
            "aws cloudformation update-termination-protection --no-enable-termination-protection"
            f" --stack-name {session.name} --region {session.aws.region}"
        )
        raise InfraError(f"{session.text} has termination protection", remedy=f"if it may be deleted: {unprotect}")
    return [one for one in stack_resources(session.aws, stack.id) if one.status != "DELETE_COMPLETE"]


def _deleted_with_stack(session: StackSession, resources: Sequence[StackResource]) -> set[str]:
    """Ids of the resources that CloudFormation does not keep, by the template; one that it lacks counts as deleted."""
    policies = session.deletion_policies()
    return {one.id for one in resources if policies.get(one.address, "Delete") == "Delete"}


def _confirm(
    session: StackSession, resources: Sequence[StackResource], *, lost: Sequence[Kept], kept: Sequence[Kept]
) -> None:
    say = session.view.say
    if resources:
        count = len(resources)
        say(f"{count} resources of {session.text} will be deleted, and everything that runs on them will stop")
    disks = [one.id for one in resources if one.type == NOTEBOOK]
    if lost or disks:
        say("with all data in:")
    for one in lost:
        say(f"  {one.id}  {one.text}")
    for name in disks:
        say(f"  {name}  notebook instance, with ~/SageMaker")
    if lustre := [one.id for one in lost if one.service == "fsx"]:
        say("what is on Lustre and was not exported to S3 is lost; if it is linked to S3, this exports it first:")
        for identity in lustre:
            task = "aws fsx create-data-repository-task --type EXPORT_TO_REPOSITORY --report Enabled=false"
            say(f"  {task} --file-system-id {identity} --region {session.aws.region}")
    if kept:
        say("these file systems are kept:")
        for one in kept:
            say(f"  {one.id}  {one.text}")
    if not session.view.confirm_name("type the name of the stack to remove it", session.name):
        raise InfraError("nothing was removed: not confirmed", remedy="type the name of the stack, or give --yes")


def _delete(
    session: StackSession, options: StackDownOptions, stack: LiveStack, resources: Sequence[StackResource]
) -> None:
    aws = session.aws
    marker = last_event(aws, stack)
    mode = {"DeletionMode": "FORCE_DELETE_STACK"} if options.force and stack.status == "DELETE_FAILED" else {}
    aws.call("cloudformation", "delete_stack", StackName=stack.id, **mode)
    watch = Watch(f"{session.name}: delete", options.wait_s, marker, len(resources), again=session.command("down"))
    now, events = wait_for(aws, session.view, stack.id, watch)
    if now.status != "DELETE_COMPLETE":
        _say_blockers(session, stack_resources(aws, stack.id))
        raise failed(now, events, doing=f"deleting {session.text}", then=_then(session))
    _say_left(session, events, resources)


def _then(session: StackSession) -> str:
    down_ = session.command("down")
    return f"{down_} again; {down_} --force deletes the stack and leaves what cannot be deleted behind"


def _say_blockers(session: StackSession, resources: Sequence[StackResource]) -> None:
    """Show what could not be deleted, and the network interfaces that may be the reason."""
    say = session.view.say
    for one in resources:
        if one.status == "DELETE_FAILED":
            say(f"not deleted: {one.address} ({one.type}) {one.id}: {one.reason}")
    if blockers := network_interfaces(session.aws, resources):
        say("network interfaces that are still in its network:")
        for text in blockers:
            say(f"  {text}")


def _say_left(session: StackSession, events: Sequence[StackEvent], resources: Sequence[StackResource]) -> None:
    """Show what CloudFormation has left in the account: kept by the template, or not deletable."""
    skipped = list(dict.fromkeys(event.address for event in events if event.status == "DELETE_SKIPPED"))
    if skipped:
        session.view.say(f"CloudFormation kept, as the template says: {', '.join(skipped)}")
    ids = {one.address: one.id for one in resources}
    for event in events:
        if event.status == "DELETE_FAILED" and not event.of_stack:
            what = f"{event.address} ({event.type}) {ids.get(event.address, '')}: {event.reason}"
            session.view.say(f"left behind, and perhaps billed: {what}")


def _say_lost(session: StackSession, lost: Sequence[Kept], kept: Sequence[Kept]) -> None:
    """Show which file systems are gone with the stack."""
    still = {one.id for one in kept}
    for one in lost:
        if one.id not in still:
            what = "what was on it and not exported to S3" if one.service == "fsx" else "all data in it"
            session.view.say(f"{one.id} is deleted, and with it {what}")


def _say_kept(session: StackSession, data: Sequence[Kept]) -> None:
    """Show what remains, what it costs, why, and how to delete it."""
    say = session.view.say
    if networks := kept_networks(session.aws, session.name):
        say("parts of its network remain, because a file system is or was kept in it; they cost nothing:")
        for command in networks:
            say(f"  {command}")
    if not data:
        return
    say("these file systems hold your data, so they remain and are billed:")
    for one in data:
        say(f"  {one.id}  {one.text}")
    if any(one.service == "efs" for one in data):
        say("a new cluster uses such an EFS with the setting `efs_id`;")
    say(f"{session.command('down')} --delete-data deletes them")
