"""The generator of pairwise test cases: if it missed a pair, the chart tests would miss it too."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from pairwise import pairwise


@pytest.mark.parametrize("sizes", [(4, 2, 4, 2, 2, 2, 2), (3, 3, 3), (2,) * 10, (5, 1, 3), (2, 2)])
def test_every_pair_of_values_occurs_in_few_combinations(sizes: Sequence[int]) -> None:
    options = [[f"{column}{value}" for value in range(size)] for column, size in enumerate(sizes)]
    combinations = pairwise(*options)
    for a, b in itertools.combinations(range(len(options)), 2):
        assert {(row[a], row[b]) for row in combinations} == set(itertools.product(options[a], options[b]))
    largest, second = sorted(sizes, reverse=True)[:2]
    assert largest * second <= len(combinations) <= largest * second + len(sizes)
    assert len(set(combinations)) == len(combinations)


def test_the_first_combination_has_the_first_value_of_each_option() -> None:
    assert pairwise("ab", "cd", "ef")[0] == ("a", "c", "e")
