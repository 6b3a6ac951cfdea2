"""Run as a script: the command line on the CPU, with steps that are compiled in the background by a stand-in.

Arguments: those of `maskfleet`, such as `train RUN_DIR`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from maskfleet.cli.main import main
from maskfleet.ops.recorder import RerunRecorder
from maskfleet.training import run
from maskfleet.training.background import estimate, runner
from maskfleet.training.background.child import CompileJob
from maskfleet.training.background.children import Children
from maskfleet.training.step.compiled import Toolchain, make_step_runner


def unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def children(jobs: Sequence[CompileJob]) -> Children:
    """They are done when they are looked after for the first time, so that every run switches at the same step."""
    started = Children(jobs, (sys.executable, "-S", "-c", "pass"))
    while not started.poll()[0]:
        time.sleep(0.01)
    return started


if __name__ == "__main__":
    runner.MEASURED_UPDATES, runner.CHECK_EVERY_UPDATES = 2, 3
    estimate.COMPILE_S = estimate.SWITCH_S = 0.0
    toolchain = Toolchain(unchanged, RerunRecorder())
    tools = runner.Tools(toolchain, children)
    switching = runner.make_switching_runner
    run.make_switching_runner = lambda *parts: switching(*parts[:5], tools)
    run.make_step_runner = partial(make_step_runner, toolchain=toolchain)  # type: ignore[assignment]
    run._when_compiled = lambda config, device, resumes_compiled: "first" if resumes_compiled else "later"
    main()
