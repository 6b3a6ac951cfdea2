"""What compiled code is for: a GPU, and the versions that made it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from maskfleet import __version__
from maskfleet.ops.triton import TRITON_IS_INSTALLED


@dataclass(frozen=True, slots=True)
class Target:
    """What compiled code is for; with another one it is useless."""

    maskfleet: str
    pytorch: str
    triton: str
    device: str

    @classmethod
    def of(cls, device: torch.device) -> Target:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        return cls(__version__, torch.__version__, _triton_version(), name)


def _triton_version() -> str:
    if not TRITON_IS_INSTALLED:
        return "none"
    import triton

    return str(triton.__version__)
