"""A full GPU memory as an error that names the settings which need less of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from maskfleet.config.run import RunConfig
from maskfleet.errors import TrainingError

# What CUDA, cuBLAS, cuDNN and NCCL say; torch's allocator has a type of its own.
_FULL = re.compile(r"(?:CUDA|NCCL).*out of memory|CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED", re.IGNORECASE | re.DOTALL)
_ADVICE = " If reserved but unallocated"  # where torch's figures end, and its advice for programmers begins


def is_full_memory(error: BaseException) -> bool:
    """Whether `error` says that the memory of a GPU is full."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _FULL.search(str(error)) is not None


@contextmanager
def explaining_full_memory(config: RunConfig, device: torch.device) -> Iterator[None]:
    """Turn a full GPU memory inside the block into a TrainingError with its figures and what to change."""
    try:
        yield
    except RuntimeError as error:
        if not is_full_memory(error):
            raise
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        raise TrainingError(
            f"the training step does not fit into the memory of {name}, with "
            f"train.images_per_gpu={config.train.images_per_gpu}, train.precision={config.train.precision} and long "
            f"sides of up to {config.model.max_size_px} px: {_figures(error)}",
            remedy=_remedy(config),
        ) from error


def _figures(error: RuntimeError) -> str:
    """What `error` says about memory, on one line that `maskfleet explain` knows."""
    found = _FULL.search(str(error))
    text = found[0] if found and not isinstance(error, torch.OutOfMemoryError) else str(error).partition(_ADVICE)[0]
    return " ".join(text.split())


def _remedy(config: RunConfig) -> str:
    settings = ["smaller images by data.train_short_edge_px and model.max_size_px"]
    if config.train.precision == "fp32":
        settings.insert(0, "train.precision=bf16")
    if config.train.images_per_gpu != 1:
        settings.insert(0, "a lower train.images_per_gpu (train.accumulate_to_images keeps the images of an update)")
    return (
        f"use {', or '.join(settings)}, in a new run directory if this one has checkpoints; or resume on a GPU with "
        "more memory. `nvidia-smi` shows what else uses this one"
    )
