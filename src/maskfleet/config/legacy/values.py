"""How the values of old names are parsed and spelled: one Kind for each type of value."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from maskfleet.config.literal import MAX_CHARS, Literal, parsed, unquoted

_ARITHMETIC = frozenset("0123456789.eE_()+-*/ ")


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of value: its description, text -> our value (or ValueError), our value -> text (or None)."""

    description: str
    read: Callable[[str], Any]
    spell: Callable[[Any], str | None]


def choice(words: Mapping[str, Any]) -> Kind:
    """One of several old words, each with our value for it."""

    def read(text: str) -> Any:
        word = unquoted(text)
        if word not in words:
            raise ValueError(f"{word[:40]!r} is not one of {', '.join(words)}")
        return words[word]

    def spell(value: Any) -> str | None:
        return next((word for word, ours in words.items() if ours == value), None)

    return Kind(f"one of {', '.join(words)}", read, spell)


def switch(*, on: Any, off: Any) -> Kind:
    """True or False for two other values of ours."""
    spelled = {on: "True", off: "False"}
    return Kind(
        "True or False",
        lambda text: on if _read_flag(text) else off,
        lambda value: spelled.get(value) if value in (on, off) else None,
    )


def in_folder(folder: str) -> Kind:
    """A file that is looked up in `folder` if only its name is given."""

    def read(text: str) -> str | None:
        path = _read_file(text)
        return f"{folder}/{path}" if path is not None and "/" not in path else path

    return Kind("a path", read, lambda value: value or "")


def _literal(text: str) -> Literal:
    return parsed(unquoted(text))


def _spelled(value: Any) -> str | None:
    """Python's spelling of plain values; lists in brackets, nested lists in parentheses."""
    if isinstance(value, (tuple, list)):
        inner = [_spelled(tuple(item) if isinstance(item, list) else item) for item in value]
        if any(item is None for item in inner):
            return None
        pairs = [
            f"({item[1:-1]})" if item.startswith("[") and "," in item else item for item in inner if item is not None
        ]
        return f"[{', '.join(pairs)}]"
    if isinstance(value, str):
        return None if set(value) & set("\"'\\") else f'"{value}"'
    return repr(value) if value is None or isinstance(value, (bool, int, float)) else None


def _read_flag(text: str) -> bool:
    value = _literal(text)
    # environment variables use 0 and 1
    if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise ValueError(f"{text.strip()[:40]!r} is neither True nor False")


def _number(value: Literal) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and _is_arithmetic(value):
        raise ValueError(f"{value[:40]!r} is arithmetic, which is not evaluated; write its result")
    raise ValueError(f"{_shown(value)} is not a number")


def _whole(value: Literal) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = _number(value)
    if not number.is_integer():
        raise ValueError(f"{_shown(value)} is not a whole number")
    return int(number)


def _list(value: Literal) -> tuple[Literal, ...]:
    if not isinstance(value, tuple):
        raise ValueError(f"{_shown(value)} is not a list")
    return value


def _read_whole(text: str) -> int:
    return _whole(_numeral(text))


def _numeral(text: str) -> Literal:
    """The literal in `text`; arithmetic is returned unchanged, so that the error can name it."""
    try:
        return _literal(text)
    except ValueError:
        if _is_arithmetic(unquoted(text)):
            return unquoted(text)
        raise


def _is_arithmetic(text: str) -> bool:
    return set(text) <= _ARITHMETIC and bool(set(text) & set("0123456789")) and bool(set(text) & set("+-*/"))


def _read_path(text: str) -> str:
    path = unquoted(text)
    if len(path) > MAX_CHARS:
        raise ValueError(f"it has {len(path)} characters, more than {MAX_CHARS}")
    if not path.isprintable():
        raise ValueError("it contains unprintable characters")
    return path


def _read_file(text: str) -> str | None:
    path = _read_path(text)
    return None if path.lower() in ("", "none") else path


def _read_names(text: str) -> tuple[str, ...]:
    value = _literal(text)
    names = value if isinstance(value, tuple) else (value,)
    for name in names:
        if not isinstance(name, str) or not name:
            raise ValueError(f"{_shown(name)} is not the name of a dataset")
    return tuple(str(name) for name in names)


def _read_some_names(text: str) -> tuple[str, ...]:
    names = _read_names(text)
    if not names:
        raise ValueError("it is empty")
    return names


