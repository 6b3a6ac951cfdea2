"""The events of a stack: what CloudFormation does to each resource, and a wait for the end that shows it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from maskfleet.errors import InfraError
from maskfleet.infra.cloudformation.client import Aws, LiveStack, find_stack
from maskfleet.infra.view import InfraView, ResourceProgress

POLL_S = 5.0
TICK_S = 0.25
_ACTIONS = {"CREATE": "create", "UPDATE": "change", "DELETE": "destroy", "IMPORT": "import", "ROLLBACK": "roll back"}
# Failures that only follow from another one.
_CASCADE = ("cancelled", "The following resource(s) failed to")


@dataclass(frozen=True, slots=True)
class StackEvent:
    """One event of one resource, or of the stack itself."""

    id: str
    at: datetime
    address: str
    type: str
    status: str
    reason: str = ""
    of_stack: bool = False
    elapsed_s: float | None = None

    @property
    def kind(self) -> str:
        """As the view shows it."""
        if self.of_stack:
            return "stack"
        endings = {"IN_PROGRESS": "apply_start", "FAILED": "apply_errored"}
        return next((kind for end, kind in endings.items() if self.status.endswith(end)), "apply_complete")

    @property
    def action(self) -> str:
        if self.status == "DELETE_SKIPPED":
            return "keep"
        return _ACTIONS.get(self.status.split("_")[0], self.status.lower())

    @property
    def is_cause(self) -> bool:
        """Whether it is a failure that does not merely follow from another one."""
        return self.kind == "apply_errored" and not any(text in self.reason for text in _CASCADE)


@dataclass(slots=True)
class StackProgress:
    """What CloudFormation has done so far in one operation."""

    steps: int = 0
    completed: int = 0
    read: int = 0
    rows: dict[str, ResourceProgress] = field(default_factory=dict)
    events: list[StackEvent] = field(default_factory=list)

    def in_state(self, state: str) -> list[ResourceProgress]:
        return [row for row in self.rows.values() if row.state == state]

    def add(self, event: StackEvent, now: float) -> StackEvent | None:
        """Add one event, seen at `now`; the event to show, None if it says nothing new."""
        self.events.append(event)
        if event.of_stack:
            return None
        known = self.rows.get(event.address)
        is_same = known is not None and known.state == "running" and known.action == event.action
        if event.kind == "apply_start":
            if is_same:  # CloudFormation sends a second one as soon as the resource has an id
                return None
            self.rows[event.address] = ResourceProgress(event.address, event.action, "running", now)
            return event
        row = known if known is not None and is_same else ResourceProgress(event.address, event.action, "running", now)
        self.rows[event.address] = row
        row.elapsed_s = _duration(self.events, event)
        row.state = "failed" if event.kind == "apply_errored" else "done"
        self.completed += row.state == "done"
        self.steps = max(self.steps, self.completed)
        return StackEvent(
            event.id, event.at, event.address, event.type, event.status, event.reason, elapsed_s=row.elapsed_s
        )


def last_event(aws: Aws, stack: LiveStack | None) -> str | None:
    """Id of the newest event of a stack, from which an operation that begins now is followed."""
    if stack is None:
        return None
    return next((event.id for event in _newest_first(aws, stack.id)), None)


def events_after(aws: Aws, stack_id: str, event_id: str | None) -> list[StackEvent]:
    """The events after the one with that id, oldest first; all of them without one."""
    found = []
    for event in _newest_first(aws, stack_id):
        if event.id == event_id:
            break
        found.append(event)
    return found[::-1]


def events_of_last_operation(aws: Aws, stack_id: str) -> list[StackEvent]:
    """The events since somebody last asked for a change of the stack, oldest first."""
    found = []
    for event in _newest_first(aws, stack_id):
        found.append(event)
        if event.of_stack and event.status in ("CREATE_IN_PROGRESS", "UPDATE_IN_PROGRESS", "DELETE_IN_PROGRESS"):
            break
    return found[::-1]


def first_failure(events: Iterable[StackEvent]) -> StackEvent | None:
    """The failure that caused the others: the earliest that is no cancellation."""
    failed = [event for event in events if event.kind == "apply_errored"]
    return next((event for event in failed if event.is_cause), failed[0] if failed else None)


@dataclass(frozen=True, slots=True)
class Watch:
    """How to wait for an operation: what it is called, where its events begin, and how long it may take."""

    title: str
    limit_s: float
    after: str | None = None
    steps: int = 0
    again: str = ""
    """The command that continues to wait."""
    sleep: Callable[[float], None] = time.sleep


def wait_for(aws: Aws, view: InfraView, stack_id: str, watch: Watch) -> tuple[LiveStack, Sequence[StackEvent]]:
    """Show what happens to a stack until CloudFormation has ended; the stack then, and the events."""
    progress = StackProgress(steps=watch.steps)
    seen, began = watch.after, time.monotonic()
    try:
        with view.watching(watch.title, progress):
            while True:
                stack = find_stack(aws, stack_id)  # before the events, so that the last ones are not missed
                for event in events_after(aws, stack_id, seen):
                    seen = event.id
                    if (shown := progress.add(event, time.monotonic())) is not None:
                        view.event(shown, progress)
                if stack is None or stack.status == "DELETE_COMPLETE" or _has_ended(stack, progress.events):
                    break
                if time.monotonic() - began >= watch.limit_s:
                    raise _too_long(stack, watch)
                _pause(view, progress, watch)
    except KeyboardInterrupt:
        raise _stopped(watch) from None
    return stack or LiveStack(stack_id, "", "DELETE_COMPLETE"), progress.events


def _has_ended(stack: LiveStack, events: Sequence[StackEvent]) -> bool:
    """Whether the operation with these events has ended.

    Right after a request the stack may still be in the state that the operation before it left.
    """
    own = [event.status for event in events if event.of_stack]
    return not stack.is_busy and own[-1:] == [stack.status]


def _pause(view: InfraView, progress: StackProgress, watch: Watch) -> None:
    for _ in range(round(POLL_S / TICK_S)):
        view.tick(progress)
        watch.sleep(TICK_S)


def _too_long(stack: LiveStack, watch: Watch) -> InfraError:
    return InfraError(
        f"{watch.title}: the stack is still {stack.status} after {watch.limit_s:.0f} s; CloudFormation continues",
        remedy=f"{watch.again} continues to wait; --wait SECONDS allows more time",
    )


def _stopped(watch: Watch) -> InfraError:
    error = InfraError(
        f"{watch.title}: stopped waiting; CloudFormation continues by itself",
        remedy=f"{watch.again} continues to wait for it; maskfleet infra down removes the stack",
    )
    error.exit_code = 130  # that of Ctrl-C
    return error


def _newest_first(aws: Aws, stack_id: str) -> Iterator[StackEvent]:
    for page in aws.pages("cloudformation", "describe_stack_events", StackName=stack_id):
        yield from (_event(one, stack_id) for one in page["StackEvents"])


def _event(one: dict[str, Any], stack_id: str) -> StackEvent:
    return StackEvent(
        id=one["EventId"],
        at=one["Timestamp"],
        address=one.get("LogicalResourceId", ""),
        type=one.get("ResourceType", ""),
        status=one.get("ResourceStatus", ""),
        reason=one.get("ResourceStatusReason", ""),
        of_stack=one.get("PhysicalResourceId") in (stack_id, one["StackId"]),
    )


def _duration(events: Sequence[StackEvent], end: StackEvent) -> float | None:
    """Seconds from the first event of the same action on the resource to `end`, by CloudFormation's clock."""
    same = [event for event in events if event.address == end.address and event.action == end.action]
    return (end.at - same[0].at).total_seconds() if len(same) > 1 else None
