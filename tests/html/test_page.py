from __future__ import annotations

import base64
import re
from pathlib import Path

import cv2
import numpy as np
import pytest
from jinja2 import UndefinedError
from parsed_page import Page

from maskfleet import __version__
from maskfleet.html.images import data_uri
from maskfleet.html.page import generator_tag, render


@pytest.fixture
def template(tmp_path: Path) -> Path:
    (tmp_path / "own.css").write_text(".own { color: red; }")
    path = tmp_path / "own.html.jinja"
    path.write_text(
        '{% extends "shell.html.jinja" %}{% from "macros.html.jinja" import picture %}'
        '{% block title %}{{ name }}{% endblock %}{% block style %}{% include "own.css" %}{% endblock %}'
        "{% block main %}{{ 12345 | comma }}, {{ 0.051 | percent }}, {{ 0.5 | percent }}"
        "{{ picture(image, name, name) }}{% endblock %}"
    )
    return path


def test_a_page_is_the_shell_around_its_own_template(template: Path) -> None:
    text = render(template, made_by="test", name="a & b", image="data:,")
    page = Page(text)
    assert text.startswith("<!doctype html>")
    assert ".own { color: red; }" in text
    assert "a & b" in page.text
    assert "12,345, 5.1 %, 50 %" in page.text
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    assert "prefers-color-scheme: dark" in text
    assert [image["alt"] for image in page.all("img")] == ["a & b", ""]  # its own, and the viewer's


def test_a_page_names_the_command_that_made_it(template: Path) -> None:
    text = render(template, made_by="test", name="a", image=None)
    assert text.index(generator_tag("test")) < 500
    assert __version__ in Page(text).all("meta")[1]["content"]  # type: ignore[operator]
    assert generator_tag("other") not in text


def test_an_image_that_is_missing_has_a_placeholder(template: Path) -> None:
    page = Page(render(template, made_by="test", name="a", image=None))
    assert "no image" in page.text
    assert len(page.all("img")) == 1


def test_every_colour_is_defined_for_light_and_dark(template: Path) -> None:
    text = render(template, made_by="test", name="a", image=None)
    light, _, rest = text.partition("@media (prefers-color-scheme: dark)")
    dark = rest.partition("* { box-sizing")[0]
    defined = [set(re.findall(r"(--[\w-]+):", style)) for style in (light, dark)]
    assert len(defined[0]) > 20
    assert defined[0] == defined[1]
    assert set(re.findall(r"var\((--[\w-]+)\)", text)) <= defined[0] | {"--line"}  # a chart sets --line on each line


def test_a_value_that_is_not_given_is_an_error(template: Path) -> None:
    with pytest.raises(UndefinedError):
        render(template, made_by="test", name="a")


def test_an_image_becomes_the_uri_of_a_jpeg() -> None:
    image = np.full((20, 30, 3), 77, np.uint8)
    head, _, text = data_uri(image).partition(",")
    assert head == "data:image/jpeg;base64"
    decoded = cv2.imdecode(np.frombuffer(base64.b64decode(text), np.uint8), cv2.IMREAD_COLOR)
    assert decoded.shape == image.shape
    assert abs(decoded.astype(int) - 77).max() <= 2


def test_a_large_image_is_shrunk_to_the_limit() -> None:
    text = data_uri(np.zeros((100, 400, 3), np.uint8), max_px=200).partition(",")[2]
    assert cv2.imdecode(np.frombuffer(base64.b64decode(text), np.uint8), cv2.IMREAD_COLOR).shape == (50, 200, 3)
