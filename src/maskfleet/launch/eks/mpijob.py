"""A job as values of the chart `train` (deploy/helm/train), which renders an MPIJob or, with min_nodes, a Job."""

from __future__ import annotations

import io
import posixpath
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

from maskfleet.config.base import replaced
from maskfleet.config.launch import EksLaunch
from maskfleet.config.run import DataConfig, RunConfig
from maskfleet.errors import LaunchError
from maskfleet.launch.instances import INSTANCES, Instance, instance_named
from maskfleet.launch.job import JobSpec


def chart_values(job: JobSpec, launch: EksLaunch) -> dict[str, Any]:
    """Values of the chart by name; the chart has defaults for the rest."""
    if not launch.image:
        raise LaunchError(
            "no training image is named",
            remedy="maskfleet image push, or name one with --image or launch.image (docs/run-anywhere/images.md)",
        )
    values: dict[str, Any] = {
        "run_id": job.name,
        "log_dir": launch.log_dir,
        "image": launch.image,
        "gpu_nodes": job.nodes,
        "gpu_instance_type": launch.instance,
        "slots_per_node": job.slots[0],
        "shared_fs": launch.shared_path.removeprefix("/"),
        "shared_pvc": launch.shared_claim,
        "backoff_limit": job.max_restarts,
        "shm_gib": launch.shm_gib,
    }
    optional = {
        "gpus_per_node": launch.gpus,
        "cpus_per_node": launch.cpus,
        "memory_gib_per_node": launch.memory_gib,
        "efa_per_node": 0 if launch.efa is False else None,
        "queue": launch.queue,
        "min_nodes": None if launch.min_nodes is None else job.min_nodes,
    }
    if launch.data_path not in (None, launch.shared_path):
        optional |= {"data_fs": launch.data_mount.removeprefix("/"), "data_pvc": launch.data_claim}
    values |= {name: value for name, value in optional.items() if value is not None}
    both = sorted({*values, "run_yaml"} & set(launch.chart_values))
    if both:
        raise LaunchError(
            f"launch.chart_values must not set {', '.join(both)}: the job determines them",
            remedy="set the launch section's own field instead (docs/reference/config.md), or leave it out",
        )
    return {**values, **launch.chart_values, "run_yaml": job.run_yaml}


def values_text(values: dict[str, Any]) -> str:
    """`values` as a YAML file, with the run file as a readable block."""
    run = values.get("run_yaml") or ""
    is_plain = run[:1].isalnum() and run.endswith("\n") and all(line.isprintable() for line in run.split("\n"))
    readable = {**values, "run_yaml": LiteralScalarString(run)} if is_plain else values
    yaml = YAML(typ="rt")
    yaml.width = 4096
    yaml.default_flow_style = False
    buffer = io.StringIO()
    yaml.dump(_quoted(readable), buffer)
    return buffer.getvalue()


def _quoted(value: Any) -> Any:
    """Quote all strings: helm's YAML reads bare words such as `on` and `1e3` differently."""
    if isinstance(value, LiteralScalarString):
        return value
    if isinstance(value, str):
        return DoubleQuotedScalarString(value)
    if isinstance(value, dict):
        return {str(name): _quoted(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_quoted(inner) for inner in value]
    return value


def with_data_in_pods(run: RunConfig, launch: EksLaunch) -> RunConfig:
    """`run` with data.root as a path in the pods: a relative one is on the data volume."""
    _refuse_local_file("train.weights", run.train.weights, launch)
    _refuse_local_file("model.backbone.weights", run.model.backbone.weights, launch)
    root = run.data.root
    if root.startswith("s3://"):
        return run
    if root.startswith(("/", "~")):
        if not _is_mounted(root, launch):
            raise LaunchError(
                f"data.root {root} is on no volume that the pods mount, which are {_mounts(launch)}",
                remedy=f"stage it there (docs/data/staging.md) and set data.root={launch.data_mount}/… or leave it out",
            )
        return run
    folder = launch.data_dir if root == DataConfig().root else posixpath.normpath(root)
    if folder == ".." or folder.startswith("../"):
        raise LaunchError(f"data.root {root} is outside of the data volume", remedy="name a folder on the volume")
    return replaced(run, {"data.root": posixpath.join(launch.data_mount, folder)})


def _refuse_local_file(field: str, path: str | None, launch: EksLaunch) -> None:
    """Raise if `path` is a file of this machine; files of the image and relative paths are not checked."""
    if path is None or not path.startswith(("/", "~")) or _is_mounted(path, launch):
        return
    if path.startswith("~") or Path(path).exists():
        raise LaunchError(
            f"{field} {path} is a file on this machine, and the pods mount only {_mounts(launch)}",
            remedy=f"copy it there (docs/run-anywhere/eks/index.md, Copy files) and set {field}={launch.data_mount}/…",
        )


def _is_mounted(path: str, launch: EksLaunch) -> bool:
    whole = f"{posixpath.normpath(path)}/"
    return any(whole.startswith(f"{mount}/") for mount in (launch.shared_path, launch.data_mount))


def _mounts(launch: EksLaunch) -> str:
    return " and ".join(sorted({launch.shared_path, launch.data_mount}))


def with_instance_facts(launch: EksLaunch, known: Mapping[str, Instance] = INSTANCES) -> EksLaunch:
    """`launch` with the GPUs of its instance type, and with the facts that the chart lacks for types from a file."""
    if launch.gpus is not None and launch.instance not in known:
        return launch
    facts = instance_named(launch.instance, known)
    gpus = facts.gpus if launch.gpus is None else launch.gpus
    if gpus > facts.gpus:
        raise LaunchError(f"{facts.name} has {facts.gpus} GPUs, not {gpus}", remedy="lower gpus or take a larger type")
    if launch.efa and not facts.efa:
        raise LaunchError(f"{facts.name} has no EFA device", remedy="leave launch.efa out, or take a type that has EFA")
    changes: dict[str, object] = {"gpus": gpus}
    if _shape(facts) != _shape(INSTANCES.get(facts.name)):
        # Daemons of the node need some of its CPUs and memory.
        changes["cpus"] = launch.cpus or max(1, facts.vcpus - max(1, facts.vcpus // 12))
        changes["memory_gib"] = launch.memory_gib or max(1, facts.memory_gib * 4 // 5 - 1)
        if launch.efa is not False and "efa_per_node" not in launch.chart_values:
            changes["chart_values"] = {**launch.chart_values, "efa_per_node": facts.efa}
    return replaced(launch, changes)


def _shape(facts: Instance | None) -> tuple[int, ...] | None:
    return (facts.gpus, facts.efa, facts.vcpus, facts.memory_gib) if facts is not None else None
