"""The order in which Terraform creates the AWS root: from its references, and from `terraform graph` itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hcl_schema import dependencies, read_root
from terraform_aws import ROOT, ready_copy

from tools import run_tool, tool

LUSTRE = "aws_fsx_lustre_file_system.this"
RULE_KINDS = ("aws_vpc_security_group_ingress_rule", "aws_vpc_security_group_egress_rule")
LUSTRE_RULES = {f"{kind}.fsx" for kind in RULE_KINDS}
SELF_RULES = {f"{kind}.nodes" for kind in RULE_KINDS}
CLUSTER = "aws_eks_cluster.this"


def all_needs(address: str, needs: Mapping[str, Iterable[str]]) -> set[str]:
    """What exists before `address` does."""
    found: set[str] = set()
    queue = [address]
    while queue:
        for one in needs.get(queue.pop(), ()):
            if one not in found:
                found.add(one)
                queue.append(one)
    return found


@pytest.fixture(scope="module")
def needs() -> dict[str, set[str]]:
    return dependencies(ROOT)


@pytest.fixture(scope="module")
def resources() -> dict[str, dict[str, Any]]:
    return {f"{type_}.{name}": body for kind, type_, name, body in read_root(ROOT).blocks if kind == "resource"}


def test_lustre_is_created_after_the_rules_of_its_security_group(needs: dict[str, set[str]]) -> None:
    # FSx answers 400 InvalidNetworkSettings otherwise (aws-parallelcluster issue 6181).
    assert all_needs(LUSTRE, needs) >= LUSTRE_RULES


@pytest.mark.parametrize("data", [LUSTRE, "aws_efs_file_system.this", "aws_fsx_data_repository_association.this"])
def test_data_does_not_depend_on_the_cluster_so_down_can_keep_it(data: str, needs: dict[str, set[str]]) -> None:
    assert CLUSTER in all_needs("aws_eks_node_group.system", needs)
    assert CLUSTER not in all_needs(data, needs)


def test_the_root_changes_egress_of_its_own_security_groups_only(resources: dict[str, dict[str, Any]]) -> None:
    # EKS adds an egress rule from its group to itself; a second one ends in InvalidPermission.Duplicate.
    groups = {
        body["security_group_id"]
        for address, body in resources.items()
        if address.startswith("aws_vpc_security_group_egress_rule.")
    }
    assert groups
    assert all(re.fullmatch(r"\$\{aws_security_group\.\w+(\[0\])?\.id\}", one) for one in groups), groups


def test_nodes_use_a_security_group_that_allows_efa_in_both_directions(
    needs: dict[str, set[str]], resources: dict[str, dict[str, Any]]
) -> None:
    for address in SELF_RULES:
        rule = resources[address]
        assert rule["ip_protocol"].strip('"') == "-1"
        assert rule["security_group_id"] == rule["referenced_security_group_id"] == "${aws_security_group.nodes.id}"
    assert "aws_security_group.nodes" in needs["aws_launch_template.system"]
    # Karpenter finds its nodes' groups by this tag. One has it: every group on an EFA interface needs the two rules.
    tagged = [
        address
        for address, body in resources.items()
        if address.split(".")[0] in ("aws_security_group", "aws_ec2_tag") and "karpenter.sh/discovery" in str(body)
    ]
    assert tagged == ["aws_security_group.nodes"]


def test_system_nodes_start_when_they_can_reach_the_api_and_each_other(needs: dict[str, set[str]]) -> None:
    reach = {f"{RULE_KINDS[0]}.control_plane", f"{RULE_KINDS[0]}.api", f"{RULE_KINDS[1]}.internet"}
    assert all_needs("aws_eks_node_group.system", needs) >= SELF_RULES | reach


@pytest.mark.slow
def test_terraforms_own_graph_creates_lustre_after_its_rules_and_without_the_cluster(tmp_path: Path) -> None:
    tool("terraform")
    folder, given = ready_copy(tmp_path)
    graph = run_tool("terraform", "graph", cwd=folder, **given)
    needs: dict[str, set[str]] = {}
    for one, other in re.findall(r'"([^"]+)" -> "([^"]+)"', graph):
        needs.setdefault(one, set()).add(other)
    before = all_needs(LUSTRE, needs)
    assert before >= LUSTRE_RULES
    assert CLUSTER not in before
