"""The device a process computes on, and where code compiled for it is kept."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch

from maskfleet.errors import ConfigError, TrainingError
from maskfleet.system.files import cache_folder

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def keep_compiled_code(env: MutableMapping[str, str]) -> None:
    """Store compiled kernels for later processes, in the user's cache unless the environment names a folder."""
    env.setdefault(CACHE_VARIABLE, str(cache_folder("compiled", env)))


def local_device(local_rank: int = 0) -> torch.device:
    """The GPU of a local rank, made the current one; the CPU if there is no GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise TrainingError(
            f"there is no GPU for local rank {local_rank} on this machine, which has {count} GPUs",
            remedy="start as many ranks per machine as it has GPUs",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def chosen_device(device: str | torch.device | None) -> torch.device:
    """The device a user asked for; None is the first GPU, or the CPU if there is none."""
    if device is None:
        return local_device()
    usable = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    usable += [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if str(device) not in usable:
        raise ConfigError(
            f"there is no device {str(device)!r} on this machine, which has {', '.join(usable)}",
            remedy="give one of these, or leave it out; `maskfleet doctor` shows the GPUs",
        )
    chosen = torch.device(device)
    return chosen if chosen.type == "cpu" else local_device(chosen.index or 0)  # kernels start on the current GPU