def _read_step_schedule(text: str) -> tuple[int, ...]:
    short = re.fullmatch(r"([1-9])x", unquoted(text))
    if short:
        passes = int(short[1])
        last = 180_000 * passes
        # TensorPack scales only the end; the drops stay 120000 and 40000 steps before it, except in 1x
        return (120_000, 160_000, 180_000) if passes == 1 else (last - 120_000, last - 40_000, last)
    steps = tuple(_whole(item) for item in _list(_literal(text)))
    _check_rising(steps)
    return steps


def _read_epoch_schedule(text: str) -> tuple[tuple[float, float | None], ...]:
    pairs = tuple(_list(item) for item in _list(_literal(text)))
    if not all(len(pair) == 2 for pair in pairs):
        raise ValueError("each entry must be a pair (epoch, factor)")
    schedule = tuple((_number(epoch), None if factor is None else _number(factor)) for epoch, factor in pairs)
    _check_rising(tuple(epoch for epoch, _ in schedule))
    if [factor is None for _, factor in schedule] != [False] * (len(schedule) - 1) + [True]:
        raise ValueError("the last entry, and only that one, must have the factor None")
    return schedule


def _check_rising(values: tuple[float, ...]) -> None:
    if not values or any(low >= high for low, high in itertools.pairwise(values)):
        raise ValueError("the entries must be in ascending order, and there must be at least one")


def _read_short_edge(text: str) -> tuple[int, int]:
    value = _literal(text)
    if not isinstance(value, tuple):
        return _whole(value), _whole(value)
    if len(value) != 2:
        raise ValueError(f"it has {len(value)} numbers, not a smallest and a largest one")
    low, high = _whole(value[0]), _whole(value[1])
    if low > high:
        raise ValueError(f"it goes from {low} down to {high}; write the smaller one first")
    return low, high


def _read_shapes(text: str) -> tuple[tuple[int, int], ...]:
    landscape = []
    for item in _list(_literal(text)):
        shape = _list(item)
        if len(shape) != 2:
            raise ValueError(f"{_shown(item)} is not a pair (height, width)")
        landscape.append((_whole(shape[0]), _whole(shape[1])))
    return tuple(dict.fromkeys(landscape + [(width, height) for height, width in landscape]))


def _spell_shapes(value: Any) -> str | None:
    if not isinstance(value, tuple):
        return None
    return _spelled(tuple((height, width) for height, width in value if height <= width))


def _shown(value: Literal) -> str:
    return f"{value!r:.40}"


FLAG = Kind("True or False", _read_flag, lambda value: repr(bool(value)))
NOT_FLAG = switch(on=False, off=True)
NUMBER = Kind("a number", lambda text: _number(_numeral(text)), _spelled)
WHOLE = Kind("a whole number", _read_whole, _spelled)
PERIOD = Kind("a whole number of epochs, 0 or less for never", lambda text: max(0, _read_whole(text)), _spelled)
COUNT_OR_DATA = Kind(
    "a whole number, 0 or less to take it from the data",
    lambda text: count if (count := _read_whole(text)) > 0 else None,
    lambda value: _spelled(-1 if value is None else value),
)
CLASSES_OR_DATA = Kind(
    "a whole number with the background, 1 or less to take it from the data",
    lambda text: count - 1 if (count := _read_whole(text)) > 1 else None,
    lambda value: _spelled(-1 if value is None else value + 1),
)
NUMBERS = Kind("a list of numbers", lambda text: tuple(_number(item) for item in _list(_literal(text))), _spelled)
WHOLES = Kind("a list of whole numbers", lambda text: tuple(_whole(item) for item in _list(_literal(text))), _spelled)
NUMBER_LISTS = Kind(
    "a list of lists of numbers",
    lambda text: tuple(tuple(_number(item) for item in _list(row)) for row in _list(_literal(text))),
    _spelled,
)
FOLDER = Kind("a path", _read_path, str)
FILE = Kind("a path, empty for none", _read_file, lambda value: value or "")
NAMES = Kind("a name or a list of names", _read_names, _spelled)
SOME_NAMES = Kind("a name or a list of names", _read_some_names, _spelled)
STEP_SCHEDULE = Kind(
    "1x to 9x, or a list of ascending steps", _read_step_schedule, lambda value: value and _spelled(value)
)
EPOCH_SCHEDULE = Kind(
    "a list of pairs (epoch, factor), the last factor None",
    _read_epoch_schedule,
    lambda value: value and _spelled(value),
)
SHORT_EDGE = Kind("a whole number, or a list of the smallest and the largest", _read_short_edge, _spelled)
SHAPES = Kind("a list of pairs (height, width)", _read_shapes, _spell_shapes)
