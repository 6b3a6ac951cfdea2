"""Charts as SVG files of their own."""

from __future__ import annotations

import base64
from xml.etree import ElementTree

from maskfleet.html.charts import HEIGHT, Series
from maskfleet.html.pictures import line_picture, svg_uri

SVG = "{http://www.w3.org/2000/svg}"


def test_a_picture_is_a_complete_svg_file_with_title_and_legend() -> None:
    series = [
        Series("a<b", [(0, 1.0), (10, 0.5)]),
        Series("raw", [(0, 1.0)], 2, faint=True),
        Series("c", [(0, 2.0)], 3),
    ]
    root = ElementTree.fromstring(line_picture(series, title="loss & more"))
    texts = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    assert texts[:3] == ["loss & more", "a<b", "c"], "a faint line has no legend"
    assert "--line-3" in "".join(root.find(f"{SVG}style").itertext())  # type: ignore[union-attr]
    assert float(root.get("viewBox", "").split()[3]) > HEIGHT
    assert len(list(root.iter(f"{SVG}polyline"))) == 3


def test_a_picture_of_nothing_is_empty() -> None:
    assert line_picture([Series("a", []), Series("b", [(1, float("nan"))])], title="loss") == ""


def test_the_address_of_a_picture_holds_the_whole_file() -> None:
    svg = line_picture([Series("ä", [(0, 1.0)])], title="loss")
    head, _, data = svg_uri(svg).partition(",")
    assert head == "data:image/svg+xml;base64"
    assert base64.b64decode(data).decode() == svg
