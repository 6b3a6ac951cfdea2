"""`maskfleet infra up`: check, show the change set, ask, execute it, and wait for the end."""

from __future__ import annotations

from maskfleet.errors import InfraError
from maskfleet.infra.cloudformation.changes import ChangeSet
from maskfleet.infra.cloudformation.client import LiveStack, find_stack
from maskfleet.infra.cloudformation.diagnose import failed
from maskfleet.infra.cloudformation.events import Watch, events_of_last_operation, first_failure, last_event, wait_for
from maskfleet.infra.cloudformation.plan import discard, preflight, propose, refuse_data_loss, say_costs
from maskfleet.infra.cloudformation.session import StackSession

# The workers alone may take an hour, after the network and Lustre and before a rollback.
WAIT_S = 7200.0


def up(session: StackSession, *, delete_data: bool = False, wait_s: float = WAIT_S) -> None:
    """Create or change the stack; run again after a failure or Ctrl-C, it resumes."""
    preflight(session)
    stack = usable(session, session.find(), wait_s)
    changes = propose(session, stack)
    say_costs(session)
    if changes is None:
        session.view.say("nothing to do: the stack matches the settings")
        return
    try:
        refuse_data_loss(session, changes, delete_data=delete_data)
        if not session.view.confirm(f"apply this to {session.text}?"):
            raise InfraError("nothing was changed: not confirmed", remedy="confirm, or give --yes")
    except BaseException:
        discard(session, changes)
        raise
    _execute(session, changes, wait_s)


def usable(session: StackSession, stack: LiveStack | None, wait_s: float) -> LiveStack | None:
    """The stack in a state in which it can be changed: waits, and repairs where nothing can be lost."""
    if stack is not None and stack.is_busy:
        session.view.say(f"{session.text} is {stack.status}: waiting for the end")
        stack = waited(session, stack, wait_s)
    match stack.status if stack is not None else "":
        case "" | "DELETE_COMPLETE":
            return None
        case "ROLLBACK_COMPLETE" | "ROLLBACK_FAILED" | "CREATE_FAILED":
            assert stack is not None
            _delete_failed_creation(session, stack, wait_s)
            return None
        case "UPDATE_ROLLBACK_FAILED":
            assert stack is not None
            return _continue_rollback(session, stack, wait_s)
        case "DELETE_FAILED":
            raise InfraError(
                f"{session.text} is DELETE_FAILED: it cannot be changed any more",
                remedy=f"{session.command('down')} continues the deletion; then run up again",
            )
        case _:
            return stack


def waited(session: StackSession, stack: LiveStack, wait_s: float, *, verb: str = "up") -> LiveStack:
    """The stack after the operation that runs now, however it ends; `verb` is the command that waits."""
    began = events_of_last_operation(session.aws, stack.id)
    after = began[0].id if began else None
    watch = Watch(f"{session.name}: {_doing(stack)}", wait_s, after, again=session.command(verb))
    return wait_for(session.aws, session.view, stack.id, watch)[0]


def _delete_failed_creation(session: StackSession, stack: LiveStack, wait_s: float) -> None:
    """Delete what a creation that failed has left; CloudFormation can do nothing else with it."""
    cause = first_failure(events_of_last_operation(session.aws, stack.id))
    why = f": {cause.address} ({cause.type}): {cause.reason}" if cause is not None else ""
    session.view.say(f"{session.text} is {stack.status}: its creation failed{why}")
    if not session.view.confirm("delete what is left of it, and create it again?"):
        raise InfraError("nothing was changed: not confirmed", remedy="confirm, or give --yes")
    marker = last_event(session.aws, stack)
    session.aws.call("cloudformation", "delete_stack", StackName=stack.id)
    watch = Watch(f"{session.name}: delete", wait_s, marker, again=session.command("up"))
    gone, events = wait_for(session.aws, session.view, stack.id, watch)
    if gone.status != "DELETE_COMPLETE":
        raise failed(gone, events, doing=f"deleting {session.text}", then=f"{session.command('down')} continues it")


def _continue_rollback(session: StackSession, stack: LiveStack, wait_s: float) -> LiveStack:
    session.view.say(f"{session.text} is UPDATE_ROLLBACK_FAILED: continuing the rollback to its last good state")
    marker = last_event(session.aws, stack)
    session.aws.call("cloudformation", "continue_update_rollback", StackName=stack.id)
    watch = Watch(f"{session.name}: roll back", wait_s, marker, again=session.command("up"))
    now, events = wait_for(session.aws, session.view, stack.id, watch)
    if now.status != "UPDATE_ROLLBACK_COMPLETE":
        cause = first_failure(events)
        skip = f" --resources-to-skip {cause.address}" if cause is not None else ""
        then = (
            "run up again; if that resource cannot be fixed: aws cloudformation continue-update-rollback"
            f" --stack-name {session.name}{skip} --region {session.aws.region}"
        )
        raise failed(now, events, doing=f"rolling back {session.text}", then=then)
    return now


def _execute(session: StackSession, changes: ChangeSet, wait_s: float) -> None:
    aws, then = session.aws, f"{session.command('up')} resumes"
    before = find_stack(aws, changes.stack_id)
    marker = last_event(aws, before)
    aws.call("cloudformation", "execute_change_set", ChangeSetName=changes.id)
    is_new = before is not None and before.status == "REVIEW_IN_PROGRESS"
    verb = "create" if is_new else "change"
    steps = len(changes.changes)
    watch = Watch(f"{session.name}: {verb}", wait_s, marker, steps, again=session.command("up"))
    stack, events = wait_for(aws, session.view, changes.stack_id, watch)
    if stack.status != ("CREATE_COMPLETE" if is_new else "UPDATE_COMPLETE"):
        raise failed(stack, events, doing=f"{'creating' if is_new else 'changing'} {session.text}", then=then)
    session.view.say(f"{session.text} is {stack.status}")


def _doing(stack: LiveStack) -> str:
    return {"CREATE": "create", "UPDATE": "change", "DELETE": "delete"}.get(stack.status.split("_")[0], "roll back")
