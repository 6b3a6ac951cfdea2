"""`maskfleet infra plan`: what would be created, changed and destroyed, and which of it is billed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from maskfleet.errors import InfraError
from maskfleet.infra.terraform.progress import WORK, Event, TerraformProgress
from maskfleet.infra.terraform.root import Root
from maskfleet.infra.terraform.session import Session
from maskfleet.infra.terraform.state import State, is_named
from maskfleet.infra.terraform.variables import outputs_declared, required

# Resource types that AWS bills for as long as they exist. Prices differ by region and are not estimated here.
BILLED = {
    "aws_eks_cluster": "EKS control plane",
    "aws_eks_node_group": "EC2 nodes",
    "aws_nat_gateway": "NAT gateway",
    "aws_fsx_lustre_file_system": "FSx for Lustre",
    "aws_efs_file_system": "EFS",
    "aws_instance": "EC2 instance",
    "aws_lb": "load balancer",
    "aws_kms_key": "KMS key",
    "aws_vpc_endpoint": "VPC endpoint",
    "aws_eip": "public IPv4 address",
    "aws_cloudwatch_log_group": "CloudWatch logs",
}


def plan(session: Session) -> tuple[TerraformProgress, TerraformProgress | None]:
    """Plan both roots and show the plans; None for the second if it cannot be planned before the first exists."""
    session.write_settings()
    base = plan_root(session, session.base)
    if not _has_inputs(session, base):
        session.view.say(f"{session.addons.name}: planned once {session.base.name} exists, whose outputs it needs")
        return base, None
    pass_outputs(session)
    return base, plan_root(session, session.addons)


def plan_root(session: Session, root: Root) -> TerraformProgress:
    """Initialise and plan one root, and show the plan."""
    root.init()
    progress = root.plan()
    _show(session, root, progress)
    return progress


def pass_outputs(session: Session) -> None:
    """Give the second root the outputs of the first."""
    state = session.base.state()
    missing = _missing_inputs(session, state)
    if missing:
        raise InfraError(
            f"{session.base.name} has no output {', '.join(missing)}, which {session.addons.name} needs",
            remedy="maskfleet infra status shows what exists; maskfleet infra up creates the rest",
        )
    session.write_outputs(state)


def destroyed(progress: TerraformProgress) -> list[Event]:
    """Planned changes that delete something."""
    return [change for change in progress.work if change.action in ("destroy", "replace")]


def lost_data(session: Session, progress: TerraformProgress) -> list[Event]:
    """Planned changes that delete data; a resource whose creation failed (tainted) never held any."""
    return [
        change for change in destroyed(progress) if is_named(change, session.stack.data) and change.reason != "tainted"
    ]


def counts(changes: Iterable[Event]) -> str:
    """Such as `84 to create, 1 to destroy`."""
    found = Counter(change.action for change in changes)
    parts = [f"{found[action]} to {action}" for action in WORK if found[action]]
    return ", ".join(parts) if parts else "no change"


def billed(values: Sequence[Mapping[str, Any]]) -> list[str]:
    """What costs money among the changes of a plan (`terraform show -json`), counted, with sizes."""
    lines: Counter[tuple[str, str]] = Counter()
    for change in values:
        kind = BILLED.get(str(change.get("type")))
        actions = set(change.get("change", {}).get("actions", []))
        sign = "+" if "create" in actions else "-" if "delete" in actions else "~" if "update" in actions else ""
        attributes = change.get("change", {}).get("before" if sign == "-" else "after") or {}
        # Gateway endpoints are free; interface endpoints are billed by the hour.
        if kind and sign and attributes.get("vpc_endpoint_type") != "Gateway":
            lines[(sign, f"{kind}{_size(str(change['type']), attributes)}")] += 1
    return [f"{sign} {number} × {text}" for (sign, text), number in lines.items()]


def _has_inputs(session: Session, base: TerraformProgress) -> bool:
    """Whether the cluster exists, stays as it is in the plan `base`, and has the outputs that the second root needs."""
    state = session.base.state()
    cluster = {resource.address for resource in state.resources if session.is_cluster(resource)}
    touched = {change.address for change in destroyed(base)}
    return bool(cluster) and not cluster & touched and not _missing_inputs(session, state)


def _missing_inputs(session: Session, state: State) -> list[str]:
    """Variables that the second root requires, and that are outputs of the first which do not exist yet."""
    needed = required(session.addons.folder) & outputs_declared(session.base.folder)
    return sorted(needed - set(session.settings) - set(state.outputs))


def _show(session: Session, root: Root, progress: TerraformProgress) -> None:
    """Show a plan in a few lines: counts, drift, what is destroyed, what costs money."""
    say = session.view.say
    only_outputs = progress.changed_outputs and not progress.work
    outputs = f", outputs: {', '.join(progress.changed_outputs)}" if only_outputs else ""
    say(f"{root.name}: {counts(progress.work)}{outputs}")
    for change in progress.drift:
        say(f"  changed outside of terraform: {change.address} ({change.action})")
    lost = lost_data(session, progress)
    for change in destroyed(progress):
        data = ", WITH ALL DATA IN IT" if change in lost else ""
        say(f"  {change.action}: {change.address}{f' ({change.reason})' if change.reason else ''}{data}")
    if progress.work and (lines := billed(root.planned_values())):
        say("  billed while it exists:")
        for line in lines:
            say(f"    {line}")
    for warning in progress.warnings:
        say(f"  warning: {warning.summary}")


def _size(type_: str, attributes: Mapping[str, Any]) -> str:
    match type_:
        case "aws_eks_node_group":
            scaling = (attributes.get("scaling_config") or [{}])[0]
            types = attributes.get("instance_types") or []
            shown = ", ".join(map(str, types[:3])) + (", …" if len(types) > 3 else "")
            nodes = f"{scaling.get('desired_size', '?')} now, at most {scaling.get('max_size', '?')}"
            return f" ({nodes}; {attributes.get('capacity_type') or 'ON_DEMAND'}{f'; {shown}' if shown else ''})"
        case "aws_fsx_lustre_file_system":
            return f" ({attributes.get('storage_capacity', '?')} GiB, {attributes.get('deployment_type', '?')})"
        case "aws_efs_file_system":
            return f" ({attributes.get('throughput_mode') or 'bursting'} throughput)"
        case _:
            return ""
