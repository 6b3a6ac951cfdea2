"""Common errors of Terraform and AWS, each with what to do about it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from maskfleet.errors import InfraError
from maskfleet.infra.terraform.progress import Diagnostic

SHOWN = 5
ANSI = re.compile(r"\x1b\[[0-9;]*m")
# Pattern and remedy; the first match wins. {Braces} are filled in from the diagnostic.
_KNOWN = (
    (
        r"Error acquiring the state lock",
        "another terraform is using this state; wait for it. If you are certain that none is: "
        "terraform -chdir={folder} force-unlock {lock}",
    ),
    (r"Saved plan is stale", "somebody changed the infrastructure after the plan; run the command again"),
    (
        r"ExpiredToken|token included in the request is expired|SSO (?:session|token).*(?:expired|invalid)"
        r"|refresh cached SSO token failed",
        "the AWS session has expired: sign in again (aws sso login, or new session credentials), then run it again",
    ),
    (
        r"No valid credential sources|InvalidClientTokenId|SignatureDoesNotMatch|failed to refresh cached credentials"
        r"|NoCredentialProviders|failed to get shared config profile|security token included in the request is invalid",
        "give AWS credentials in the environment (AWS_PROFILE, or aws configure); `aws sts get-caller-identity` must"
        " answer",
    ),
    (
        r"UnauthorizedOperation|AccessDenied|not authorized to perform",
        "the AWS identity lacks a permission{permission}; add it to the identity, or use another one",
    ),
    (
        r"VcpuLimitExceeded|LimitExceeded|QuotaExceeded|TooMany\w*(?:Exception|Exceeded)|MaxSpotInstanceCountExceeded"
        r"|maximum number of .{1,60} (?:has been )?reached",
        "an AWS quota of the account and region is used up: raise it under Service Quotas, or free what is unused",
    ),
    (
        r"EntityAlreadyExists|AlreadyExists|already exists|BucketAlreadyOwnedByYou|ResourceInUseException"
        r"|InvalidGroup\.Duplicate",
        "something with this name exists and is not in this state: choose another cluster_name, delete it, or"
        " import it: terraform -chdir={folder} import '{address}' ID",
    ),
    (
        r"DependencyViolation|has dependencies and cannot be deleted|has a dependent object",
        "something outside the state still uses it, such as a load balancer or a network interface:"
        " see `aws ec2 describe-network-interfaces --filters Name=vpc-id,Values=VPC`, then run it again",
    ),
    (
        r"InsufficientInstanceCapacity|UnsupportedAvailabilityZone|Insufficient capacity|unsupported Availability Zone",
        "AWS has no capacity or no such service in this availability zone: choose other azs",
    ),
    (
        r"Failed to query available provider packages|Failed to install provider|Could not (?:connect to|retrieve the"
        r" list)|registry service is unreachable|Required plugins are not installed",
        "the providers cannot be downloaded: allow access to the Terraform registry, or name a mirror in the file of"
        " TF_CLI_CONFIG_FILE (provider_installation)",
    ),
    (
        r"Inconsistent dependency lock file|checksums (?:previously recorded|.{0,40}do(?:es)? not match)",
        "the lock file does not know these providers: terraform -chdir={folder} init -upgrade",
    ),
    (
        r"Unsupported Terraform Core version",
        "this Terraform is too old (or too new) for the roots; install the version that the message asks for",
    ),
    (
        r"No value for required variable|Invalid value for (?:input )?variable|Value for undeclared variable"
        r"|unsuitable value type",
        "set it with --var NAME=VALUE or in a --var-file; docs/run-anywhere/eks/terraform.md and addons.md say what"
        " each means",
    ),
    (
        r"NoSuchBucket|S3 bucket .{1,80} does not exist",
        "maskfleet infra up with --create-state-bucket creates the state bucket; or omit --state-bucket",
    ),
    (
        r"Backend (?:initialization required|configuration changed)|approval for state migration",
        "the state is stored elsewhere: give the previous --state-bucket, or move the state: "
        "terraform -chdir={folder} init -migrate-state",
    ),
    (
        r"(?://(?:sts|ec2|iam|s3|eks|kms|fsx|elasticfilesystem)\.(?:[a-z0-9-]+\.)?amazonaws\.com.{0,200}"
        r"|operation error [\w ]+: \w+, .{0,400})(?:no such host|timeout|refused|unreachable)",
        "AWS cannot be reached: check network and region, and AWS_ENDPOINT_URL if it is set",
    ),
    (
        r"Kubernetes cluster unreachable|connect: connection refused|i/o timeout|TLS handshake timeout",
        "the cluster's API does not answer from here: run this inside the VPC (or its VPN), or allow your address with"
        """ --var 'public_access_cidrs=["ADDRESS/32"]'""",
    ),
    (r"no such host|network is unreachable|dial tcp", "AWS cannot be reached from here: check network and region"),
)
_LOCK_ID = re.compile(r"^\s*ID:\s+(\S+)", re.MULTILINE)
_PERMISSION = re.compile(r"not authorized to perform:? ([\w-]+:\w+)|operation error [\w ]+: (\w+)")


def error_of(diagnostics: Sequence[Diagnostic], *, what: str, folder: Path, log: Path) -> InfraError:
    """The error for a terraform command, `what`, that failed with `diagnostics`."""
    # Each error once; Terraform repeats `execution halted` for every operation that was interrupted.
    once = dict.fromkeys(diagnostics)
    shown = [diagnostic for diagnostic in once if diagnostic.summary != "execution halted"] or list(once)
    if not shown:
        return InfraError(f"{what} failed, and terraform gave no reason", remedy=f"read {log}")
    lines = [_one_line(diagnostic) for diagnostic in shown[:SHOWN]]
    if len(shown) > SHOWN:
        lines.append(f"and {len(shown) - SHOWN} more, in {log}")
    remedies = [remedy for diagnostic in shown if (remedy := remedy_for(diagnostic, folder=folder))]
    remedies.append(f"fix what terraform reports, then run the command again; the full output is in {log}")
    body = lines[0] if len(lines) == 1 else "".join(f"\n  {line}" for line in lines)
    return InfraError(f"{what} failed: {body}", remedy=remedies[0])


def remedy_for(diagnostic: Diagnostic, *, folder: Path) -> str | None:
    """What to do about a known error; None for an unknown one."""
    for pattern, remedy in _KNOWN:
        if re.search(pattern, diagnostic.text, re.IGNORECASE | re.DOTALL):
            lock = _LOCK_ID.search(diagnostic.text)
            permission = _PERMISSION.search(diagnostic.text)
            name = next((group for group in permission.groups() if group), "") if permission else ""
            return remedy.format(
                folder=folder,
                lock=lock.group(1) if lock else "LOCK_ID",
                permission=f" ({name})" if name else "",
                address=diagnostic.address or "ADDRESS",
            )
    return None


def diagnostics_in_text(text: str) -> list[Diagnostic]:
    """The errors in Terraform's human-readable output, such as that of `terraform init`."""
    found = []
    for part in re.split(r"^[│╷\s]*Error: ", ANSI.sub("", text), flags=re.MULTILINE)[1:]:
        lines = [re.sub(r"^[│╵]\s?", "", line).rstrip() for line in part.splitlines()]
        summary, *rest = lines or [""]
        found.append(Diagnostic("error", summary, "\n".join(line for line in rest if line).strip()))
    return found


def _one_line(diagnostic: Diagnostic) -> str:
    detail = " ".join(diagnostic.detail.split())
    if len(detail) > 400:
        detail = f"{detail[:400]} …"
    where = f"{diagnostic.address}: " if diagnostic.address else ""
    return f"{where}{diagnostic.summary}{f': {detail}' if detail else ''}"
