"""What AWS says about a cluster that exists, as variables of the add-ons root."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maskfleet.errors import ConfigError, InfraError
from maskfleet.infra.terraform.diagnose import remedy_for
from maskfleet.infra.terraform.progress import Diagnostic
from maskfleet.system.process import capture

_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,99}")
# Variables of the add-ons root without a default; empty, because maskfleet made none of these in AWS.
NOT_MADE = {"node_role_name": "", "karpenter_role_arn": "", "karpenter_queue": "", "autoscaler_role_arn": ""}


def describe_cluster(name: str, *, region: str | None, profile: str | None, env: Mapping[str, str]) -> dict[str, Any]:
    """Name, version, endpoint, certificate authority, VPC and region of an EKS cluster, from `aws`."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--use-cluster {name!r} is not the name of an EKS cluster", remedy="see aws eks list-clusters"
        )
    program = shutil.which("aws", path=env.get("PATH", ""))
    if program is None:
        raise InfraError("the AWS command line, aws, is not installed here", remedy="install it, and sign in")
    argv = [program, "eks", "describe-cluster", "--name", name, "--output", "json"]
    argv += ["--region", region] if region else []
    argv += ["--profile", profile] if profile else []
    done = capture(argv, env=env, timeout_s=60)
    if done.code != 0:
        words = " ".join(done.err.split())
        if "ResourceNotFoundException" in words:
            where = f" in {region}" if region else ""
            raise InfraError(
                f"there is no EKS cluster {name}{where}",
                remedy="see aws eks list-clusters; --var region=… names another region",
            )
        known = remedy_for(Diagnostic("error", words, ""), folder=Path())
        raise InfraError(f"aws eks describe-cluster failed: {words[:400]}", remedy=known or "fix what aws reports")
    return _variables(json.loads(done.out)["cluster"])


def _variables(cluster: Mapping[str, Any]) -> dict[str, Any]:
    if cluster.get("status") != "ACTIVE":
        raise InfraError(
            f"the cluster {cluster['name']} is {cluster.get('status')}, not ACTIVE",
            remedy="wait until AWS has finished what it does with the cluster",
        )
    return {
        "cluster_id": cluster["name"],
        "cluster_version": cluster["version"],
        "cluster_endpoint": cluster["endpoint"],
        "cluster_ca": cluster["certificateAuthority"]["data"],
        "cluster_vpc": cluster["resourcesVpcConfig"]["vpcId"],
        "region": cluster["arn"].split(":")[3],
    }
