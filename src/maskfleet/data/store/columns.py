"""A file of named numpy columns that many processes can map.

Layout: 8 bytes of magic, 8 of header length, 32 of header SHA-256, the header as JSON, then each column as raw
little-endian numbers, aligned to 64 bytes. Nothing in it is executed or unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from maskfleet.system.files import replacing

MAGIC = b"MFCOLS\x00\x01"
PREFIX_BYTES = 48
ALIGNMENT = 64

Column = npt.NDArray[Any]


class DamagedFileError(Exception):
    """The file is not a complete file of columns; the message says why."""


def write_columns(path: Path, columns: Mapping[str, Column], meta: Mapping[str, Any]) -> None:
    """Write `columns` and the JSON value `meta` to `path` in one step: readers see all of the file, or none of it."""
    layout, offset = [], 0
    for name, column in columns.items():
        layout.append((name, column.dtype.newbyteorder("<").str, column.shape, offset))
        offset = _aligned(offset + column.nbytes)
    header = json.dumps({"columns": layout, "bytes": offset, "meta": meta}, sort_keys=True).encode()
    start = _aligned(PREFIX_BYTES + len(header))
    with replacing(path) as file:
        file.write(MAGIC + len(header).to_bytes(8, "little") + hashlib.sha256(header).digest() + header)
        for name, dtype, _, column_start in layout:
            file.seek(start + column_start)
            file.write(np.ascontiguousarray(columns[name], dtype=dtype).data)
        file.truncate(start + offset)


def map_columns(path: Path) -> tuple[dict[str, Column], Any]:
    """Map the columns of `path` read-only -> (columns, meta); DamagedFileError if its length or header is wrong."""
    with path.open("rb") as file:
        prefix = file.read(PREFIX_BYTES)
        if len(prefix) < PREFIX_BYTES or not prefix.startswith(MAGIC):
            raise DamagedFileError("it does not start like a file of columns")
        size, header_bytes = os.fstat(file.fileno()).st_size, int.from_bytes(prefix[8:16], "little")
        if header_bytes > size - PREFIX_BYTES:
            raise DamagedFileError(f"it announces a header of {header_bytes} bytes")
        header = file.read(header_bytes)
    if hashlib.sha256(header).digest() != prefix[16:48]:
        raise DamagedFileError("its header does not match its checksum")
    start = _aligned(PREFIX_BYTES + len(header))
    try:
        content = json.loads(header)
        if size != start + content["bytes"]:
            raise DamagedFileError(f"it has {size} bytes instead of {start + content['bytes']}")
        pages = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
        columns = {
            str(name): _column(pages, dtype, shape, start + offset) for name, dtype, shape, offset in content["columns"]
        }
        return columns, content["meta"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise DamagedFileError(f"its header cannot be read: {error}") from error


def _column(pages: Column, dtype: str, shape: list[int], offset: int) -> Column:
    kind = np.dtype(dtype)
    if kind.kind not in "iufb":  # an array of objects would take the file's bytes for addresses of memory
        raise DamagedFileError(f"a column has the type {dtype!r}")
    stop = offset + math.prod(shape) * kind.itemsize
    if min([offset, *shape]) < 0 or stop > len(pages):  # numpy takes negative ones
        raise DamagedFileError(f"a column of shape {shape} at byte {offset} is beyond its end")
    return pages[offset:stop].view(kind).reshape(shape)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
