"""The machine, commit and versions of a benchmark, for its result file."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# nvidia-smi's name of a value, and ours.
GPU_STATE = {
    "clocks.sm": "sm_clock_mhz",
    "clocks.max.sm": "sm_clock_most_mhz",
    "clocks.mem": "memory_clock_mhz",
    "power.draw": "power_w",
    "power.limit": "power_limit_w",
    "temperature.gpu": "temperature_c",
    "memory.used": "memory_used_mib",
    "memory.total": "memory_mib",
}
PACKAGES = ("torch", "numpy", "opencv-python-headless", "hotcoco", "pycocotools", "pillow", "torchvision", "triton")


def machine_facts(packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """Commit, machine and versions."""
    facts: dict[str, Any] = {"cpu": _cpu(), "cores": os.cpu_count(), "load_before": round(os.getloadavg()[0], 1)}
    gpu = _gpu()
    if gpu:
        facts["gpu"] = gpu
    state = gpu_state()
    if state:
        facts["gpu_state"] = state
    return {
        "commit": _commit(),
        "machine": facts,
        "versions": {"python": platform.python_version()} | {name: v for name in packages if (v := _version(name))},
    }


def gpu_state() -> dict[str, float]:
    """Clocks, power, temperature and memory of the GPU at this moment; empty without nvidia-smi or a GPU."""
    try:
        done = subprocess.run(gpu_query(), capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return {}
    return gpu_values(done.stdout.strip()) if done.returncode == 0 else {}


def gpu_query(*options: str) -> list[str]:
    """The command that prints the values of `GPU_STATE` as one line; `options` are further ones of nvidia-smi."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    return [
        "nvidia-smi",
        f"--id={gpu}",
        f"--query-gpu={','.join(GPU_STATE)}",
        "--format=csv,noheader,nounits",
        *options,
    ]


def gpu_values(line: str) -> dict[str, float]:
    """The numbers of a line of nvidia-smi by our names; values that the GPU does not have, such as [N/A], are left out.

    Empty for an incomplete line.
    """
    parts = [part.strip() for part in line.split(",")]
    if len(parts) != len(GPU_STATE):
        return {}
    found = zip(GPU_STATE.values(), parts, strict=True)
    return {name: float(text) for name, text in found if text.replace(".", "", 1).isdigit()}


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), platform.processor())


def _gpu() -> str | None:
    try:
        import torch
    except ImportError:
        return None
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _commit() -> str:
    """The commit; MASKFLEET_COMMIT overrides it in a copy of a working tree, where git would report an older one."""
    if "MASKFLEET_COMMIT" in os.environ:
        return os.environ["MASKFLEET_COMMIT"]
    git = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
