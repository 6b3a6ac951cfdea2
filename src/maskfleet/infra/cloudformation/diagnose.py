"""Common failures of stacks, each with what to do about it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from maskfleet.errors import InfraError
from maskfleet.infra.cloudformation.client import LiveStack
from maskfleet.infra.cloudformation.events import StackEvent, first_failure

# Pattern and remedy; the first match wins.
_KNOWN = (
    (
        r"InsufficientInstanceCapacity|insufficient capacity|do not have sufficient .{1,60} capacity",
        "AWS has no such instances free in this availability zone now: choose another zone or instance type, reserve"
        " capacity (capacity_reservation_id), or try again later",
    ),
    (
        r"VcpuLimitExceeded|LimitExceeded|QuotaExceeded|maximum number of|limit(?: of| for|s?) .{0,80}exceed",
        "a quota of the account in this region is used up: raise it under Service Quotas, or free what is unused",
    ),
    (
        r"SUCCESS signal|failed to receive|did not stabilize|timed? ?out",
        "a node did not report that it is ready: its log is in `aws ec2 get-console-output --latest --instance-id ID`,"
        " and on the node in /var/log/cloud-init-output.log",
    ),
    (
        r"ExpiredToken|token .{0,60}expired",
        "the AWS session expired meanwhile: sign in again (aws sso login), then run the command again",
    ),
    (
        r"AccessDenied|UnauthorizedOperation|not authorized to perform",
        "the AWS identity lacks the permission that the reason names; add it, or use another identity",
    ),
    (
        r"InvalidNetworkSettings|port 988",
        "FSx for Lustre cannot use the network: its security group must admit ports 988 and 1018-1023 between members",
    ),
    (
        r"mount target .{0,40}already exists|MountTargetConflict",
        "the file system has a mount target in this zone: set efs_security_group_id to the security group of that one",
    ),
    (
        r"already exists|AlreadyExists|Duplicate",
        "something with this name exists outside of the stack: delete it, or choose another name for the stack",
    ),
    (
        r"has dependencies and cannot be deleted|DependencyViolation|has a dependent object|currently in use",
        "something outside of the stack still uses it, such as a network interface; remove that, then run it again",
    ),
    (
        r"InvalidAMIID|image id .{1,80} does not exist|Unable to fetch parameters .{0,20}/aws/service",
        "the machine image does not exist in this region: remove ami_id and ami_parameter, or name one of this region",
    ),
    (
        r"Invalid(?:KeyPair|Subnet|Group|VpcID|VpcId)|does not exist",
        "name something that exists in this region and account",
    ),
)


def failed(stack: LiveStack, events: Sequence[StackEvent], *, doing: str, then: str) -> InfraError:
    """The error for an operation (`doing`) that ended badly: its first failure, not those that follow from it."""
    cause = first_failure(events)
    if cause is None:
        reason = stack.reason or "CloudFormation gave no reason"
        return InfraError(f"{doing} failed: the stack is {stack.status}: {reason}", remedy=then)
    others = sum(1 for event in events if event.kind == "apply_errored" and event is not cause)
    more = f"; {others} more failed because of it" if others else ""
    return InfraError(
        f"{doing} failed at {cause.address} ({cause.type}): {_one_line(cause.reason)}{more}; the stack is"
        f" {stack.status}",
        remedy=f"{remedy_for(cause.reason) or 'fix what the reason names'}; then {then}",
    )


def remedy_for(reason: str) -> str | None:
    """What to do about a known reason; None for an unknown one."""
    return next((remedy for pattern, remedy in _KNOWN if re.search(pattern, reason, re.IGNORECASE | re.DOTALL)), None)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return f"{line[:600]} …" if len(line) > 600 else line or "CloudFormation gave no reason"
