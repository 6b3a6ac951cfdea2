"""GPU kernels behind `maskfleet.ops`: the same functions, written in Triton. Callers check `kernels_for` first."""

from __future__ import annotations

from importlib.util import find_spec

from torch import Tensor

TRITON_IS_INSTALLED = find_spec("triton") is not None


def kernels_for(tensor: Tensor) -> bool:
    """Whether Triton kernels work where `tensor` lives; plain torch does the work everywhere else."""
    return tensor.is_cuda and TRITON_IS_INSTALLED
