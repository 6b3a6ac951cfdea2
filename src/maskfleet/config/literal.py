"""Parses text into plain values. Nothing is evaluated: the syntax has no names, calls or operators."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator

Token = tuple[str, str, int]  # kind, text, column from 1
Literal = bool | int | float | str | tuple["Literal", ...] | None

MAX_CHARS = 4096
MAX_NUMBER_CHARS = 40
MAX_DEPTH = 8

_TOKEN = re.compile(
    r"""\s*(?:(?P<mark>[\[\](),])|(?P<quoted>'[^'\\\t\r\n]*'|"[^"\\\t\r\n]*")|(?P<word>[^\s\[\](),'"]+))"""
)
_INTEGER = re.compile(r"[+-]?\d+(_\d+)*", re.ASCII)
_FLOAT = re.compile(r"[+-]?(\d+(_\d+)*\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_CONSTANTS = {"None": None, "null": None, "True": True, "true": True, "False": False, "false": False}
_CLOSING = {"(": ")", "[": "]"}
_END = ("end", "")


def parsed(text: str) -> Literal:
    """The value of `text`; a ValueError says where the syntax is wrong.

    Values are None, booleans, numbers, quoted strings, bare words (which are strings), and lists of these in [...], in
    (...) or separated by commas; all lists become tuples. One value in parentheses is that value, as in Python:
    `("coco_val2017")` is a string.
    """
    if len(text) > MAX_CHARS:
        raise ValueError(f"it has {len(text)} characters, more than {MAX_CHARS}")
    if not all(char.isprintable() or char in "\t\r\n" for char in text):
        raise ValueError("it contains unprintable characters")
    items, is_list = _items(deque(_tokens(text)), closing=_END, depth=0)
    if not items and not is_list:
        raise ValueError("it is empty")
    return tuple(items) if is_list else items[0]


def unquoted(text: str) -> str:
    """`text` without surrounding whitespace and without a pair of quotes around all of it."""
    bare = text.strip()
    if len(bare) >= 2 and bare[0] == bare[-1] and bare[0] in "'\"" and bare[0] not in bare[1:-1]:
        return bare[1:-1]
    return bare


def _items(tokens: deque[Token], *, closing: tuple[str, str], depth: int) -> tuple[list[Literal], bool]:
    """Values up to `closing`, and whether they form a list: with a comma, or empty in brackets."""
    if depth > MAX_DEPTH:
        raise ValueError(f"its lists are nested more than {MAX_DEPTH} deep")
    items: list[Literal] = []
    is_list = False
    while tokens[0][:2] != closing:
        items.append(_item(tokens, depth))
        if tokens[0][:2] == ("mark", ","):
            tokens.popleft()
            is_list = True
        elif tokens[0][:2] != closing:
            raise _syntax_error(tokens[0])
    tokens.popleft()
    return items, is_list or (not items and closing != _END)


def _item(tokens: deque[Token], depth: int) -> Literal:
    kind, piece, _ = token = tokens.popleft()
    if kind == "mark" and piece in _CLOSING:
        items, is_list = _items(tokens, closing=("mark", _CLOSING[piece]), depth=depth + 1)
        return tuple(items) if is_list or piece == "[" else items[0]
    if kind in ("mark", "end"):
        raise _syntax_error(token)
    return piece[1:-1] if kind == "quoted" else _scalar(piece)


def _syntax_error(token: Token) -> ValueError:
    kind, piece, column = token
    found = "its end" if kind == "end" else f"{piece[:20]!r} in column {column}"
    return ValueError(f"it is not a plain value at {found} (values are read, never evaluated)")


def _tokens(text: str) -> Iterator[Token]:
    """Every token in `text`, and a final `end`."""
    at, end = 0, len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(
                f"it has an unclosed quote, or a backslash or line break inside quotes, at column {at + 1}"
            )
        kind = match.lastgroup
        assert kind is not None
        yield kind, match[kind], match.start(kind) + 1
        at = match.end()
    yield *_END, end + 1


def _scalar(word: str) -> Literal:
    """The constant, number or string of a bare word; a number of absurd length stays a string."""
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    if len(word) > MAX_NUMBER_CHARS or _FLOAT.fullmatch(word) is None:
        return word
    number = int(word) if _INTEGER.fullmatch(word) else float(word)
    if not math.isfinite(number):
        raise ValueError(f"{word} is too large for a number")
    return number
