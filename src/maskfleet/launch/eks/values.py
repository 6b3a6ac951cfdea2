"""A job as values of the chart `train`."""

from __future__ import annotations

import io
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

from maskfleet.config.launch import EksLaunch
from maskfleet.errors import LaunchError
from maskfleet.launch.job import JobSpec


def chart_values(job: JobSpec, launch: EksLaunch) -> dict[str, Any]:
    """Values by name; what is left out is the chart's own affair."""
    if not launch.image:
        raise LaunchError(
            "no training image is named",
            remedy="give --image REPOSITORY@DIGEST or launch.image; see docs/run-anywhere/eks/index.md",
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
    asked = {
        "gpus_per_node": launch.gpus,
        "cpus_per_node": launch.cpus,
        "memory_gib_per_node": launch.memory_gib,
        "efa_per_node": 0 if launch.efa is False else None,
        "queue": launch.queue,
    }
    if launch.data_path not in (None, launch.shared_path):
        asked |= {"data_fs": launch.data_mount.removeprefix("/"), "data_pvc": launch.data_claim}
    values |= {name: value for name, value in asked.items() if value is not None}
    both = sorted({*values, "run_yaml"} & set(launch.chart_values))
    if both:
        raise LaunchError(
            f"launch.chart_values must not set {', '.join(both)}: that follows from the job",
            remedy="set the launch section's own field instead (docs/reference/config.md), or leave it out",
        )
    return {**values, **launch.chart_values, "run_yaml": job.run_yaml}


def values_text(values: dict[str, Any]) -> str:
    """`values` as a YAML file, the run file in it as people can read it."""
    run = values["run_yaml"]
    is_plain = run[:1].isalnum() and run.endswith("\n") and all(line.isprintable() for line in run.split("\n"))
    return _dumped({**values, "run_yaml": LiteralScalarString(run)} if is_plain else values)


def _dumped(values: dict[str, Any]) -> str:
    yaml = YAML(typ="rt")
    yaml.width = 4096
    yaml.default_flow_style = False
    buffer = io.StringIO()
    yaml.dump({name: _quoted(value) for name, value in values.items()}, buffer)
    return buffer.getvalue()


def _quoted(value: Any) -> Any:
    """Text in quotes: helm's YAML reads bare words such as `on` and `1e3` in its own way."""
    if isinstance(value, LiteralScalarString):
        return value
    if isinstance(value, str):
        return DoubleQuotedScalarString(value)
    if isinstance(value, dict):
        return {str(name): _quoted(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_quoted(inner) for inner in value]
    return value
