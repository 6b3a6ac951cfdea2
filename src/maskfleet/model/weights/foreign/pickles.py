"""A pickle of arrays, read without numpy's or anybody else's code: it builds arrays and builtins, and nothing else.

A pickle is a program that may call whatever it names. Here every name that it may use stands for a function of ours
that only stores its arguments; any other name is refused before it is looked up. numpy's own functions are not among
them, because they trust the sizes and types that they are given.

A pickle may also name one value any number of times: a tuple of the same tuple twice, forty deep, has a trillion
members for whoever hashes or prints it, and one long text makes a million arrays. So names in a dictionary are short
values only, nothing from the file is printed that was not checked, and what is copied is counted.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from maskfleet.errors import WeightsError

MAX_OPERATIONS = 2_000_000  # a model of 1,000 arrays has about 30,000
MAX_TUPLES = 50_000
MAX_AXES = 32
COPIES = 4  # how often the bytes of a file may be copied in all; text from Python 2 is copied twice
COPIES_SPARE = 1 << 20  # bytes, for small files
PAIR_COST = 100  # what a member of a dictionary that is copied counts, in bytes
TORCH_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # the number at the start of what torch.save wrote before version 1.6
_NUMBERS = re.compile(r"[fiu][1248]|b1|\?")
_TUPLES = {"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
_SETS = {"EMPTY_SET", "ADDITEMS", "FROZENSET"}  # their members would be hashed; weights have none


class UnsafePickleError(Exception):
    """A pickle asks for a name that could run code."""


def read_pickle(path: Path) -> Any:
    """What a pickle holds: builtins and numpy arrays of numbers.

    WeightsError if it asks for more; any other exception means that it is damaged.
    """
    content = path.read_bytes()
    _scan(content)
    try:
        return _Reader(content).load()
    except UnsafePickleError as error:
        raise WeightsError(
            f"{path} holds more than arrays: it asks for {error}, and opening it could run code",
            remedy="where you trust it, load it with the program that wrote it and save only its numbers: "
            "torch.save(model.state_dict(), path)",
        ) from error


def _scan(content: bytes) -> None:
    """ValueError unless all lengths in a pickle are those of its bytes, and it does not nest too much to be read.

    Without this, a few bytes could announce an array of many gigabytes, for which memory would be allocated.
    """
    tuples, memo_size = 0, 0
    for number, (operation, argument, _) in enumerate(pickletools.genops(content)):
        tuples += operation.name in _TUPLES
        if operation.name in _SETS:
            raise ValueError("it has a set, which weights do not have")
        memo_size = max(memo_size, argument if "PUT" in operation.name and isinstance(argument, int) else 0)
        if number > MAX_OPERATIONS or tuples > MAX_TUPLES or memo_size > MAX_OPERATIONS:
            raise ValueError("it has far more parts than weights have")


class _Type:
    """The type of an array; `__setstate__` is called by the pickle."""

    __slots__ = ("code", "order")

    def __init__(self, code: str) -> None:
        self.code, self.order = code, "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[2:5] != (None, None, None):
            raise ValueError("an array has fields")
        self.order = state[1]

    def numpy(self) -> np.dtype[Any]:
        if self.order not in ("<", ">", "=", "|") or not _NUMBERS.fullmatch(self.code):
            raise ValueError(f"an array is not of numbers but of type {self.code!r}")
        return np.dtype(self.order + self.code)


class _Array:
    """An array while it is read; `__setstate__` is called by the pickle."""

    __slots__ = ("copies", "values")

    values: NDArray[Any]

    def __init__(self, copies: _Copies) -> None:
        self.copies = copies

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, is_fortran, raw = state
        self.copies.count(_size(raw))
        self.values = _array(raw, kind, shape, "F" if is_fortran else "C")


class _Copies:
    """Counts what a pickle has copied; ValueError once that is far more than its bytes."""

    def __init__(self, file_bytes: int) -> None:
        self.left = COPIES * file_bytes + COPIES_SPARE

    def count(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise ValueError("it names the same values over and over, as weights never do")


def _check_key(key: Any) -> None:
    """ValueError unless a key is cheap to hash and to print."""
    is_small_number = type(key) is int and key.bit_length() < 64
    if not is_small_number and key is not None and type(key) not in (str, bytes, float, bool):
        raise ValueError(f"a dictionary has a {type(key).__name__} as a name")


def _array(raw: Any, kind: Any, shape: Any, order: Any) -> NDArray[Any]:
    content = raw.encode("latin1") if isinstance(raw, str) else raw  # Python 2 has one type for bytes and text
    if not isinstance(kind, _Type) or not isinstance(content, bytes | bytearray) or not isinstance(shape, tuple):
        raise TypeError("an array is not described by a type, a shape and bytes")
    if len(shape) > MAX_AXES or not all(type(side) is int and 0 <= side < 1 << 63 for side in shape):
        raise ValueError("an array has a shape that is not of sizes")
    if order not in ("C", "F"):
        raise ValueError("an array has an unknown order")
    dtype = kind.numpy()
    if math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"an array of shape {shape} has {len(content):,} bytes")
    return np.frombuffer(bytes(content), dtype).reshape(shape, order=order)


def _size(raw: Any) -> int:
    return len(raw) if isinstance(raw, str | bytes | bytearray) else 0


def _stand_ins(copies: _Copies) -> dict[tuple[str, str], Any]:
    """What a pickle gets for the names that it may use; new functions each time, because it can set attributes."""

    def reconstruct(kind: Any, shape: Any, code: Any) -> _Array:
        return _Array(copies)

    def from_buffer(raw: Any, kind: Any, shape: Any, order: Any) -> NDArray[Any]:
        copies.count(_size(raw))
        return _array(raw, kind, shape, order)

    def scalar(kind: Any, raw: Any) -> NDArray[Any]:
        copies.count(_size(raw))
        return _array(raw, kind, (), "C")

    def data_type(code: Any, align: Any = False, copy: Any = True) -> _Type:
        if not isinstance(code, str | bytes) or len(code) > 8:
            raise ValueError("an array has an unknown type")
        return _Type(code if isinstance(code, str) else code.decode("ascii"))

    def ordered_dict(pairs: Any = ()) -> dict[Any, Any]:
        if not isinstance(pairs, list | tuple):
            raise TypeError("a dictionary is not made of pairs")
        copies.count(PAIR_COST * len(pairs))
        for name, _ in pairs:
            _check_key(name)
        return dict(pairs)

    def encoded(text: Any, encoding: Any = "latin1") -> bytes:
        if encoding != "latin1" or not isinstance(text, str):
            raise ValueError("text in an unknown encoding")
        copies.count(len(text))
        return text.encode("latin1")

    def empty_bytes() -> bytes:
        return b""

    names: dict[tuple[str, str], Callable[..., Any] | str] = {
        ("numpy", "ndarray"): "numpy.ndarray",
        ("numpy", "dtype"): data_type,
        ("collections", "OrderedDict"): ordered_dict,
        ("_codecs", "encode"): encoded,
        ("__builtin__", "bytes"): empty_bytes,
        ("builtins", "bytes"): empty_bytes,
    }
    for core in ("numpy.core", "numpy._core"):
        names |= {
            (f"{core}.multiarray", "_reconstruct"): reconstruct,
            (f"{core}.multiarray", "scalar"): scalar,
            (f"{core}.numeric", "_frombuffer"): from_buffer,
        }
    return names


def _check_keys(stack: list[Any]) -> None:
    for key in stack[::2]:
        _check_key(key)


def _check_built(stack: list[Any]) -> None:
    """Only of what our functions made: the members of a state would be copied into anything else."""
    if not isinstance(stack[-2], _Type | _Array):
        raise ValueError("it changes something that is no array")


def _after(check: Callable[[list[Any]], None], operation: bytes) -> Callable[[Any], None]:
    """The unpickler's own step for `operation`, after `check` of its stack."""
    own = pickle._Unpickler.dispatch[operation[0]]

    def step(reader: Any) -> None:
        check(reader.stack)
        own(reader)

    return step


class _Reader(pickle._Unpickler):
    """Python's unpickler in Python: the one in C allocates memory for a memo as large as a pickle says."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), fix_imports=False, encoding="latin1")
        self._names = _stand_ins(_Copies(len(content)))

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._names[module, name]
        except (KeyError, TypeError):
            raise UnsafePickleError(f"{module}.{name}"[:200]) from None

    def get_extension(self, code: int) -> None:
        raise UnsafePickleError(f"extension {code}")

    dispatch: ClassVar[dict[int, Any]] = {
        **pickle._Unpickler.dispatch,
        pickle.SETITEM[0]: _after(lambda stack: _check_key(stack[-2]), pickle.SETITEM),
        pickle.SETITEMS[0]: _after(_check_keys, pickle.SETITEMS),
        pickle.DICT[0]: _after(_check_keys, pickle.DICT),
        pickle.BUILD[0]: _after(_check_built, pickle.BUILD),
    }


def arrays_in(values: dict[Any, Any]) -> dict[str, NDArray[Any]]:
    """The arrays of a mapping, by name."""
    found = {str(name): value.values if isinstance(value, _Array) else value for name, value in values.items()}
    return {name: value for name, value in found.items() if isinstance(value, np.ndarray)}
