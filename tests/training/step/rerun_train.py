"""Run as a script: the command line with the compiled step on the CPU, with a stand-in for CUDA graphs.

Arguments: those of `maskfleet`, such as `train RUN_DIR`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from maskfleet.cli.main import main
from maskfleet.ops.recorder import RerunRecorder
from maskfleet.training import run
from maskfleet.training.step.compiled import Toolchain, make_step_runner


def unchanged(function: Any) -> Any:
    return function


if __name__ == "__main__":
    toolchain = Toolchain(unchanged, RerunRecorder())
    run.make_step_runner = partial(make_step_runner, toolchain=toolchain)  # type: ignore[assignment]
    main()
