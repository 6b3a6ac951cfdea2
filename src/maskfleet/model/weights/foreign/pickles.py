"""A pickle of arrays, read without numpy's or anybody else's code: it builds arrays and builtins, and nothing else.

A pickle is a program that may call whatever it names. Here every name that it may use stands for a function of ours
that only stores its arguments; any other name is refused before it is looked up. numpy's own functions are not among
them, because they trust the sizes and types that they are given.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maskfleet.errors import WeightsError

MAX_OPERATIONS = 2_000_000  # a model of 1,000 arrays has about 30,000
MAX_TUPLES = 50_000  # nested tuples are hashed by recursion
TORCH_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # the number at the start of what torch.save wrote before version 1.6
_NUMBERS = re.compile(r"[fiu][1248]|b1|\?")
_TUPLES = {"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET"}


class UnsafePickleError(Exception):
    """A pickle asks for a name that could run code."""


def read_pickle(path: Path) -> Any:
    """What a pickle holds: builtins and numpy arrays of numbers.

    WeightsError if it asks for more; any other exception means that it is damaged.
    """
    content = path.read_bytes()
    _scan(content)
    try:
        return _Reader(io.BytesIO(content)).load()
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

    __slots__ = ("values",)

    values: NDArray[Any]

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, is_fortran, raw = state
        self.values = _array(raw, kind, shape, "F" if is_fortran else "C")


def _array(raw: Any, kind: Any, shape: Any, order: Any) -> NDArray[Any]:
    content = raw.encode("latin1") if isinstance(raw, str) else raw  # Python 2 has one type for bytes and text
    if not isinstance(kind, _Type) or not isinstance(content, bytes | bytearray) or not isinstance(shape, tuple):
        raise TypeError("an array is not described by a type, a shape and bytes")
    if not all(type(side) is int and side >= 0 for side in shape) or order not in ("C", "F"):
        raise ValueError(f"an array has the shape {shape}")
    dtype = kind.numpy()
    if math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"an array of shape {shape} has {len(content):,} bytes")
    return np.frombuffer(bytes(content), dtype).reshape(shape, order=order)


def _stand_ins() -> dict[tuple[str, str], Any]:
    """What a pickle gets for the names that it may use; new functions each time, because it can set attributes."""

    def reconstruct(kind: Any, shape: Any, code: Any) -> _Array:
        return _Array()

    def from_buffer(raw: Any, kind: Any, shape: Any, order: Any) -> NDArray[Any]:
        return _array(raw, kind, shape, order)

    def scalar(kind: Any, raw: Any) -> NDArray[Any]:
        return _array(raw, kind, (), "C")

    def data_type(code: Any, align: Any = False, copy: Any = True) -> _Type:
        return _Type(str(code))

    def ordered_dict(pairs: Any = ()) -> dict[Any, Any]:
        return dict(pairs)

    def encoded(text: Any, encoding: Any = "latin1") -> bytes:
        if encoding != "latin1" or not isinstance(text, str):
            raise ValueError("text in an unknown encoding")
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


class _Reader(pickle._Unpickler):
    """Python's unpickler in Python: the one in C allocates memory for a memo as large as a pickle says."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, fix_imports=False, encoding="latin1")
        self._names = _stand_ins()

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._names[module, name]
        except (KeyError, TypeError):
            raise UnsafePickleError(f"{module}.{name}"[:200]) from None

    def get_extension(self, code: int) -> None:
        raise UnsafePickleError(f"extension {code}")


def arrays_in(values: dict[Any, Any]) -> dict[str, NDArray[Any]]:
    """The arrays of a mapping, by name."""
    found = {str(name): value.values if isinstance(value, _Array) else value for name, value in values.items()}
    return {name: value for name, value in found.items() if isinstance(value, np.ndarray)}
