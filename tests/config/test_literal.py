"""Text -> plain values; ast.literal_eval is the reference where both know a value."""

import ast
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskfleet.config.literal import MAX_DEPTH, parsed, unquoted

WORDS = st.text(st.characters(exclude_characters="\\'\""), max_size=12).filter(str.isprintable)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | WORDS
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple), max_leaves=12
)


def as_tuples(value: Any) -> Any:
    return tuple(as_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value


def depth(value: Any) -> int:
    return 1 + max(map(depth, value), default=0) if isinstance(value, (list, tuple)) else 0


@given(VALUES)
def test_values_that_python_prints_are_parsed_as_python_parses_them(value: Any) -> None:
    text = repr(value)
    if depth(value) > MAX_DEPTH:
        with pytest.raises(ValueError, match="nested"):
            parsed(text)
        return
    ours, reference = parsed(text), as_tuples(ast.literal_eval(text))
    assert ours == reference
    assert repr(ours) == repr(reference)  # 1, 1.0 and True are equal but not the same


@given(st.text(max_size=60) | st.text("[](),'\"ab1.e-+ ", max_size=60))
def test_any_text_is_a_value_or_a_value_error(text: str) -> None:
    try:
        value = parsed(text)
    except ValueError:
        return
    if "\\" not in repr(value):
        assert repr(parsed(repr(value))) == repr(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("FreezeBN", "FreezeBN"),
        ("2x", "2x"),
        ("true", True),
        ("null", None),
        ("1e-5", 1e-5),
        ("120_000", 120_000),
        (".5", 0.5),
        ("-3", -3),
        ('("coco_val2017")', "coco_val2017"),
        ('("coco_val2017",)', ("coco_val2017",)),
        ("[coco_train2017]", ("coco_train2017",)),
        ("1, 2", (1, 2)),
        ("()", ()),
        ("[[]]", ((),)),
        (" [ (16, 0.1), (24, None) ] ", ((16, 0.1), (24, None))),
        ("[1,\n 2]\n", (1, 2)),
        ("'True'", "True"),
        ("1.25e-2/8", "1.25e-2/8"),
        ("٣", "٣"),
    ],
)
def test_values_as_people_type_them(text: str, value: Any) -> None:
    assert parsed(text) == value
    assert type(parsed(text)) is type(value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("  ", "empty"),
        ("[1, 2", "its end"),
        ("1]", r"'\]' in column 2"),
        ("(1]", r"'\]' in column 3"),
        (",", "',' in column 1"),
        ("[1,,2]", "',' in column 4"),
        ("a b", "'b' in column 3"),
        ("'a", "quote"),
        ("'a\\x62'", "backslash"),
        ("'a\nb'", "line break"),
        ("a\x00", "unprintable characters"),
        ("1\xa0", "unprintable characters"),
        ("f(1)", r"'\(' in column 2"),
        ("1e999", "too large"),
        ("[" * 9 + "]" * 9, "nested more than 8"),
        ("[" * 4000, "nested more than 8"),
        ("1" * 4097, "4097 characters"),
    ],
)
def test_the_error_about_a_bad_value_says_where_it_is(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parsed(text)


def test_one_pair_of_quotes_around_the_whole_value_is_removed() -> None:
    assert unquoted(' "True" ') == "True"
    assert unquoted("'a', 'b'") == "'a', 'b'"
    assert unquoted("'") == "'"
    assert unquoted("''") == ""
