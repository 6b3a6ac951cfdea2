"""What a run measures, and one line of metrics.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

AP = "mAP("  # in the names of all scores of an evaluation, and of nothing else


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a run measured after one step: values by metric name, and pictures by tag."""

    step: int
    time: float  # seconds since 1970
    values: Mapping[str, float] = field(default_factory=dict)
    pictures: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)  # [H, W, 3] BGR
    is_evaluation: bool = False


def parsed_line(line: bytes) -> dict[str, float] | None:
    """The values of one line of metrics.jsonl, with NaN for null; None if the line is incomplete."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    return {name: math.nan if value is None else value for name, value in record.items()}
