from __future__ import annotations

import json
import math
import re
from xml.etree import ElementTree

import pytest
from parsed_page import Page

from maskfleet.html.charts import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    Series,
    axis_from_zero,
    bar,
    histogram,
    line_chart,
    smoothed,
    stacked_bar,
    thinned,
    tick_text,
    ticks,
)


def coordinates(chart: str) -> list[list[tuple[float, float]]]:
    return [
        [tuple(map(float, position.split(","))) for position in path.split()]  # type: ignore[misc]
        for path in re.findall(r'points="([^"]*)"', chart)
    ]


def test_a_line_runs_from_corner_to_corner_of_its_axes() -> None:
    chart = line_chart([Series("a", [(0, 0.0), (50, 5.0), (100, 10.0)])], title="T")
    ((first, middle, last),) = coordinates(chart)
    assert first == (LEFT, BOTTOM)
    assert last[0] == RIGHT
    assert last[1] == pytest.approx(TOP + (BOTTOM - TOP) * 0.4 / 10.4, abs=0.1)  # 4 % of space above the highest
    assert middle == (
        pytest.approx((first[0] + last[0]) / 2, abs=0.1),
        pytest.approx((first[1] + last[1]) / 2, abs=0.1),
    )
    assert re.findall(r'text-anchor="end">([^<]*)<', chart) == ["0", "5", "10"]
    Page(chart)


def test_the_pointer_finds_the_values_of_every_named_line() -> None:
    chart = line_chart(
        [Series("raw", [(1, 9.0)], faint=True), Series("a", [(1, 0.12345), (2, 2000.0)], 2)], title="T & Co"
    )
    (attributes,) = [attributes for tag, attributes in Page(chart).tags if tag == "figure"]
    data = json.loads(attributes["data-chart"] or "")
    assert [line["name"] for line in data["lines"]] == ["a"]
    assert data["lines"][0]["at"] == [1, 2]
    assert data["lines"][0]["text"] == ["0.123", "2k"]
    assert data["lines"][0]["color"] == 2


def test_a_few_huge_values_do_not_flatten_the_rest() -> None:
    points = [(0.0, 1e6), *((float(x), 1.0) for x in range(1, 200))]
    ((first, second, *_),) = coordinates(line_chart([Series("a", points)], title="T"))
    assert first[1] == TOP  # cut off at the top
    assert second[1] < (TOP + BOTTOM) / 2


def test_the_highest_of_a_few_values_is_drawn_where_it_is() -> None:
    short = Series("short run", [(1.0, 4.0), (2.0, 0.5)])
    others = [Series(str(n), [(1.0, 0.5), (2.0, 0.25)]) for n in range(4)]
    lines = coordinates(line_chart([short, *others], title="T"))
    assert lines[0][0][1] == pytest.approx(TOP + (BOTTOM - TOP) * 0.04 / 1.04, abs=0.1)
    assert BOTTOM - lines[0][0][1] == pytest.approx(8 * (BOTTOM - lines[1][0][1]), abs=1)


def test_a_chart_of_one_point_or_of_equal_values_can_be_drawn() -> None:
    for points in ([(5, 3.0)], [(5, 0.0)], [(1, 7.0), (2, 7.0)]):
        spots = coordinates(line_chart([Series("a", points)], title="T"))[0]
        assert all(LEFT <= x <= RIGHT and TOP <= y <= BOTTOM for x, y in spots)
    assert line_chart([Series("a", [(1, math.nan)])], title="T") == ""


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(0, 0.97) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])
    assert ticks(13, 88_000, count=6) == [20_000, 40_000, 60_000, 80_000]
    assert ticks(-1, 1, count=4) == pytest.approx([-1, -0.5, 0, 0.5, 1])
    assert ticks(3, 3) == [3]


