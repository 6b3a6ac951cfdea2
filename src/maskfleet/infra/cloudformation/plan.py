"""`maskfleet infra plan`: the change set of a stack as a table, and what the stack costs; nothing is changed."""

from __future__ import annotations

from maskfleet.errors import InfraError
from maskfleet.infra.cloudformation.changes import (
    ChangeRequest,
    ChangeSet,
    counts,
    drop_change_set,
    make_change_set,
    table,
)
from maskfleet.infra.cloudformation.checks import check, check_new
from maskfleet.infra.cloudformation.client import LiveStack
from maskfleet.infra.cloudformation.kinds.kind import DATA
from maskfleet.infra.cloudformation.session import StackSession
from maskfleet.infra.costs import estimate

# What `up` does first about a stack in each of these states.
UNUSABLE = {
    "ROLLBACK_COMPLETE": "its creation failed; up deletes what is left of it and creates it again",
    "ROLLBACK_FAILED": "its creation failed; up deletes what is left of it and creates it again",
    "CREATE_FAILED": "its creation failed; up deletes what is left of it and creates it again",
    "UPDATE_ROLLBACK_FAILED": "an update failed, and so did its rollback; up continues the rollback first",
    "DELETE_FAILED": "its deletion failed; down continues it",
}


def plan(session: StackSession) -> bool:
    """Show what `up` would do; whether it would change anything."""
    preflight(session)
    stack = session.find()
    if stack is not None and (stack.is_busy or stack.status in UNUSABLE):
        why = UNUSABLE.get(stack.status, "CloudFormation is working on it; up waits for the end first")
        session.view.say(f"{session.text} is {stack.status}: {why}")
        say_costs(session)
        return True
    changes = propose(session, stack)
    if changes is None:
        session.view.say(f"{session.text}: no change")
        say_costs(session)
        return False
    discard(session, changes)
    say_costs(session)
    return True


def preflight(session: StackSession) -> None:
    """Check what can be known before anything is sent."""
    session.check_values()
    for note in check(session.aws, session.config.needs()):
        session.view.say(note)


def propose(session: StackSession, stack: LiveStack | None) -> ChangeSet | None:
    """A change set, shown as a table; None if nothing would change."""
    existing = stack if stack is not None and stack.status != "REVIEW_IN_PROGRESS" else None
    say = session.view.say
    if existing is None:
        for note in check_new(session.aws, session.config.needs()):
            say(note)
    request = ChangeRequest(session.name, session.template(), session.config.parameters(), session.tags)
    changes = make_change_set(session.aws, request, existing)
    if changes is None:
        return None
    say(f"{session.text}: {'change' if existing else 'create'}, {counts(changes.changes)}")
    for line in table(changes.changes, DATA):
        say(f"  {line}")
    return changes


def discard(session: StackSession, changes: ChangeSet) -> None:
    """Delete a change set, and the empty stack that CloudFormation made for it."""
    drop_change_set(session.aws, changes.id, changes.stack_id)


def say_costs(session: StackSession) -> None:
    for line in estimate(session.config.billed(), session.prices, region=session.aws.region):
        session.view.say(line)


def refuse_data_loss(session: StackSession, changes: ChangeSet, *, delete_data: bool) -> None:
    """Refuse changes that delete or replace a file system, unless `delete_data`."""
    lost = changes.lost_data(DATA)
    if lost and not delete_data:
        names = ", ".join(f"{one.address} ({one.id})" if one.id else one.address for one in lost)
        kept = " (the old one remains in the account)" if all(one.keeps_old for one in lost) else ""
        raise InfraError(
            f"this would take {names} with all data in it away from the cluster{kept}; nothing was changed",
            remedy="undo the change of settings, or copy the data elsewhere and give --delete-data",
        )
