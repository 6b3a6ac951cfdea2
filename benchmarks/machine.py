"""The machine, commit and versions of a benchmark, for its result file."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "opencv-python-headless", "hotcoco", "pycocotools", "pillow", "torchvision", "triton")


def machine_facts(packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """Commit, machine and versions."""
    facts: dict[str, Any] = {"cpu": _cpu(), "cores": os.cpu_count(), "load_before": round(os.getloadavg()[0], 1)}
    gpu = _gpu()
    if gpu:
        facts["gpu"] = gpu
    return {
        "commit": _commit(),
        "machine": facts,
        "versions": {"python": platform.python_version()} | {name: v for name in packages if (v := _version(name))},
    }


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
