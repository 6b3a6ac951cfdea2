"""Which parts a cluster lacks, and with which variables the add-ons root installs exactly those."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from maskfleet.errors import InfraError
from maskfleet.infra.existing.inventory import (
    EFA,
    GPU,
    Inventory,
    full_name,
    is_ours,
    mentions,
    offers,
    operators_for,
    starts_gpus,
)
from maskfleet.infra.terraform.state import Resource
from maskfleet.system.kube.client import Json

EBS_DRIVERS = ("ebs.csi.aws.com", "ebs.csi.eks.amazonaws.com")
DRIVER_ADDONS = {"efs": "aws-efs-csi-driver", "fsx": "aws-fsx-csi-driver"}
ACCOUNTS = {"trainer_service_accounts": "maskfleet-trainer", "staging_service_accounts": "maskfleet-staging"}


class Plan(StrEnum):
    """What `up` does about a part."""

    INSTALL = "install"
    OURS = "installed by maskfleet"
    KEEP = "use as it is"
    OMIT = "do not install"


@dataclass(frozen=True, slots=True)
class Part:
    """One part: what the cluster has of it, and what `up` does."""

    title: str
    found: str
    plan: Plan
    name: str = ""
    """Its name in the variable existing_parts; empty if it has none."""
    variables: Mapping[str, Any] = field(default_factory=dict)


def parts_of(have: Inventory, settings: Mapping[str, Any], ours: Sequence[Resource]) -> list[Part]:
    """Every part; `settings` are the variables that users gave, `ours` the resources of the add-ons root."""
    namespace = namespace_of(settings)
    made = {resource.name for resource in ours}
    karpenter = _karpenter(have, settings, made)
    return [
        _namespace(have, namespace, made),
        _accounts(have, settings, ours),
        _operator(have, namespace, made),
        _device_plugin(have, made),
        _efa_plugin(have, settings, made),
        karpenter,
        _node_pools(have, settings, made, karpenter),
        *(_file_system(have, settings, kind) for kind in DRIVER_ADDONS),
        _storage_class(have),
        _kueue(have, settings, made),
    ]


def namespace_of(settings: Mapping[str, Any]) -> str:
    """The namespace of training jobs."""
    return str(settings.get("kubeflow_namespace") or "kubeflow")


def accounts_made(ours: Sequence[Resource]) -> set[str]:
    """Names of the service accounts that maskfleet created."""
    return {resource.address.split('"')[1] for resource in ours if resource.name == "data"}


def variables_of(parts: Sequence[Part], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The variables with which the add-ons root installs the missing parts, and nothing else."""
    there = [part.name for part in parts if part.name and part.plan in (Plan.KEEP, Plan.OMIT)]
    found: dict[str, Any] = {"system_node_selector": settings.get("system_node_selector", {})}
    for part in parts:
        found |= part.variables
    # A node group of the team has an autoscaler of the team.
    return {**found, "existing_parts": [*there, "cluster_autoscaler"]}


def table(parts: Sequence[Part]) -> Iterator[str]:
    """The parts as lines of text."""
    rows = [("part", "the cluster has", "maskfleet"), *((part.title, part.found, part.plan.value) for part in parts)]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for row in rows:
        yield f"  {row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]}"


def _namespace(have: Inventory, name: str, made: Collection[str]) -> Part:
    title = f"namespace {name}"
    if "kubeflow" in made:
        return Part(title, name, Plan.OURS, "namespace")
    if name in have.namespaces:
        return Part(title, name, Plan.KEEP, "namespace")
    return Part(title, "none", Plan.INSTALL, "namespace")


def _accounts(have: Inventory, settings: Mapping[str, Any], ours: Sequence[Resource]) -> Part:
    made = accounts_made(ours)
    wanted = {variable: settings.get(variable, [default]) for variable, default in ACCOUNTS.items()}
    lacking = {
        variable: [name for name in names if name in made or name not in have.service_accounts]
        for variable, names in wanted.items()
    }
    names = [name for each in wanted.values() for name in each]
    there = [name for name in names if name in have.service_accounts]
    missing = [name for each in lacking.values() for name in each if name not in made]
    plan = Plan.INSTALL if missing else Plan.OURS if made else Plan.KEEP
    return Part("service accounts", ", ".join(there) or "none", plan, variables=lacking)


