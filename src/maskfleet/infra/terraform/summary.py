"""A plan in a few lines: how much it creates, changes and destroys, and what of it costs money."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from maskfleet.infra.terraform.progress import Change, Progress

# What AWS bills for as long as it exists, by resource type. Prices differ by region and are not guessed here.
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
ORDER = ("create", "change", "replace", "destroy", "import", "forget")


def counts(changes: Iterable[Change]) -> str:
    """Such as `84 to create, 1 to destroy`."""
    found = Counter(change.action for change in changes)
    parts = [f"{found[action]} to {action}" for action in ORDER if found[action]]
    return ", ".join(parts) if parts else "no change"


def billed(values: Sequence[Mapping[str, Any]]) -> list[str]:
    """The things that cost money among a plan's changes (`terraform show -json`), counted, with their sizes."""
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


def destroyed(progress: Progress) -> list[Change]:
    """Planned changes that delete something."""
    return [change for change in progress.work if change.action in ("destroy", "replace")]


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
