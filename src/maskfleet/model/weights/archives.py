"""Archives whose entries announce more than they hold are refused before memory is allocated for them."""

from __future__ import annotations

import ast
import json
import math
import struct
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np

from maskfleet.errors import WeightsError

MAX_ENTRIES = 100_000  # the largest models we load have about 1,000
MAX_SAFETENSORS_HEADER = 1 << 24  # bytes; 1,000 tensors take 0.1 MB
MAX_ARRAY_HEADER = 1 << 16  # bytes of the description of one numpy array
MAX_EXPANSION = 20  # unpacked bytes per byte of the file; packed weights take nine tenths of their size
FREE_BYTES = 1 << 26  # that an archive may unpack to in any case
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_DAMAGED = "download or copy it again; if it comes from somebody else, do not trust it"


def check_zip(path: Path) -> None:
    """WeightsError unless the entries of the zip archive are few, named once and not far larger than the file."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    if len(entries) > MAX_ENTRIES:
        raise _refused(path, f"it has {len(entries):,} entries; the limit is {MAX_ENTRIES:,}")
    names: set[str] = set()
    for entry in entries:
        if entry.filename in names:
            raise _refused(path, f"two entries are called {entry.filename!r}")
        names.add(entry.filename)
        if entry.compress_type not in _METHODS:
            raise _refused(path, f"{entry.filename!r} is packed by method {entry.compress_type}")
        if entry.compress_type == zipfile.ZIP_STORED and entry.file_size != entry.compress_size:
            raise _refused(
                path, f"{entry.filename!r} announces {entry.file_size:,} bytes, {entry.compress_size:,} are there"
            )
    size, announced = path.stat().st_size, sum(entry.file_size for entry in entries)
    if announced > FREE_BYTES + MAX_EXPANSION * size:
        raise _refused(path, f"its {size:,} bytes would unpack to {announced:,}")


def check_npz(path: Path) -> None:
    """WeightsError unless every array of the archive takes as many bytes as its entry has."""
    check_zip(path)
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if not entry.filename.endswith(".npy"):
                raise _refused(path, f"{entry.filename!r} is not a numpy array")
            with archive.open(entry) as member:
                dtype, shape, header_bytes = _array_header(member, path, entry.filename)
            if dtype.hasobject:
                raise WeightsError(
                    f"{path} holds pickled Python objects ({entry.filename.removesuffix('.npy')}), which could run "
                    "code when opened",
                    remedy="save it again with plain arrays only: numpy.savez(path, **{name: array})",
                )
            announced = math.prod(shape) * dtype.itemsize
            if header_bytes + announced != entry.file_size:
                raise _refused(
                    path,
                    f"{entry.filename!r} announces an array of {announced:,} bytes, its entry has "
                    f"{entry.file_size - header_bytes:,}",
                )


def check_safetensors(path: Path) -> None:
    """WeightsError unless the header is small enough to be parsed, and names each tensor once."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(MAX_SAFETENSORS_HEADER, path.stat().st_size - 8):
            raise _refused(path, f"it announces a header of {length:,} bytes; the limit is {MAX_SAFETENSORS_HEADER:,}")
        header = file.read(length)
    names: list[str] = []

    def count(pairs: list[tuple[str, Any]]) -> None:
        names[:] = [name for name, _ in pairs]  # the outermost object comes last

    try:
        json.loads(header, object_pairs_hook=count)
    except (ValueError, RecursionError) as error:
        raise _refused(path, f"its header cannot be read: {str(error)[:80]}") from None
    if len(names) != len(set(names)):
        raise _refused(path, "its header names a tensor twice")


def _array_header(member: IO[bytes], path: Path, name: str) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """(type, shape, bytes of the header) of a numpy array, by the rules of numpy's format."""
    start = member.read(8)
    if start[:6] != b"\x93NUMPY" or start[6] not in (1, 2, 3):
        raise _refused(path, f"{name!r} does not begin like a numpy array")
    form = "<H" if start[6] == 1 else "<I"
    (length,) = struct.unpack(form, member.read(struct.calcsize(form)))
    if length > MAX_ARRAY_HEADER:
        raise _refused(path, f"the header of {name!r} announces {length:,} bytes; the limit is {MAX_ARRAY_HEADER:,}")
    try:
        described = ast.literal_eval(member.read(length).decode("latin1" if start[6] < 3 else "utf-8"))
        dtype, shape = np.lib.format.descr_to_dtype(described["descr"]), tuple(described["shape"])
    except (ValueError, TypeError, KeyError, SyntaxError, MemoryError, RecursionError):
        raise _refused(path, f"the header of {name!r} cannot be read") from None
    if not all(type(side) is int and side >= 0 for side in shape):
        raise _refused(path, f"{name!r} has the shape {shape}")
    return dtype, shape, 8 + struct.calcsize(form) + length


def _refused(path: Path, why: str) -> WeightsError:
    return WeightsError(f"{path} is damaged, or made to exhaust memory: {why}", remedy=_DAMAGED)
