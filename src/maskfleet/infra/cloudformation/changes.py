"""Change sets: what CloudFormation would do to a stack, before it does it."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from maskfleet.errors import InfraError
from maskfleet.infra.cloudformation.client import Aws, LiveStack, aws_code, find_stack
from maskfleet.infra.cloudformation.diagnose import remedy_for

LIMIT_S = 300.0
POLL_S = 2.0
WORK = ("create", "change", "replace", "destroy", "import")
_ACTIONS = {"Add": "create", "Modify": "change", "Remove": "destroy", "Import": "import", "Dynamic": "change"}
_NO_CHANGES = ("didn't contain changes", "No updates are to be performed")
CAPABILITIES = ("CAPABILITY_IAM",)  # our templates give no IAM resource a name, and use no transform


@dataclass(frozen=True, slots=True)
class ResourceChange:
    """What a change set does to one resource."""

    action: str
    address: str
    type: str
    id: str = ""
    maybe: bool = False
    """Whether only the execution shows if the resource is replaced."""
    keeps_old: bool = False
    """Whether a deleted or replaced resource remains in the account, outside of the stack."""
    fields: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        return f"{self.action}?" if self.maybe else self.action


@dataclass(frozen=True, slots=True)
class ChangeSet:
    """A change set that can be executed, with its changes."""

    id: str
    stack_id: str
    changes: tuple[ResourceChange, ...]

    def lost_data(self, data: Collection[str]) -> list[ResourceChange]:
        """The changes that delete or replace something that holds data."""
        return [one for one in self.changes if one.action in ("destroy", "replace") and one.type in data]


@dataclass(frozen=True, slots=True)
class ChangeRequest:
    """What a stack should be."""

    name: str
    template: str
    parameters: Mapping[str, str]
    tags: Mapping[str, str]


def make_change_set(
    aws: Aws, request: ChangeRequest, stack: LiveStack | None, *, sleep: Callable[[float], None] = time.sleep
) -> ChangeSet | None:
    """A change set that makes `stack` what is requested, or creates it; None if nothing would change."""
    try:
        made = aws.call(
            "cloudformation",
            "create_change_set",
            StackName=request.name,
            ChangeSetName=f"maskfleet-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}",
            ChangeSetType="UPDATE" if stack is not None else "CREATE",
            TemplateBody=request.template,
            Parameters=[{"ParameterKey": key, "ParameterValue": text} for key, text in request.parameters.items()],
            Tags=[{"Key": key, "Value": text} for key, text in request.tags.items()],
            Capabilities=list(CAPABILITIES),
        )
    except InfraError as error:
        if aws_code(error) == "ValidationError":
            if _says_no_changes(str(error.__cause__)):
                return None
            raise _refused(request, str(error.__cause__)) from error
        raise
    found = _finished(aws, made["Id"], request, sleep)
    if found["Status"] == "FAILED":
        reason = str(found.get("StatusReason", ""))
        is_same = _says_no_changes(reason)
        details = [] if is_same else _details(aws, made["Id"])
        drop_change_set(aws, made["Id"], made["StackId"] if stack is None else None)
        if is_same:
            return None
        raise _refused(request, reason, details)
    changes = tuple(_change(one["ResourceChange"]) for one in found["Changes"] if one.get("Type") == "Resource")
    return ChangeSet(made["Id"], made["StackId"], changes)


def drop_change_set(aws: Aws, change_set_id: str, new_stack: str | None = None) -> None:
    """Delete a change set that is not executed, and the empty stack (an id) that CloudFormation made for it.

    One that is gone, or cannot be deleted, does no harm: it holds nothing, and the next `up` or `down` takes it over.
    """
    with suppress(InfraError):
        aws.call("cloudformation", "delete_change_set", ChangeSetName=change_set_id)
        stack = find_stack(aws, new_stack) if new_stack is not None else None
        if stack is not None and stack.status == "REVIEW_IN_PROGRESS":
            aws.call("cloudformation", "delete_stack", StackName=stack.id)


def counts(changes: Iterable[ResourceChange]) -> str:
    """Such as `12 to create, 1 to replace`."""
    found = Counter(change.action for change in changes)
    parts = [f"{found[action]} to {action}" for action in WORK if found[action]]
    return ", ".join(parts) if parts else "no change"


def table(changes: Iterable[ResourceChange], data: Collection[str]) -> list[str]:
    """The changes as lines: removals and replacements first, since they need a look."""
    order = {action: place for place, action in enumerate(("destroy", "replace", "change", "create", "import"))}
    rows = sorted(changes, key=lambda one: (order[one.action], one.type, one.address))
    cells = [(one.words, one.address, one.type, _note(one, data)) for one in rows]
    head = ("action", "resource", "type", "note")
    widths = [max(len(row[column]) for row in (head, *cells)) for column in range(3)]
    return [
        "  ".join((*(text.ljust(width) for text, width in zip(row[:3], widths, strict=True)), row[3])).rstrip()
        for row in (head, *cells)
    ]


def _note(change: ResourceChange, data: Collection[str]) -> str:
    parts = [", ".join(change.fields)] if change.fields and change.action != "create" else []
    if change.action in ("destroy", "replace"):
        parts.insert(0, change.id)
        if change.type in data:
            kept = "the old one remains, but the cluster no longer uses it"
            parts.append(f"HOLDS DATA: {kept if change.keeps_old else 'ALL DATA IN IT IS DELETED'}")
    return "; ".join(part for part in parts if part)


def _says_no_changes(reason: str) -> bool:
    return any(text in reason for text in _NO_CHANGES)


def _finished(aws: Aws, change_set_id: str, request: ChangeRequest, sleep: Callable[[float], None]) -> dict[str, Any]:
    began = time.monotonic()
    while True:
        pages = list(aws.pages("cloudformation", "describe_change_set", ChangeSetName=change_set_id))
        if pages[0]["Status"] in ("CREATE_COMPLETE", "FAILED"):
            return {**pages[0], "Changes": [one for page in pages for one in page.get("Changes", ())]}
        if time.monotonic() - began > LIMIT_S:
            raise InfraError(
                f"CloudFormation has not compared stack {request.name} with its template within {LIMIT_S:.0f} s",
                remedy="run the command again",
            )
        sleep(POLL_S)


def _change(one: Mapping[str, Any]) -> ResourceChange:
    action = _ACTIONS[one["Action"]]
    replacement = one.get("Replacement", "False")
    if action == "change" and replacement in ("True", "Conditional"):
        action = "replace"
    targets = [detail.get("Target", {}) for detail in one.get("Details", ())]
    names = [str(target.get("Name") or target.get("Attribute") or "") for target in targets]
    return ResourceChange(
        action=action,
        address=one["LogicalResourceId"],
        type=one["ResourceType"],
        id=one.get("PhysicalResourceId", ""),
        maybe=replacement == "Conditional" or one["Action"] == "Dynamic",
        keeps_old=one.get("PolicyAction") in ("Retain", "ReplaceAndRetain"),
        fields=tuple(dict.fromkeys(name for name in names if name)),
    )


def _details(aws: Aws, change_set_id: str) -> list[str]:
    """What CloudFormation has against each resource; a change set's own reason may name only the check that failed."""
    failed = {"FailedEvents": True}
    try:
        pages = list(aws.pages("cloudformation", "describe_events", ChangeSetName=change_set_id, Filters=failed))
    except InfraError as error:
        return [f"the details are missing: {error.what}; {error.remedy}"]
    texts = [_failure(one) for page in pages for one in page["OperationEvents"]]
    return [text for text in dict.fromkeys(texts) if text]


def _failure(event: Mapping[str, Any]) -> str:
    """What an event says against a resource; an empty text for a warning and for an event without a reason."""
    reasons = ("ValidationStatusReason", "HookStatusReason", "ResourceStatusReason")
    reason = " ".join(next((event[key] for key in reasons if event.get(key)), "").split())
    if not reason or "WARN" in (event.get("ValidationFailureMode"), event.get("HookFailureMode")):
        return ""
    name, path = event.get("LogicalResourceId"), event.get("ValidationPath")
    resource = f"{name} ({event.get('ResourceType', '')}): " if name else ""
    return f"{resource}{reason}{f' (at {path})' if path else ''}"


def _refused(request: ChangeRequest, reason: str, details: Sequence[str] = ()) -> InfraError:
    text = "".join((" ".join(reason.split()), *(f"\n  {one}" for one in details)))
    known = remedy_for(" ".join(details)) if details else None
    return InfraError(
        f"CloudFormation does not accept the settings of stack {request.name}: {text}",
        remedy=known or "fix the setting that it names; docs/run-anywhere/ec2.md lists the parameters of the template",
    )
