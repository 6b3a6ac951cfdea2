"""What this machine has and lacks for training, each finding with a remedy."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from maskfleet.launch.findings import Finding, Verdict, judged
from maskfleet.launch.supervise.processes import processes_of_all_jobs
from maskfleet.system.network import listeners

MIN_PYTHON = (3, 11)
MIN_TORCH = (2, 11)
GIB = 1024**3
HERE = ""  # the host of a finding about this machine


def examine(folder: Path) -> list[Finding]:
    """Check Python, torch, GPUs, memory, the disk that holds `folder`, packages and tools."""
    findings = [_python(), *_torch_and_gpus(), _memory(), _disk(folder), _shared_memory(), _open_ports()]
    findings += [_package(*row) for row in _PACKAGES]
    findings += [_tool(*row) for row in _TOOLS]
    return findings


def _python() -> Finding:
    found = f"{platform.python_version()} on {platform.platform()}"
    return judged(HERE, "python", sys.version_info >= MIN_PYTHON, found, "install Python 3.11 or newer")


def _torch_and_gpus() -> list[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return [Finding(HERE, "torch", Verdict.FAIL, f"cannot be imported: {error}", "pip install 'torch>=2.11'")]
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    findings = [judged(HERE, "torch", release >= MIN_TORCH, torch.__version__, "pip install 'torch>=2.11'")]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(index)
            found = f"{card.name}, {card.total_memory / GIB:.0f} GiB, compute {card.major}.{card.minor}"
            findings.append(Finding(HERE, f"gpu {index}", Verdict.OK, found))
        return findings
    remedy = "training works on the CPU, slowly; for a GPU install its driver"
    if torch.version.cuda is None:
        remedy += " and a CUDA build of torch (this one is for CPU only)"
    findings.append(Finding(HERE, "gpu", Verdict.WARN, f"none; {os.cpu_count()} CPU cores", remedy))
    return findings


def _memory() -> Finding:
    info = Path("/proc/meminfo")
    if not info.exists():
        return Finding(HERE, "memory", Verdict.OK, "not measured on this system")
    rows = dict(line.split(":", 1) for line in info.read_text().splitlines())
    remedy = "close other programs, or lower train.images_per_gpu and data.num_workers"
    return _free("memory", int(rows["MemAvailable"].split()[0]) * 1024, 4 * GIB, remedy)


def _disk(folder: Path) -> Finding:
    existing = next(path for path in [folder, *folder.resolve().parents] if path.exists())
    remedy = "COCO needs about 25 GB and a run about 2 GB: free disk space, or use another disk"
    return _free(f"disk at {folder}", shutil.disk_usage(existing).free, 10 * GIB, remedy)


def _shared_memory() -> Finding:
    folder = Path("/dev/shm")  # noqa: S108 - only read
    if not folder.exists():
        return Finding(HERE, "shared memory", Verdict.OK, "no /dev/shm on this system")
    remedy = "enlarge /dev/shm (docker: --shm-size=8g), or set data.num_workers=0"
    return _free("shared memory", shutil.disk_usage(folder).free, GIB, remedy)


def _open_ports() -> Finding:
    """Whether runs of this machine listen where others can reach them."""
    found = sorted({f"{one.address} port {one.port}" for one in listeners(processes_of_all_jobs()) if one.is_open})
    text = f"a run listens on {', '.join(found)}" if found else "no run listens for other machines"
    remedy = "end that run, and let a firewall admit the training hosts only: who reaches the port can disturb a run"
    return judged(HERE, "open ports", not found, text, remedy, Verdict.WARN)


def _free(name: str, size: int, wanted: int, remedy: str) -> Finding:
    return judged(HERE, name, size >= wanted, f"{size / GIB:.1f} GiB free", remedy, Verdict.WARN)


def _package(name: str, purpose: str, remedy: str, required: bool) -> Finding:
    try:
        return Finding(HERE, name, Verdict.OK, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(HERE, name, Verdict.FAIL if required else Verdict.WARN, f"not installed; {purpose}", remedy)


def _tool(name: str, purpose: str, remedy: str, which: Callable[[str], str | None] = shutil.which) -> Finding:
    found = which(name)
    return judged(HERE, name, found is not None, found or f"not found; {purpose}", remedy, Verdict.WARN)


_BASE = "pip install maskfleet"
_PACKAGES = (
    ("opencv-python-headless", "reads and resizes images", _BASE, True),
    ("hotcoco", "computes AP", _BASE, True),
    ("tensorboard", "shows curves", _BASE, True),
    ("boto3", "talks to S3 and SageMaker", "pip install 'maskfleet[aws]'", False),
    ("kr8s", "talks to Kubernetes", "pip install 'maskfleet[k8s]'", False),
    ("jupyterlab", "runs the notebooks", "pip install 'maskfleet[notebook]'", False),
)
_TOOLS = (
    ("git", "names the commit in results", "install git"),
    ("ssh", "connects to other hosts", "install an OpenSSH client"),
    ("mpirun", "starts ranks by MPI", "install Open MPI; without --with mpirun no run needs it"),
    ("kubectl", "talks to Kubernetes", "install kubectl for launches on EKS"),
    ("helm", "installs charts", "install helm 3 for launches on EKS"),
    ("terraform", "creates the EKS cluster", "install terraform 1.5 or newer for `infra` on EKS"),
    ("docker", "builds images", "install docker or buildah to build training images"),
)