def test_numbers_on_axes_are_short() -> None:
    texts = [tick_text(value) for value in (0, 0.25, 250, 12_000, 262_465, 1_500_000, 2e-5, -3000, 999)]
    assert texts == ["0", "0.25", "250", "12k", "262.5k", "1.5M", "2e-05", "-3k", "999"]


def test_smoothing_keeps_straight_lines_and_constants() -> None:
    line = [(float(x), 2.0 * x) for x in range(100)]
    assert [y for _, y in smoothed(line)[:90]] == pytest.approx([y for _, y in line[:90]])
    flat = [(float(x), 3.0) for x in range(7)]
    assert smoothed(flat) == flat


def test_smoothing_is_a_mean_of_neighbours() -> None:
    # Ten points: one neighbour on either side; none at the start; only the one before at the end.
    values = [0, 3, 0, 0, 6, 0, 0, 0, 9, 3]
    got = [y for _, y in smoothed([(float(x), float(y)) for x, y in enumerate(values)])]
    assert got == pytest.approx([0, 1, 1, 2, 2, 2, 0, 3, 4, 6])
    assert smoothed([(0, 1.0), (1, math.nan), (2, 1.0)]) == [(0, 1.0), (2, 1.0)]


def test_thinning_keeps_order_and_every_spike() -> None:
    points = [(float(x), 0.0) for x in range(100_000)]
    points[77_777] = (77_777.0, 5.0)
    points[12_345] = (12_345.0, -5.0)
    thin = thinned(points, 600)
    assert len(thin) <= 600
    assert thin == sorted(thin)
    assert (77_777.0, 5.0) in thin
    assert (12_345.0, -5.0) in thin
    assert thinned(points[:600], 600) == points[:600]


def test_bars_are_as_high_as_their_counts() -> None:
    chart = histogram(
        [5, 10, 0], title="t", x_label="x & y", y_label="n", bin_names=["a", "b", "c"], x_ticks=[(0, "0")]
    )
    root = ElementTree.fromstring(str(chart))
    heights = [float(shape.get("height", "")) for shape in root.iter("rect") if shape.get("class") == "bar"]
    assert heights[1] == pytest.approx(2 * heights[0], abs=0.11)
    assert heights[2] == 0
    assert [title.text for title in root.iter("title")] == ["a: 5", "b: 10", "c: 0"]
    assert "x & y" in [text.text for text in root.iter("text")]


def test_a_horizontal_bar_fills_its_share() -> None:
    widths = [float(shape.get("width", "")) for shape in ElementTree.fromstring(str(bar(3, 4, label="l"))).iter("rect")]
    assert widths == [100, 75]


@pytest.mark.parametrize(
    ("largest", "steps"),
    [(0, [0, 1]), (1, [0, 1]), (3, [0, 1, 2, 3]), (7, [0, 2, 4, 6, 8]), (100, [0, 25, 50, 75, 100])],
)
def test_axes_count_in_round_steps(largest: float, steps: list[float]) -> None:
    assert axis_from_zero(largest) == steps


def test_the_parts_of_a_stacked_bar_fill_it_without_gaps() -> None:
    parts = list(ElementTree.fromstring(str(stacked_bar([("a", 1), ("b", 0), ("c", 3)], title="t"))).iter("rect"))
    assert [(part.get("x"), part.get("width")) for part in parts] == [
        ("0.00", "25.00"),
        ("25.00", "0.00"),
        ("25.00", "75.00"),
    ]


def test_names_in_a_chart_cannot_become_markup() -> None:
    name = '"><script>alert(1)</script>'
    lines = line_chart([Series(name, [(1, 1.0)]), Series("b", [(1, 2.0)])], title=name, x_label=name)
    bars = histogram([1], title=name, x_label=name, y_label=name, bin_names=[name], x_ticks=[(0, name)])
    for chart in (lines, bars, bar(1, 2, label=name), stacked_bar([(name, 1)], title=name)):
        assert Page(chart).all("script") == []
        assert all(label["aria-label"] in (name, None) for label in Page(chart).all("svg"))
