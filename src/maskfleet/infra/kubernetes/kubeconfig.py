"""Access to the cluster that the outputs name, and to no other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from maskfleet.errors import InfraError
from maskfleet.infra.terraform.state import State

NEEDED = ("cluster_id", "cluster_endpoint", "cluster_ca", "region")


def access_of(state: State) -> dict[str, Any] | None:
    """What a kubeconfig needs, from the outputs or else from the cluster's own entry; None while there is no address.

    An apply that failed half way has a cluster, and may have none of its outputs.
    """
    found = {name: output.value for name, output in state.outputs.items() if name in NEEDED and output.value}
    for resource in state.resources:
        if resource.type == "aws_eks_cluster":
            own = resource.attributes
            authority = (own.get("certificate_authority") or [{}])[0].get("data")
            arn = str(own.get("arn") or "").split(":")
            entry = (own.get("name"), own.get("endpoint"), authority, arn[3] if len(arn) > 3 else None)
            found |= {name: value for name, value in zip(NEEDED, entry, strict=True) if value}
    return found if set(found) == set(NEEDED) else None


def kubeconfig_of(outputs: Mapping[str, Any], *, profile: str | None = None) -> dict[str, Any]:
    """A kubeconfig with one cluster and no secret: its tokens come from `aws eks get-token`."""
    name, server, authority, region = (_output(outputs, key) for key in NEEDED)
    user: dict[str, Any] = {
        "apiVersion": "client.authentication.k8s.io/v1beta1",
        "command": "aws",
        "args": ["--region", region, "eks", "get-token", "--cluster-name", name, "--output", "json"],
        "interactiveMode": "Never",
    }
    if profile:
        user["env"] = [{"name": "AWS_PROFILE", "value": profile}]
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": name,
        "clusters": [{"name": name, "cluster": {"server": server, "certificate-authority-data": authority}}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "users": [{"name": name, "user": {"exec": user}}],
    }


def update_command(outputs: Mapping[str, Any], *, profile: str | None = None) -> list[str]:
    """The AWS command that adds the cluster to ~/.kube/config."""
    name, region = _output(outputs, "cluster_id"), _output(outputs, "region")
    command = ["aws", "eks", "update-kubeconfig", "--region", region, "--name", name]
    return [*command, "--profile", profile] if profile else command


def _output(outputs: Mapping[str, Any], name: str) -> str:
    value = outputs.get(name)
    if not isinstance(value, str) or not value:
        raise InfraError(f"the infrastructure has no output {name}", remedy="maskfleet infra up eks makes the cluster")
    return value
