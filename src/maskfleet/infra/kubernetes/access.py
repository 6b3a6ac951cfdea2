"""Access to the cluster that Terraform made, and to no other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from maskfleet.infra.terraform.state import State
from maskfleet.system.kube.client import ApiError, Kube

NEEDED = ("cluster_id", "cluster_endpoint", "cluster_ca", "region")


def access_of(state: State) -> dict[str, Any] | None:
    """What a kubeconfig needs, from the cluster's resource or else the outputs; None while there is no endpoint.

    An apply that failed midway may have a cluster and none of its outputs.
    """
    access = {name: value for name, value in state.values.items() if name in NEEDED and value}
    for resource in state.resources:
        if resource.type == "aws_eks_cluster":
            attributes = resource.attributes
            authority = (attributes.get("certificate_authority") or [{}])[0].get("data")
            arn = str(attributes.get("arn") or "").split(":")
            values = (attributes.get("name"), attributes.get("endpoint"), authority, arn[3] if len(arn) > 3 else None)
            access |= {name: value for name, value in zip(NEEDED, values, strict=True) if value}
    return access if set(access) == set(NEEDED) else None


def kubeconfig_of(access: Mapping[str, Any], *, profile: str | None = None) -> dict[str, Any]:
    """A kubeconfig with one cluster and no secret: `aws eks get-token` issues the tokens."""
    name, server, authority, region = (access[key] for key in NEEDED)
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


def reachable(kube: Kube) -> tuple[bool, str]:
    """(whether the API server answers, its version or why not)."""
    try:
        return True, kube.version()
    except ApiError as error:
        return False, error.what


def update_command(access: Mapping[str, Any], *, profile: str | None = None) -> list[str]:
    """The AWS command that adds the cluster to ~/.kube/config."""
    command = ["aws", "eks", "update-kubeconfig", "--region", access["region"], "--name", access["cluster_id"]]
    return [*command, "--profile", profile] if profile else command
