"""Triton reads TRITON_INTERPRET when it is imported: without a GPU its kernels run here, slowly, in numpy."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def kernel_device() -> str:
    """Where kernels are tested: on the GPU if there is one, else in Triton's interpreter."""
    pytest.importorskip("triton", reason="Triton has no build for this platform")
    return "cuda" if torch.cuda.is_available() else "cpu"