def _operator(have: Inventory, namespace: str, made: Collection[str]) -> Part:
    title, name = "mpi-operator", "mpi_operator"
    found = operators_for(have.deployments, namespace)
    if "mpi_operator" in made:
        return Part(title, ", ".join(found) or "not running", Plan.OURS, name)
    if have.has_old_mpijobs and not have.has_mpijobs:
        raise InfraError(
            "the cluster has MPIJobs of Kubeflow's training operator (v1), and its definition excludes those that"
            " maskfleet needs (v2beta1)",
            remedy="the owner of that operator must disable its MPIJobs and delete the CRD mpijobs.kubeflow.org;"
            " maskfleet changes nothing that it did not install",
        )
    if have.has_mpijobs and found:
        return Part(title, ", ".join(found), Plan.KEEP, name)
    return Part(title, "MPIJobs, but no operator for them" if have.has_mpijobs else "none", Plan.INSTALL, name)


def _device_plugin(have: Inventory, made: Collection[str]) -> Part:
    title, name = "NVIDIA device plugin", "nvidia_device_plugin"
    found = _daemons(have, "nvidia-device-plugin", "k8s-device-plugin") or _offered(have, GPU, "GPUs")
    if "nvidia_device_plugin" in made:
        return Part(title, found or "not running", Plan.OURS, name)
    return Part(title, found or "none", Plan.KEEP if found else Plan.INSTALL, name)


def _efa_plugin(have: Inventory, settings: Mapping[str, Any], made: Collection[str]) -> Part:
    title, name = "EFA device plugin", "efa_device_plugin"
    found = _daemons(have, "efa-k8s-device-plugin") or _offered(have, EFA, "EFA")
    if "efa_device_plugin" in made:
        return Part(title, found or "not running", Plan.OURS, name)
    if found:
        return Part(title, found, Plan.KEEP, name)
    if not settings.get("efa_az"):
        return Part(title, "none; installed with --var efa_az=ZONE", Plan.OMIT, name)
    return Part(title, "none", Plan.INSTALL, name)


def _karpenter(have: Inventory, settings: Mapping[str, Any], made: Collection[str]) -> Part:
    title, name = "Karpenter", "karpenter"
    if "karpenter" in made:
        return Part(title, "Karpenter", Plan.OURS, name)
    if have.node_pools is not None:
        return Part(title, "EKS Auto Mode" if have.node_classes is None else "Karpenter", Plan.KEEP, name)
    needed = ("karpenter_role_arn", "karpenter_queue", "node_role_name")
    if all(settings.get(one) for one in needed):
        return Part(title, "none", Plan.INSTALL, name)
    return Part(title, f"none; it needs {', '.join(needed)}", Plan.OMIT, name)


def _node_pools(have: Inventory, settings: Mapping[str, Any], made: Collection[str], karpenter: Part) -> Part:
    title, name = "GPU node pools", "node_pools"
    pools = sorted(full_name(one) for one in have.node_pools or [] if starts_gpus(one))
    network = _node_network(have.node_classes or [], settings)
    if "gpu_nodes" in made:
        return Part(title, ", ".join(pools) or "none", Plan.OURS, name, network)
    if pools:
        return Part(title, ", ".join(pools), Plan.KEEP, name)
    if karpenter.plan is Plan.OMIT or karpenter.found == "EKS Auto Mode":
        nodes = _offered(have, GPU, "GPUs") or "no node with GPUs"
        reason = "no Karpenter" if karpenter.plan is Plan.OMIT else "Auto Mode has node classes of its own"
        return Part(title, f"{nodes}; {reason}", Plan.OMIT, name)
    if not network["node_role_name"]:
        return Part(title, "none; installed with --var node_role_name=ROLE", Plan.OMIT, name)
    return Part(title, "none", Plan.INSTALL, name, network)


