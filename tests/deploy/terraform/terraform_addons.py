"""Shared by tests of the addons root: the values of its charts, evaluated by Terraform without a provider."""

from __future__ import annotations

import base64
import json
import re
import shutil
from pathlib import Path
from typing import Any

from maskfleet.system.deploy_files import deploy_path
from tools import run_tool, tool, try_tool

FROM_AWS = {
    "region": "us-west-2",
    "cluster_id": "demo",
    "cluster_version": "1.35",
    "cluster_endpoint": "https://0123456789ABCDEF.gr7.us-west-2.eks.amazonaws.com",
    "cluster_ca": base64.b64encode(b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n").decode(),
    "cluster_vpc": "vpc-0123456789abcdef0",
    "node_role_name": "demo-gpu-node",
    "karpenter_role_arn": "arn:aws:iam::123456789012:role/demo-karpenter",
    "karpenter_queue": "demo-karpenter",
    "autoscaler_role_arn": "arn:aws:iam::123456789012:role/demo-autoscaler",
    "trainer_role_arn": "arn:aws:iam::123456789012:role/demo-trainer",
    "staging_role_arn": "arn:aws:iam::123456789012:role/demo-staging",
    "efs_id": "fs-0123456789abcdef0",
    "efs_access_point_id": "fsap-0123456789abcdef0",
    "fsx_id": "fs-0fedcba9876543210",
    "fsx_dns": "fs-0fedcba9876543210.fsx.us-west-2.amazonaws.com",
    "fsx_mount_name": "abcdefgh",
    "efa_az": "us-west-2b",
}


def root() -> Path:
    return deploy_path("terraform", "eks", "addons")


def provider_free_copy(parent: Path) -> Path:
    """The root's variables and values alone, for which Terraform needs no provider."""
    tool("terraform")
    folder = parent / "terraform" / "eks" / "addons"
    folder.mkdir(parents=True)
    (folder.parents[2] / "helm").symlink_to(deploy_path("helm"))
    for name in ("variables.tf", "variables-charts.tf", "variables-existing.tf", "variables-nodes.tf", "values.tf"):
        shutil.copy(root() / name, folder)
    outputs = {"output": {"values": {"value": "${local.values}"}}}
    (folder / "outputs.tf.json").write_text(json.dumps(outputs), encoding="utf-8")
    run_tool("terraform", "init", "-no-color", cwd=folder, CHECKPOINT_DISABLE="1")
    return folder


def evaluated(folder: Path, **variables: Any) -> tuple[int, str]:
    """What Terraform makes of a set of variables: its exit status, and the values as JSON or its message."""
    (folder / "test.auto.tfvars.json").write_text(json.dumps({**FROM_AWS, **variables}), encoding="utf-8")
    done = try_tool("terraform", "apply", "-auto-approve", "-no-color", cwd=folder, CHECKPOINT_DISABLE="1")
    if done.returncode != 0:
        return done.returncode, re.sub(r"[\s│]+", " ", done.stderr)
    return 0, run_tool("terraform", "output", "-json", "values", cwd=folder, CHECKPOINT_DISABLE="1")


def chart_values(folder: Path, **variables: Any) -> dict[str, Any]:
    code, text = evaluated(folder, **variables)
    assert code == 0, text
    values = json.loads(text)
    assert isinstance(values, dict)
    return values
