"""Who may do what: the IAM documents of the AWS root, as Terraform itself writes them; no provider is needed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from iam_documents import Statement, allowed, conditions, listed, statements
from terraform_aws import ROOT

from tools import run_tool, tool

ACCOUNT = "111122223333"
ISSUER = "oidc.eks.us-west-2.amazonaws.com/id/0123456789ABCDEF"
CLUSTER = f"arn:aws:eks:us-west-2:{ACCOUNT}:cluster/fleet"
INPUTS: dict[str, Any] = {
    "cluster_name": "fleet",
    "region": "us-west-2",
    "account_id": ACCOUNT,
    "partition": "aws",
    "vpc_id": "vpc-11112222",
    "oidc_arn": f"arn:aws:iam::{ACCOUNT}:oidc-provider/{ISSUER}",
    "oidc_issuer": ISSUER,
    "kubeflow_namespace": "kubeflow",
    "karpenter_namespace": "kube-system",
    "trainer_service_accounts": ["maskfleet-trainer"],
    "staging_service_accounts": ["maskfleet-staging"],
    "gpu_node_role_arn": f"arn:aws:iam::{ACCOUNT}:role/fleet-gpu-node",
    "queue_arn": f"arn:aws:sqs:us-west-2:{ACCOUNT}:fleet-karpenter",
    "interruption_rule_arns": [f"arn:aws:events:us-west-2:{ACCOUNT}:rule/fleet-karpenter-spot"],
    "log_group_names": ["/aws/eks/fleet/cluster"],
    "flow_log_group": "/aws/vpc/fleet/flow",
    "efs_arn": f"arn:aws:elasticfilesystem:us-west-2:{ACCOUNT}:file-system/fs-1",
    "fsx_arn": f"arn:aws:fsx:us-west-2:{ACCOUNT}:file-system/fs-2",
    "data_bucket": "my-bucket",
    "data_prefix": "ml-platform",
    "results_place": "ml-platform/logs",
    "data_key_arn": f"arn:aws:kms:us-west-2:{ACCOUNT}:key/data",
}
# Actions that may have the resource *, by what begins their names, and why.
WITHOUT_RESOURCE = {
    "ec2:Describe": "EC2's describing calls name no resource",
    "ec2:GetInstanceTypesFromInstanceRequirements": "names no resource",
    "ec2:GetSecurityGroupsForVpc": "reads names of groups; held to the region",
    "autoscaling:Describe": "Auto Scaling's describing calls name no resource",
    "elasticloadbalancing:Describe": "load balancing's describing calls name no resource",
    "pricing:GetProducts": "the price list is not ours",
    "iam:ListInstanceProfiles": "lists name no resource",
}
# Documents on a resource say * for that resource.
OWN_RESOURCE = {"cluster_key": "a key's policy knows no other resource than its key"}
# Statements with a wildcard inside of the ARN and without condition, and why that is narrow enough.
OPEN_ARNS = {
    "StartFromWhatIsThere": "images and snapshots are AWS's; groups and subnets have no tag at the time of the call",
    "SeeImages": "parameters that AWS publishes",
    "SeeProfiles": "reading a profile",
    "FindFlowGroup": "names of log groups",
    "SeeNodeGroups": "node groups of this cluster alone",
    "ReadData": "objects below import_path",
    "WriteResults": "objects below the results folder",
    "WriteFlows": "streams of one log group",
}


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return evaluated(tmp_path_factory.mktemp("policies"), INPUTS)


def evaluated(folder: Path, inputs: dict[str, Any]) -> dict[str, str]:
    """Every document of the module by name, such as `permissions/trainer/data` or `workload_trust/karpenter`."""
    tool("terraform")
    copy = folder / "policies"
    shutil.copytree(ROOT / "policies", copy)
    (copy / "terraform.tfvars.json").write_text(json.dumps(inputs), encoding="utf-8")
    run_tool("terraform", "init", "-no-color", cwd=copy, CHECKPOINT_DISABLE="1")
    run_tool("terraform", "apply", "-auto-approve", "-no-color", cwd=copy, CHECKPOINT_DISABLE="1")
    found: dict[str, str] = {}
    outputs = json.loads(run_tool("terraform", "output", "-json", cwd=copy, CHECKPOINT_DISABLE="1"))
    for name, output in outputs.items():
        if isinstance(output["value"], str):
            found[name] = output["value"]
        else:
            found.update({f"{name}/{key}": value for key, value in output["value"].items()})
    return found


def granted(documents: dict[str, str]) -> list[tuple[str, Statement]]:
    return [(name, one) for name, text in documents.items() for one in statements(text) if one["Effect"] == "Allow"]


def test_no_document_allows_all_actions_of_a_service(documents: dict[str, str]) -> None:
    wild = [(name, one["Sid"]) for name, one in granted(documents) if any("*" in act for act in listed(one["Action"]))]
    # The account must stay able to administer its key, or nobody can.
    assert wild == [("cluster_key", "AccountAdministersByIam")]


def test_cloudwatch_may_use_the_key_of_the_cluster_in_every_way_that_it_documents(documents: dict[str, str]) -> None:
    [logs] = [one for name, one in granted(documents) if one.get("Sid") == "LogsOfThisCluster"]
    for action in ("Encrypt", "Decrypt", "ReEncryptFrom", "GenerateDataKey", "GenerateDataKeyWithoutPlaintext"):
        assert f"kms:{action}" in logs["Action"]


def test_a_statement_for_all_resources_has_only_actions_without_resource_level_permissions(
    documents: dict[str, str],
) -> None:
    for name, one in granted(documents):
        if "*" not in listed(one.get("Resource", [])) or name in OWN_RESOURCE:
            continue
        for action in listed(one["Action"]):
            assert any(action.startswith(prefix) for prefix in WITHOUT_RESOURCE), (name, one["Sid"], action)


def test_a_wildcard_in_an_arn_is_limited_by_a_condition(documents: dict[str, str]) -> None:
    open_ones = {
        one["Sid"]
        for name, one in granted(documents)
        if name not in OWN_RESOURCE
        and any("*" in arn and arn != "*" for arn in listed(one.get("Resource", [])))
        and not one.get("Condition")
    }
    assert open_ones == set(OPEN_ARNS)


def test_every_reason_is_still_needed(documents: dict[str, str]) -> None:
    used = {
        action
        for name, one in granted(documents)
        if "*" in listed(one.get("Resource", [])) and name not in OWN_RESOURCE
        for action in listed(one["Action"])
    }
    assert {prefix for prefix in WITHOUT_RESOURCE if not any(one.startswith(prefix) for one in used)} == set()


def test_every_role_of_a_pod_is_for_named_service_accounts(documents: dict[str, str]) -> None:
    trusts = {name.split("/")[1]: text for name, text in documents.items() if name.startswith("workload_trust/")}
    assert len(trusts) == 9
    for role, text in trusts.items():
        for one in statements(text):
            found = {key: values for test, key, values in conditions(one) if test == "StringEquals"}
            if one["Action"] == ["sts:AssumeRoleWithWebIdentity"]:
                assert found[f"{ISSUER}:aud"] == ["sts.amazonaws.com"], role
                subjects = found[f"{ISSUER}:sub"]
                assert subjects, role
                assert all(re.fullmatch(r"system:serviceaccount:[a-z-]+:[a-z-]+", one) for one in subjects), role
            else:
                assert found["aws:RequestTag/eks-cluster-arn"] == [CLUSTER], role
                assert found["aws:RequestTag/kubernetes-namespace"] == ["kubeflow"], role
                assert found["aws:RequestTag/kubernetes-service-account"] == [f"maskfleet-{role}"], role


def test_every_service_role_is_limited_to_this_account_where_the_service_supports_it(documents: dict[str, str]) -> None:
    trusts = {name.split("/")[1]: text for name, text in documents.items() if name.startswith("service_trust/")}
    without = {role for role, text in trusts.items() if not any(one.get("Condition") for one in statements(text))}
    # EC2 sends no condition keys when it takes a role for an instance.
    assert without == {"system_node", "gpu_node"}
    assert set(trusts) == without | {"control_plane", "flow_logs"}


def token(account: str) -> dict[str, str]:
    return {f"{ISSUER}:aud": "sts.amazonaws.com", f"{ISSUER}:sub": f"system:serviceaccount:{account}"}


def test_another_service_account_does_not_get_a_role(documents: dict[str, str]) -> None:
    trust = documents["workload_trust/trainer"]
    take = "sts:AssumeRoleWithWebIdentity"
    assert allowed(trust, take, "*", token("kubeflow:maskfleet-trainer"))
    for other in ("kubeflow:default", "default:maskfleet-trainer", "kubeflow:maskfleet-staging", "kubeflow:*"):
        assert not allowed(trust, take, "*", token(other)), other


def test_a_pod_of_another_cluster_does_not_get_the_trainers_role(documents: dict[str, str]) -> None:
    tags = {
        "aws:RequestTag/eks-cluster-arn": CLUSTER,
        "aws:RequestTag/kubernetes-namespace": "kubeflow",
        "aws:RequestTag/kubernetes-service-account": "maskfleet-trainer",
    }
    trust = documents["workload_trust/trainer"]
    assert allowed(trust, "sts:AssumeRole", "*", tags)
    for key in tags:
        assert not allowed(trust, "sts:AssumeRole", "*", {**tags, key: f"{tags[key]}-other"}), key


def may(documents: dict[str, str], policy: str, action: str, resource: str, **context: str) -> bool:
    return allowed(documents[f"permissions/{policy}"], action, resource, context)


def test_the_trainer_reads_its_data_writes_its_results_and_deletes_nothing(documents: dict[str, str]) -> None:
    bucket = "arn:aws:s3:::my-bucket"
    assert may(documents, "trainer/data", "s3:GetObject", f"{bucket}/ml-platform/data/coco2017/a.jpg")
    assert may(documents, "trainer/data", "s3:PutObject", f"{bucket}/ml-platform/logs/run/model.safetensors")
    assert not may(documents, "trainer/data", "s3:GetObject", f"{bucket}/payroll/a.csv")
    assert not may(documents, "trainer/data", "s3:GetObject", f"{bucket}/ml-platform-2/a.csv")
    assert not may(documents, "trainer/data", "s3:GetObject", "arn:aws:s3:::other/ml-platform/a")
    assert not may(documents, "trainer/data", "s3:PutObject", f"{bucket}/ml-platform/data/coco2017/a.jpg")
    assert not may(documents, "trainer/data", "s3:DeleteObject", f"{bucket}/ml-platform/logs/run/x")
    listing = {"s3:prefix": "ml-platform/data/"}
    assert allowed(documents["permissions/trainer/data"], "s3:ListBucket", bucket, listing)
    assert not allowed(documents["permissions/trainer/data"], "s3:ListBucket", bucket, {"s3:prefix": "payroll/"})


def test_staging_only_reads(documents: dict[str, str]) -> None:
    actions = {act for one in statements(documents["permissions/staging/data"]) for act in listed(one["Action"])}
    assert actions == {"s3:ListBucket", "s3:GetBucketLocation", "s3:GetObject", "kms:Decrypt"}


def test_no_document_can_delete_from_s3_efs_or_fsx(documents: dict[str, str]) -> None:
    for name, one in granted(documents):
        for action in listed(one["Action"]):
            assert not re.match(r"(s3|fsx|elasticfilesystem):.*(Delete|Remove)", action), (name, action)


def test_karpenter_terminates_only_what_it_started_for_this_cluster(documents: dict[str, str]) -> None:
    instance = f"arn:aws:ec2:us-west-2:{ACCOUNT}:instance/i-1"
    own = {"aws:ResourceTag/kubernetes.io/cluster/fleet": "owned", "aws:ResourceTag/karpenter.sh/nodepool": "gpu"}
    policy = documents["permissions/karpenter/nodes"]
    assert allowed(policy, "ec2:TerminateInstances", instance, own)
    assert not allowed(policy, "ec2:TerminateInstances", instance, {})
    other = {"aws:ResourceTag/kubernetes.io/cluster/other": "owned", "aws:ResourceTag/karpenter.sh/nodepool": "gpu"}
    assert not allowed(policy, "ec2:TerminateInstances", instance, other)
    assert not allowed(policy, "ec2:TerminateInstances", instance.replace(ACCOUNT, "999999999999"), own)


def test_karpenter_passes_nodes_their_role_and_no_other(documents: dict[str, str]) -> None:
    to_ec2 = {"iam:PassedToService": "ec2.amazonaws.com"}
    policy = documents["permissions/karpenter/profiles"]
    assert allowed(policy, "iam:PassRole", INPUTS["gpu_node_role_arn"], to_ec2)
    assert not allowed(policy, "iam:PassRole", f"arn:aws:iam::{ACCOUNT}:role/Admin", to_ec2)
    assert not allowed(policy, "iam:PassRole", INPUTS["gpu_node_role_arn"], {"iam:PassedToService": "lambda"})


def test_the_autoscaler_changes_only_groups_of_this_cluster(documents: dict[str, str]) -> None:
    group = f"arn:aws:autoscaling:us-west-2:{ACCOUNT}:autoScalingGroup:1:autoScalingGroupName/eks-system"
    policy = documents["permissions/autoscaler/scale"]
    own = {"aws:ResourceTag/k8s.io/cluster-autoscaler/fleet": "owned"}
    assert allowed(policy, "autoscaling:SetDesiredCapacity", group, own)
    other = {"aws:ResourceTag/k8s.io/cluster-autoscaler/other": "owned"}
    assert not allowed(policy, "autoscaling:SetDesiredCapacity", group, other)


def test_the_load_balancer_controller_makes_its_group_in_the_clusters_vpc_whoever_tagged_it(
    documents: dict[str, str],
) -> None:
    # A VPC of others has no tag of ours, and CreateSecurityGroup is checked on the VPC as well as on the group.
    policy, make = documents["permissions/load_balancer/make"], "ec2:CreateSecurityGroup"
    assert allowed(policy, make, f"arn:aws:ec2:us-west-2:{ACCOUNT}:vpc/vpc-11112222", {})
    assert not allowed(policy, make, f"arn:aws:ec2:us-west-2:{ACCOUNT}:vpc/vpc-33334444", {})
    group = f"arn:aws:ec2:us-west-2:{ACCOUNT}:security-group/*"
    assert allowed(policy, make, group, {"aws:RequestTag/elbv2.k8s.aws/cluster": "fleet"})
    assert not allowed(policy, make, group, {})


def test_the_load_balancer_controller_cannot_change_other_load_balancers(documents: dict[str, str]) -> None:
    balancer = f"arn:aws:elasticloadbalancing:us-west-2:{ACCOUNT}:loadbalancer/net/x/1"
    policy = documents["permissions/load_balancer/make"]
    delete = "elasticloadbalancing:DeleteLoadBalancer"
    assert allowed(policy, delete, balancer, {"aws:ResourceTag/elbv2.k8s.aws/cluster": "fleet"})
    assert not allowed(policy, delete, balancer, {"aws:ResourceTag/elbv2.k8s.aws/cluster": "other"})
    assert not allowed(policy, delete, balancer, {})


def test_interruption_messages_come_from_our_rules_and_only_over_tls(documents: dict[str, str]) -> None:
    queue = INPUTS["queue_arn"]
    ours = {"aws:SourceArn": INPUTS["interruption_rule_arns"][0], "aws:SecureTransport": "true"}
    assert allowed(documents["interruption_queue"], "sqs:SendMessage", queue, ours)
    assert not allowed(documents["interruption_queue"], "sqs:SendMessage", queue, {**ours, "aws:SourceArn": "other"})
    assert not allowed(
        documents["interruption_queue"], "sqs:SendMessage", queue, {**ours, "aws:SecureTransport": "false"}
    )


def test_efs_is_mounted_over_tls_and_never_by_root(documents: dict[str, str]) -> None:
    efs = INPUTS["efs_arn"]
    via = {"elasticfilesystem:AccessedViaMountTarget": "true", "aws:SecureTransport": "true"}
    assert allowed(documents["efs_clients"], "elasticfilesystem:ClientWrite", efs, via)
    assert not allowed(
        documents["efs_clients"], "elasticfilesystem:ClientWrite", efs, {**via, "aws:SecureTransport": "false"}
    )
    assert not allowed(documents["efs_clients"], "elasticfilesystem:ClientRootAccess", efs, via)


def test_documents_fit_the_quotas_of_iam(documents: dict[str, str]) -> None:
    inline: dict[str, int] = {}
    for name, text in documents.items():
        size = len(re.sub(r"\s", "", text))
        if name.startswith("permissions/"):
            role = name.split("/")[1]
            inline[role] = inline.get(role, 0) + size
        elif "_trust/" in name:
            assert size <= 2048, name
    assert max(inline.values()) <= 10_240


def test_a_whole_bucket_without_key_gets_no_condition_that_never_matches(tmp_path: Path) -> None:
    whole = {**INPUTS, "data_prefix": "", "results_place": "logs", "data_key_arn": ""}
    found = evaluated(tmp_path, whole)
    assert allowed(found["permissions/trainer/data"], "s3:ListBucket", "arn:aws:s3:::my-bucket", {"s3:prefix": "a/"})
    assert allowed(found["permissions/trainer/data"], "s3:GetObject", "arn:aws:s3:::my-bucket/a", {})
    assert not allowed(found["permissions/trainer/data"], "s3:PutObject", "arn:aws:s3:::my-bucket/a", {})
    assert "kms:" not in found["permissions/trainer/data"]
