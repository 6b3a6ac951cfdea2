"""Kernels whose sizes change from batch to batch, or with an address, compile once: a compilation takes a second."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from maskfleet.ops.triton import TRITON_IS_INSTALLED

PROGRAM = """
import sys
from importlib import import_module

module, name, *sizes = sys.argv[1:]
kernel = getattr(import_module(f"maskfleet.ops.triton.{module}"), name)
parameters = {parameter.name: parameter for parameter in kernel.params}
print([size for size in sizes if not parameters[size].do_not_specialize and parameters[size].annotation_type != "i64"])
"""
MAPS = [f"{size}{level}" for size in ("start", "height", "width") for level in range(4)]


@pytest.mark.slow
@pytest.mark.skipif(not TRITON_IS_INSTALLED, reason="needs Triton")
@pytest.mark.parametrize(
    ("module", "name", "sizes"),
    [
        ("roi_align", "_pool", MAPS),
        ("roi_align", "_spread", MAPS),
        ("matching", "_match", ["num_truths", "num_blocks"]),
        ("matching", "_raise_best", ["num_truths", "num_blocks"]),
        ("resize", "_resize", ["rows", "columns", "height", "width"]),
    ],
)
def test_sizes_that_change_are_no_part_of_a_compiled_kernel(module: str, name: str, sizes: list[str]) -> None:
    env = {variable: value for variable, value in os.environ.items() if variable != "TRITON_INTERPRET"}
    argv = [sys.executable, "-c", PROGRAM, module, name, *sizes]
    specialized = subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout
    assert specialized == "[]\n"
