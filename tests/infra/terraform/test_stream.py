"""Terraform's machine-readable lines: progress, errors with remedies, billed resources."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from maskfleet.cli.infra_view import clock, headline, live_table
from maskfleet.infra.terraform.diagnose import diagnostics_in_text, error_of, remedy_for
from maskfleet.infra.terraform.plan import billed, counts
from maskfleet.infra.terraform.progress import Diagnostic, TerraformProgress, parse_event

HERE = Path("/infra/aws")


def line(kind: str, **more: Any) -> str:
    """A line as Terraform 1.11 writes it."""
    return json.dumps({"@level": "info", "@message": kind, "@module": "terraform.ui", "type": kind, **more})


def about(address: str, action: str, **more: Any) -> dict[str, Any]:
    type_ = address.split(".")[-2]
    resource = {"addr": address, "module": "", "resource": address, "resource_type": type_, "resource_key": None}
    return {"resource": resource, "action": action, **more}


def progress_of(*lines: tuple[float, str]) -> TerraformProgress:
    progress = TerraformProgress()
    for now, text in lines:
        progress.add(parse_event(text), now)
    return progress


def test_an_apply_is_followed_resource_by_resource() -> None:
    cluster, nat = "module.a.aws_eks_cluster.this", "aws_nat_gateway.this"
    progress = progress_of(
        (0, line("planned_change", change=about(cluster, "create"))),
        (0, line("planned_change", change=about(nat, "replace", reason="cannot_update"))),
        (0, line("planned_change", change=about("data.aws_ami.x", "read"))),
        (1, line("apply_start", hook=about(nat, "delete"))),
        (3, line("apply_complete", hook=about(nat, "delete", elapsed_seconds=2))),
        (3, line("apply_start", hook=about(cluster, "create"))),
        (13, line("apply_progress", hook=about(cluster, "create", elapsed_seconds=10))),
    )
    assert progress.steps == 3
    assert progress.completed == 1
    assert [row.address for row in progress.in_state("running")] == [cluster]
    assert progress.rows[cluster].seconds(20) == 17
    assert (progress.rows[nat].action, progress.rows[nat].state, progress.rows[nat].elapsed_s) == ("destroy", "done", 2)
    assert progress.changes[1].reason == "cannot_update"
    assert headline(progress, 75) == "1/3 done, 1 running, 1m15s"
    assert counts(progress.work) == "1 to create, 1 to replace"


def test_drift_summary_and_failures_are_recorded() -> None:
    progress = progress_of(
        (0, line("resource_drift", change=about("aws_eks_node_group.system", "update"))),
        (0, line("apply_start", hook=about("aws_vpc.this", "create"))),
        (4, line("apply_errored", hook=about("aws_vpc.this", "create", elapsed_seconds=4))),
        (5, line("change_summary", changes={"add": 3, "change": 1, "remove": 2, "operation": "apply"})),
        (5, line("diagnostic", diagnostic={"severity": "error", "summary": "no", "address": "aws_vpc.this"})),
        (5, line("diagnostic", diagnostic={"severity": "warning", "summary": "Resource targeting is in effect"})),
    )
    assert [change.action for change in progress.drift] == ["change"]
    assert [row.address for row in progress.in_state("failed")] == ["aws_vpc.this"]
    assert progress.summary == {"add": 3, "change": 1, "remove": 2, "operation": "apply"}
    assert [error.address for error in progress.errors] == ["aws_vpc.this"]
    assert progress.warnings == []


@pytest.mark.parametrize(
    "text", ["", "not json", "[1]", '"text"', "{}", '{"type": 3}', '{"type":"planned_change","change":"x"}', '{"type"']
)
def test_a_malformed_line_is_no_error(text: str) -> None:
    progress_of((0, text))
    assert parse_event(text).kind in ("text", "planned_change")


def test_the_table_shows_failed_and_running_first_and_fits_the_screen() -> None:
    lines = [line("planned_change", change=about(f"aws_subnet.s{number}", "create")) for number in range(50)]
    lines.append(line("apply_start", hook=about("aws_subnet.s40", "create")))
    lines.append(line("apply_start", hook=about("aws_subnet.s41", "create")))
    lines.append(line("apply_errored", hook=about("aws_subnet.s41", "create", elapsed_seconds=9)))
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(live_table("aws: apply", progress_of(*((0.0, text) for text in lines)), 65.0, 65.0, 12))
    shown = console.export_text().splitlines()
    assert len(shown) <= 12
    assert shown[0].startswith("aws: apply: 0/50 done, 1 running, 1 failed, 1m05s")
    assert shown[2].split() == ["aws_subnet.s41", "create", "failed", "9s"]
    assert shown[3].split() == ["aws_subnet.s40", "create", "running", "1m05s"]
    assert shown[-1] == "and 42 more"


def test_durations_are_shown_in_minutes_and_seconds() -> None:
    assert [clock(seconds) for seconds in (0, 59.4, 60, 725)] == ["0s", "59s", "1m00s", "12m05s"]


# As Terraform 1.11 and the AWS provider 5.100 word them: those with a * were seen in runs, the others are AWS's
# documented error codes in the provider's frame.
COMMON_ERRORS = [
    (  # *
        "No valid credential sources found",
        "failed to refresh cached credentials, no EC2 IMDS role found, operation error ec2imds: GetMetadata",
        "aws sts get-caller-identity",
    ),
    (
        "Retrieving AWS account details: validating provider credentials",
        "operation error STS: GetCallerIdentity, api error ExpiredToken: The security token"
        " included in the request is expired",
        "sign in again",
    ),
    (
        "creating EC2 VPC",
        "operation error EC2: CreateVpc, api error UnauthorizedOperation: You are not authorized"
        " to perform this operation.",
        "lacks a permission (CreateVpc)",
    ),
    (
        "creating EKS Cluster (fleet)",
        "api error AccessDeniedException: User: a is not authorized to perform: eks:CreateCluster on resource: x",
        "lacks a permission (eks:CreateCluster)",
    ),
    (
        "creating EC2 VPC",
        "operation error EC2: CreateVpc, api error VpcLimitExceeded: The maximum number of VPCs has been reached.",
        "Service Quotas",
    ),
    ("creating EC2 EIP", "api error AddressLimitExceeded: The maximum number of addresses has been reached.", "Quotas"),
    ("creating FSx", "api error ServiceLimitExceeded: You have exceeded your quota", "Service Quotas"),
    (
        "creating IAM Role (fleet-node)",
        "api error EntityAlreadyExists: Role with name fleet-node already exists.",
        "import 'aws_x.y' ID",
    ),
    ("creating EKS Cluster", "ResourceInUseException: Cluster already exists with name: fleet", "another cluster_name"),
    (
        "deleting EC2 VPC (vpc-1)",
        "api error DependencyViolation: The vpc 'vpc-1' has dependencies and cannot be deleted.",
        "network interface",
    ),
    (  # *
        "Error acquiring the state lock",
        "Error message: resource temporarily unavailable\nLock Info:\n  ID:        8f6a9944-af3b\n  Path:      x\n",
        "terraform -chdir=/infra/aws force-unlock 8f6a9944-af3b",
    ),
    (  # *
        "Failed to query available provider packages",
        "Could not retrieve the list of available versions for provider hashicorp/aws",
        "provider_installation",
    ),
    (
        "Unsupported Terraform Core version",
        "This configuration does not support Terraform version 1.4.0.",
        "too old",
    ),  # *
    ("No value for required variable", 'The root module input variable "region" is not set', "--var NAME=VALUE"),
    ("Saved plan is stale", "The given plan file can no longer be applied", "run the command again"),  # *
    ("x", 'Post "https://sts.us-west-2.amazonaws.com/": dial tcp 1.2.3.4:443: i/o timeout', "check network and region"),
    (  # *
        "validating provider credentials",
        "retrieving caller identity from STS: operation error STS: GetCallerIdentity, exceeded maximum number of"
        ' attempts, 5, send failed, Post "http://127.0.0.1:1/": dial tcp 127.0.0.1:1: connect: connection refused',
        "AWS cannot be reached",
    ),
    ("x", 'Get "https://AB.gr7.us-west-2.eks.amazonaws.com/api": dial tcp: i/o timeout', "public_access_cidrs"),
    ("Kubernetes cluster unreachable", "Get https://x/version: dial tcp 10.0.0.1:443: i/o timeout", "VPN"),
    ("x", "dial tcp: lookup sts.us-west-2.amazonaws.com: no such host", "check network and region"),  # *
    ("Failed to get existing workspaces", 'S3 bucket "b" does not exist.', "creates the state bucket"),
]


@pytest.mark.parametrize(("summary", "detail", "remedy"), COMMON_ERRORS, ids=[one[1][:30] for one in COMMON_ERRORS])
def test_a_common_error_has_a_remedy(summary: str, detail: str, remedy: str) -> None:
    error = error_of([Diagnostic("error", summary, detail, "aws_x.y")], what="up", folder=HERE, log=Path("/log"))
    assert remedy in error.remedy
    assert error.what.startswith(f"up failed: aws_x.y: {summary}")


def test_an_unknown_error_points_to_the_log() -> None:
    found = Diagnostic("error", "something new", "", "")
    assert remedy_for(found, folder=HERE) is None
    assert "/log" in error_of([found], what="up", folder=HERE, log=Path("/log")).remedy
    assert "gave no reason" in error_of([], what="up", folder=HERE, log=Path("/log")).what


def test_repeated_errors_are_listed_once_and_long_lists_are_cut() -> None:
    found = [Diagnostic("error", f"error {number % 7}", "", f"aws_x.y{number % 7}") for number in range(20)]
    found.append(Diagnostic("error", "execution halted"))
    text = error_of(found, what="up", folder=HERE, log=Path("/log")).what
    assert text.count("aws_x.y") == 5
    assert "and 2 more, in /log" in text
    assert "halted" not in text


def test_errors_in_the_text_output_of_init_are_parsed() -> None:
    text = """Initializing provider plugins...
