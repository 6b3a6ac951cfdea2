"""`maskfleet infra status` and `outputs`: what CloudFormation says about a stack; nothing is changed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from maskfleet.errors import InfraError
from maskfleet.infra.cloudformation.client import LiveStack, stack_resources
from maskfleet.infra.cloudformation.events import events_of_last_operation, first_failure
from maskfleet.infra.cloudformation.plan import UNUSABLE
from maskfleet.infra.cloudformation.session import StackSession


@dataclass(frozen=True, slots=True)
class StackStatus:
    """A stack in a few facts."""

    stack: str
    region: str
    status: str
    """CloudFormation's word; an empty text if there is no stack."""
    detail: str
    resources: int
    types: dict[str, int]
    failed: tuple[str, ...]
    """Resources in a failed state, with the reason."""
    missing_outputs: tuple[str, ...]
    is_well: bool


def stack_status(session: StackSession) -> StackStatus:
    """What CloudFormation says about the stack, and what to do about it if it is not well."""
    stack = session.find()
    if stack is None:
        detail = f"it does not exist; {session.command('up')} creates it"
        return StackStatus(session.name, session.aws.region, "", detail, 0, {}, (), (), is_well=False)
    resources = [one for one in stack_resources(session.aws, stack.id) if one.status != "DELETE_COMPLETE"]
    failures = [one for one in resources if one.status.endswith("_FAILED")]
    missing = tuple(name for name in session.kind.outputs if name not in stack.outputs) if stack.is_created else ()
    return StackStatus(
        stack=session.name,
        region=session.aws.region,
        status=stack.status,
        detail=_detail(session, stack, missing),
        resources=len(resources),
        types=dict(Counter(one.type for one in resources).most_common()),
        failed=tuple(f"{one.address} ({one.type}): {one.reason}" for one in failures),
        missing_outputs=missing,
        is_well=stack.is_created and not failures and not missing,
    )


def stack_outputs(session: StackSession) -> dict[str, str]:
    """The outputs of the stack."""
    stack = session.find()
    if stack is None or not stack.outputs:
        state = "does not exist" if stack is None else f"is {stack.status} and has no outputs"
        raise InfraError(f"{session.text} {state}", remedy=f"{session.command('up')} creates it")
    return dict(sorted(stack.outputs.items()))


def _detail(session: StackSession, stack: LiveStack, missing: tuple[str, ...]) -> str:
    if stack.status == "REVIEW_IN_PROGRESS":
        return f"it is only a change set so far; {session.command('up')} creates it"
    if stack.is_busy:
        return f"CloudFormation is working on it; {session.command('up')} waits for the end"
    if missing:
        return f"it lacks the outputs {', '.join(missing)}; {session.command('up')} updates it to this template"
    if stack.status == "UPDATE_ROLLBACK_COMPLETE" or stack.status in UNUSABLE:
        cause = first_failure(events_of_last_operation(session.aws, stack.id))
        why = f": {cause.address} ({cause.type}): {cause.reason}" if cause is not None else ""
        return UNUSABLE.get(stack.status, "the last update failed, and the stack is as it was before it") + why
    return ""
