"""Whether compiling the step pays for the steps that a run has left."""

from __future__ import annotations

import math
from dataclasses import dataclass

# On an H200 with an empty cache, one canvas, beside three other compilations: 80 s with frozen batch normalization,
# 84 s with group normalization.
COMPILE_S = 90.0
# One canvas from the cache that a child has just filled, and recording: 28 s measured. No step is done meanwhile.
SWITCH_S = 28.0
# The least that was measured: group normalization, 147 images/s instead of 72. Frozen batch normalization: 282 and 122.
SPEEDUP = 2.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """How long compiling takes, and what the run gains by it."""

    steps_left: int
    eager_step_s: float
    compile_s: float  # during which steps are eager
    switch_s: float  # during which no step is done

    @property
    def saved_s(self) -> float:
        """Time that the run ends earlier; negative if it ends later."""
        eager_s = max(0.0, self.steps_left * self.eager_step_s - self.compile_s)
        return eager_s * (1 - 1 / SPEEDUP) - self.switch_s

    @property
    def pays(self) -> bool:
        return self.saved_s > 0

    def __str__(self) -> str:
        return (
            f"{self.steps_left} steps of {self.eager_step_s:.3f} s are left, compiling takes about "
            f"{self.compile_s:.0f} s in the background and {self.switch_s:.0f} s to switch"
        )


def compile_estimate(*, canvases: int, side_by_side: int, steps_left: int, eager_step_s: float) -> Estimate:
    """The estimate before anything is compiled, if `side_by_side` canvases compile at a time."""
    rounds = math.ceil(canvases / max(1, side_by_side))
    return Estimate(steps_left, eager_step_s, COMPILE_S * rounds, SWITCH_S * canvases)


def switch_estimate(*, canvases: int, steps_left: int, eager_step_s: float) -> Estimate:
    """The estimate once child processes have compiled everything."""
    return Estimate(steps_left, eager_step_s, 0.0, SWITCH_S * canvases)
