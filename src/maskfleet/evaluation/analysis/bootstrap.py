"""Confidence intervals of AP: how much it would change with other images of the same kind.

The images are drawn with replacement (Efron's bootstrap). Repeated images raise AP a little, mostly that of classes
with few objects; so an interval is the spread of the samples around their mean, placed at the measured value. Runs that
were evaluated on the same images are compared on the same draws: what is difficult in the images cancels out of their
difference.

Shapes: B samples, I images, V values: AP, AP50 and AP75.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from maskfleet.evaluation.analysis.curves import NOT_MEASURED, class_precision
from maskfleet.evaluation.analysis.matches import AT_50, AT_75, Matches

Floats = NDArray[np.float64]
SAMPLES, LEVEL = 200, 0.95
VALUES = ("ap", "ap50", "ap75")  # V


@dataclass(frozen=True, slots=True)
class ConfidenceInterval:
    """The range that holds a value with a probability of 95 %."""

    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether a difference is more than chance."""
        return self.low > 0 or self.high < 0


def image_draws(num_images: int, *, samples: int = SAMPLES, seed: int = 0) -> Floats:
    """How often each image is in each sample -> [B, I]; the same for the same numbers."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(num_images, np.full(num_images, 1 / max(num_images, 1)), size=samples).astype(np.float64)


def sampled_ap(matches: Matches, draws: Floats) -> Floats:
    """AP, AP50 and AP75 of each sample of `draws` [B, I] -> [B, V]; NaN for a sample without objects."""
    sums, counts = np.zeros((len(draws), len(VALUES))), np.zeros((len(draws), 1))
    for category in range(len(matches.category_ids)):
        curves = class_precision(matches, category, draws)  # [B, T, R]
        measured = curves[:, 0, 0] != NOT_MEASURED
        ap = curves.mean(axis=2)  # [B, T]
        sums[measured] += np.stack([ap.mean(axis=1), ap[:, AT_50], ap[:, AT_75]], axis=1)[measured]
        counts[measured] += 1
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def interval(value: float, sampled: Floats) -> ConfidenceInterval | None:
    """The interval of a measured `value` whose samples are `sampled` [B]; None if it could not be measured."""
    known = sampled[np.isfinite(sampled)]
    if not len(known):
        return None
    low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]) - known.mean()
    return ConfidenceInterval(value + float(low), value + float(high))
