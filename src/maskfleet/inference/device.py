"""The device a process computes on."""

from __future__ import annotations

import torch

from maskfleet.errors import ConfigError, TrainingError


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
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)  # creating a device object does not check that the machine has it
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        raise ConfigError(
            f"device {device!r} cannot be used: {str(error).splitlines()[0]}",
            remedy='give "cpu", "cuda", "cuda:1" …, or leave it out; `maskfleet doctor` shows the GPUs',
        ) from error
    return chosen
