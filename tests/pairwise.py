"""Pairwise test cases: a few combinations of options that together hold every pair of values.

Most faults of a chart come from one value or from two that meet. All combinations of ten switches are thousands of
helm processes; all pairs are about ten.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(*options: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations of one value per option, so that any two values of different options occur together in one of them.

    Greedy and deterministic: each combination starts with the first pair still missing and takes for every other
    option the value that completes the most missing pairs. The first combination has the first value of each option.
    """
    columns = range(len(options))
    missing = {
        frozenset([(a, x), (b, y)])
        for a, b in itertools.combinations(columns, 2)
        for x in range(len(options[a]))
        for y in range(len(options[b]))
    }
    combinations = []
    while missing:
        chosen = dict(min(sorted(pair) for pair in missing))
        for column in columns:
            if column not in chosen:
                gains = [
                    sum(frozenset([item, (column, value)]) in missing for item in chosen.items())
                    for value in range(len(options[column]))
                ]
                chosen[column] = gains.index(max(gains))
        missing -= {frozenset(pair) for pair in itertools.combinations(chosen.items(), 2)}
        combinations.append(tuple(options[column][chosen[column]] for column in columns))
    return combinations
