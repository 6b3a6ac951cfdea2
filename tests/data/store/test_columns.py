"""A file of columns that somebody changed is refused: none of its bytes is taken for an address of memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskfleet.data.store.columns import MAGIC, DamagedFileError, map_columns, write_columns


def file_of(header: bytes, *, announced: int | None = None, size: int = 64) -> bytes:
    length = len(header) if announced is None else announced
    data = MAGIC + length.to_bytes(8, "little") + hashlib.sha256(header).digest() + header
    return data + bytes(-len(data) % 64 + size)


def described(**changes: Any) -> bytes:
    content = {"columns": [["a", "<i8", [2], 0]], "bytes": 64, "meta": {}}
    return json.dumps(content | changes).encode()


BAD: dict[str, Callable[[], bytes]] = {
    "objects": lambda: file_of(described(columns=[["a", "|O", [1], 0]])),
    "objects in a record": lambda: file_of(described(columns=[["a", "i4,O", [1], 0]])),
    "text": lambda: file_of(described(columns=[["a", "<U4", [1], 0]])),
    "a negative offset": lambda: file_of(described(columns=[["a", "<i8", [1], -4096]])),
    "an offset beyond the end": lambda: file_of(described(columns=[["a", "<i8", [1], 4096]])),
    "more numbers than bytes": lambda: file_of(described(columns=[["a", "<i8", [10**12], 0]])),
    "a negative length": lambda: file_of(described(columns=[["a", "<i8", [-1], 0]])),
    "no columns": lambda: file_of(b"{}"),
    "a list": lambda: file_of(b"[]"),
    "no JSON": lambda: file_of(b"{"),
    "deep JSON": lambda: file_of(b"[" * 100_000),
    "a header of 2**63 bytes": lambda: file_of(described(), announced=2**63),
    "a header beyond the end": lambda: file_of(described(), announced=10_000),
}


@pytest.mark.parametrize("name", list(BAD))
def test_a_changed_file_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.write_bytes(BAD[name]())
    with pytest.raises(DamagedFileError):
        map_columns(path)


def test_columns_survive(tmp_path: Path) -> None:
    columns = {"a": np.arange(5), "b": np.array([[1.5, 2.5]]), "c": np.array([True, False]), "d": np.zeros(0, np.uint8)}
    write_columns(tmp_path / "store", columns, {"x": 1})
    read, meta = map_columns(tmp_path / "store")
    assert meta == {"x": 1}
    for name, column in columns.items():
        np.testing.assert_array_equal(read[name], column)