╷
│ Error: Failed to query available provider packages
│
│ Could not retrieve the list of available versions for provider
│ hashicorp/aws: could not connect to registry.terraform.io
╵
"""
    [found] = diagnostics_in_text(text)
    assert found.summary == "Failed to query available provider packages"
    assert "could not connect" in found.detail
    assert "mirror" in (remedy_for(found, folder=HERE) or "")


def test_billed_resources_are_counted_with_their_size() -> None:
    def change(type_: str, actions: list[str], **values: Any) -> dict[str, Any]:
        side = "before" if actions == ["delete"] else "after"
        return {"type": type_, "change": {"actions": actions, side: values}}

    group = {"scaling_config": [{"desired_size": 2, "max_size": 8}], "instance_types": ["m5.large"]}
    lines = billed(
        [
            change("aws_nat_gateway", ["create"]),
            change("aws_nat_gateway", ["create"]),
            change("aws_eks_node_group", ["create"], capacity_type="ON_DEMAND", **group),
            change("aws_fsx_lustre_file_system", ["delete"], storage_capacity=1200, deployment_type="SCRATCH_2"),
            change("aws_vpc_endpoint", ["create"], vpc_endpoint_type="Gateway"),
            change("aws_eks_cluster", ["no-op"]),
            change("aws_subnet", ["create"]),
        ]
    )
    assert lines == [
        "+ 2 × NAT gateway",
        "+ 1 × EC2 nodes (2 now, at most 8; ON_DEMAND; m5.large)",
        "- 1 × FSx for Lustre (1200 GiB, SCRATCH_2)",
    ]
