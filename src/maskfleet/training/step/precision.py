"""Numeric precision of the step: fp32, bf16 or fp16."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from maskfleet.errors import ConfigError

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Precision:
    """The number format of the forward pass, and the scaler that keeps fp16 gradients from underflowing."""

    name: Literal["fp32", "bf16", "fp16"]
    device: torch.device
    scaler: torch.amp.GradScaler

    def autocast(self) -> AbstractContextManager[object]:
        """Context for the forward pass."""
        if self.name == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=_TYPES[self.name])


def precision_for(name: str, device: torch.device) -> Precision:
    """What `train.precision` means on `device`."""
    if name == "auto":
        name = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    if name == "fp16" and device.type != "cuda":
        raise ConfigError(
            "train.precision=fp16 needs a GPU", remedy="use train.precision=auto, fp32 or bf16 on the CPU"
        )
    assert name in ("fp32", "bf16", "fp16")
    scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")
    return Precision(name, device, scaler)  # type: ignore[arg-type]
