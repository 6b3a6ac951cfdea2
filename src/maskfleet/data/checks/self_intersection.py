"""Polygons that cross themselves.

Shapes: m parts of n points each, S = n sides.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from maskfleet.data.store.annotations import Floats, Ints

MAX_TESTED_POINTS = 128  # sides are compared pair by pair, so the time grows with the square
MAX_PAIRS_PER_BLOCK = 1 << 20


def self_crossing_parts(numbers: Floats, start: Ints, parts: Ints) -> Ints:
    """Which of `parts`, indices into the parts that begin at `start` in `numbers`, cross themselves; ascending.

    Sides that only touch do not count. Parts with more than MAX_TESTED_POINTS points are not tested.
    """
    num_points = (start[parts + 1] - start[parts]) // 2
    found = []
    for n in range(4, MAX_TESTED_POINTS + 1):  # a triangle cannot cross itself
        same = parts[num_points == n]
        block = max(1, MAX_PAIRS_PER_BLOCK // (n * n // 2))
        for begin in range(0, len(same), block):
            some = same[begin : begin + block]
            points = numbers[start[some][:, None] + np.arange(2 * n)].reshape(len(some), n, 2)
            found.append(some[_crosses_itself(points)])
    return np.sort(np.concatenate(found)) if found else np.zeros(0, np.int64)


def _crosses_itself(points: Floats) -> npt.NDArray[np.bool_]:
    """Whether two sides of each closed polygon [m, n, 2] cross at a point inside both -> [m]."""
    n = points.shape[1]
    first, second = np.triu_indices(n, k=2)  # sides next to each other share a point; they cannot cross
    keep = (first != 0) | (second != n - 1)
    first, second = first[keep], second[keep]
    x, y = np.ascontiguousarray(points[..., 0]), np.ascontiguousarray(points[..., 1])
    next_x, next_y = np.roll(x, -1, axis=1), np.roll(y, -1, axis=1)
    apart = _sides_apart(x, next_x, first, second) | _sides_apart(y, next_y, first, second)
    which, pair = np.nonzero(~apart)  # few sides have boxes that overlap
    a, b = first[pair], second[pair]
    ax, ay, bx, by = x[which, a], y[which, a], next_x[which, a], next_y[which, a]
    cx, cy, dx, dy = x[which, b], y[which, b], next_x[which, b], next_y[which, b]

    def side(px: Floats, py: Floats, qx: Floats, qy: Floats, rx: Floats, ry: Floats) -> Floats:
        return np.sign((qx - px) * (ry - py) - (qy - py) * (rx - px))

    crossing = (side(ax, ay, bx, by, cx, cy) * side(ax, ay, bx, by, dx, dy) < 0) & (
        side(cx, cy, dx, dy, ax, ay) * side(cx, cy, dx, dy, bx, by) < 0
    )
    result = np.zeros(len(points), bool)
    result[which[crossing]] = True
    return result


def _sides_apart(
    here: Floats, there: Floats, first: npt.NDArray[np.intp], second: npt.NDArray[np.intp]
) -> npt.NDArray[np.bool_]:
    """Whether sides `first` and `second` [pairs] do not overlap along one axis -> [m, pairs]."""
    low, high = np.minimum(here, there), np.maximum(here, there)
    return np.asarray((low[:, first] >= high[:, second]) | (low[:, second] >= high[:, first]))