def _node_network(classes: Sequence[Json], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Role, subnets and security groups for our node classes: those given, else those of the first of the team's."""
    found: dict[str, Any] = {"node_role_name": ""}
    for one in sorted(classes, key=full_name):
        spec = one.get("spec", {})
        tags = [_only_tags(spec.get(terms)) for terms in ("subnetSelectorTerms", "securityGroupSelectorTerms")]
        if spec.get("role") and all(tags) and not is_ours(one, "gpu-nodes"):
            names = ("node_role_name", "node_subnet_tags", "node_security_group_tags")
            found = dict(zip(names, (spec["role"], *tags), strict=True))
            break
    return {name: settings.get(name) or value for name, value in found.items()}


def _only_tags(terms: Sequence[Json] | None) -> dict[str, str] | None:
    """The tags of a selector that is one term of exact tags; None for another one."""
    if terms is None or len(terms) != 1 or set(terms[0]) != {"tags"}:
        return None
    tags: dict[str, str] = terms[0]["tags"]
    return None if "*" in tags.values() else tags


def _file_system(have: Inventory, settings: Mapping[str, Any], kind: str) -> Part:
    """The claim pv-efs or pv-fsx: of the team, or of the file system that a variable names."""
    title, variable, driver = f"claim pv-{kind}", f"{kind}_id", f"{kind}.csi.aws.com"
    claims = [one for one in have.claims if one["metadata"]["name"] == f"pv-{kind}"]
    given = str(settings.get(variable) or "")
    if claims and not is_ours(claims[0], "storage"):
        return Part(title, "a claim", Plan.KEEP, variables={variable: ""})
    if not given:
        return Part(title, f"none; installed with --var {variable}=fs-…", Plan.OMIT, variables={variable: ""})
    if driver not in have.csi_drivers:
        raise InfraError(
            f"{variable} is given, but the cluster has no CSI driver {driver}",
            remedy=f"install the EKS add-on {DRIVER_ADDONS[kind]} with a role for it: aws eks create-addon",
        )
    return Part(title, "a claim" if claims else "none", Plan.OURS if claims else Plan.INSTALL)


def _storage_class(have: Inventory) -> Part:
    title = "storage class for EBS"
    classes = [one for one in have.storage_classes if one.get("provisioner") in EBS_DRIVERS]
    others = [full_name(one) for one in classes if not is_ours(one, "storage")]
    if len(others) < len(classes):
        return Part(title, "maskfleet-gp3", Plan.OURS, variables={"gp3_enabled": True})
    if others:
        return Part(title, ", ".join(sorted(others)), Plan.KEEP)
    if EBS_DRIVERS[0] not in have.csi_drivers:
        return Part(title, "none, and no EBS CSI driver", Plan.OMIT)
    return Part(title, "none", Plan.INSTALL, variables={"gp3_enabled": True})


def _kueue(have: Inventory, settings: Mapping[str, Any], made: Collection[str]) -> Part:
    title, name = "Kueue", "kueue"
    queues = ", ".join(sorted(full_name(one) for one in have.cluster_queues or [])) or "no ClusterQueue"
    if "kueue" in made:
        return Part(title, queues, Plan.OURS, name)
    if have.cluster_queues is not None:
        return Part(title, queues, Plan.KEEP, name)
    if str(settings.get("kueue_enabled", "")).lower() != "true":
        return Part(title, "none; installed with --var kueue_enabled=true", Plan.OMIT, name)
    return Part(title, "none", Plan.INSTALL, name)


def _daemons(have: Inventory, *words: str) -> str:
    return ", ".join(sorted(full_name(one) for one in have.daemons if any(mentions(one, word) for word in words)))


def _offered(have: Inventory, resource: str, what: str) -> str:
    nodes = offers(have.nodes, resource)
    return f"{len(nodes)} nodes with {what}" if nodes else ""
