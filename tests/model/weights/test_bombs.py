"""Weights files that announce more than they hold are refused before memory is allocated for it."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from weight_samples import small_config

from maskfleet.errors import WeightsError
from maskfleet.inference.load import load
from maskfleet.model.weights import read_file

HUGE = 10**13


def npy(descr: str = "<f4", shape: str = "(2,)", data: bytes = bytes(8), *, announced: int | None = None) -> bytes:
    header = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", announced or len(header)) + header + data


def archive(entries: list[tuple[str, bytes]], *, packed: bool = False) -> bytes:
    out = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    with zipfile.ZipFile(out, "w", method) as file:
        for name, data in entries:
            file.writestr(name, data)
    return out.getvalue()


def npz(data: bytes, *, name: str = "conv0/W.npy") -> bytes:
    return archive([(name, data)])


def other_size(data: bytes, size: int) -> bytes:
    """The archive of one entry, whose directory announces an unpacked size of `size`."""
    at = data.index(b"PK\x01\x02") + 24
    return data[:at] + struct.pack("<I", size) + data[at + 4 :]


def safetensors(header: dict[str, object] | bytes, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def about(**model: object) -> bytes:
    """A maskfleet file of one small tensor that says that it is of a model of `model`."""
    meta = json.dumps({"format": 1, "model": model, "categories": []})
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    return safetensors({"__metadata__": {"maskfleet": meta}, "backbone.stem.conv.weight": entry}, bytes(4))


BOMBS: dict[str, Callable[[], bytes]] = {
    "npz array larger than its entry": lambda: npz(npy(shape=f"({HUGE},)")),
    "npz array of many axes": lambda: npz(npy(shape="(9999, 9999, 9999)")),
    "npz negative shape": lambda: npz(npy(shape="(-1,)")),
    "npz shape that is no number": lambda: npz(npy(shape="('a',)")),
    "npz header of 60 kB in brackets": lambda: npz(npy(shape="(" * 60_000)),
    "npz header beyond the entry": lambda: npz(npy(announced=60_000)),
    "npz objects": lambda: npz(npy(descr="|O")),
    "npz text instead of a header": lambda: npz(b"hello"),
    "npz entry that is no array": lambda: archive([("a.npy", npy()), ("b.txt", b"x")]),
    "npz packed a thousandfold": lambda: other_size(archive([("a.npy", npy())], packed=True), 1 << 31),
    "zip stored size": lambda: other_size(npz(npy()), 2**32 - 2),
    "pth packed a thousandfold": lambda: other_size(archive([("a/data.pkl", bytes(99))], packed=True), 1 << 31),
    "safetensors header of 99 MB": lambda: struct.pack("<Q", 99_000_000) + b'{"a":' + b" " * 64,
    "safetensors deep header": lambda: safetensors(b'{"a":' + b"[" * 50_000),
    "safetensors tensor named twice": lambda: safetensors(
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"1",
    ),
    "safetensors beyond its end": lambda: safetensors(
        {"a": {"dtype": "F32", "shape": [HUGE], "data_offsets": [0, 4 * HUGE]}}
    ),
    "safetensors negative offset": lambda: safetensors(
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, bytes(4)
    ),
    "configuration of deep JSON": lambda: safetensors({"__metadata__": {"maskfleet": "[" * 100_000}}),
    "configuration of no object": lambda: safetensors({"__metadata__": {"maskfleet": "3"}}),
    "configuration of endless blocks": lambda: about(backbone={"blocks": [10**9, 1, 1, 1]}),
    "configuration of endless channels": lambda: about(backbone={"stem_channels": 8 * 10**15}),
    "configuration of endless classes": lambda: about(num_categories=10**15),
}


@pytest.mark.parametrize("name", list(BOMBS))
def test_a_bomb_is_refused_with_its_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / "bomb"
    path.write_bytes(BOMBS[name]())
    with pytest.raises(WeightsError, match="bomb"):
        read_file(path)


def test_an_archive_that_names_an_entry_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.npz"
    with pytest.warns(UserWarning, match="Duplicate name"):
        path.write_bytes(archive([("a.npy", npy()), ("a.npy", npy())]))
    with pytest.raises(WeightsError, match=r"two entries are called 'a\.npy'"):
        read_file(path)


def test_a_tensor_of_more_numbers_than_its_storage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "view.pth"
    torch.save({"conv1.weight": torch.zeros(1).expand(1 << 40)}, path)
    with pytest.raises(WeightsError, match="more numbers than the file has"):
        read_file(path)


def test_a_sparse_tensor_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "sparse.pth"
    torch.save({"a": torch.zeros(2, 2).to_sparse(), "b": torch.zeros(3)}, path)
    file = read_file(path)
    assert set(file.tensors) == {"b"}
    assert file.ignored["a"] == "not a plain tensor"


def test_usual_archives_are_read(tmp_path: Path) -> None:
    arrays = {"a": np.zeros((3, 4), np.float32), "b": np.float32(1.0), "c": np.zeros((0, 5)), "d": np.array(["x"])}
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", **arrays)
        file = read_file(tmp_path / "a.npz")
        assert {name: tuple(one.shape) for name, one in file.tensors.items()} == {"a": (3, 4), "b": (), "c": (0, 5)}
        assert set(file.ignored) == {"d"}


def test_a_model_is_not_built_before_its_weights_fit(tmp_path: Path) -> None:
    path = tmp_path / "classes.safetensors"
    described = small_config().model_dump(mode="json") | {"num_categories": 1_000_000}
    path.write_bytes(about(**described))
    with pytest.raises(WeightsError, match=r"classes\.safetensors"):
        load(path, device="cpu")


LIMITED = """
import sys
from pathlib import Path
from maskfleet.errors import WeightsError
from maskfleet.model.weights import read_file
def peak_kib():
    # ru_maxrss would count the process that started this one, which may be a large one.
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
before = peak_kib()
for path in sys.argv[1:]:
    try:
        read_file(Path(path))
    except WeightsError:
        continue
    raise SystemExit(f"{path} was read")
print(peak_kib() - before)
"""


@pytest.mark.slow
def test_bombs_take_no_memory(tmp_path: Path) -> None:
    paths = []
    for number, make in enumerate(BOMBS.values()):
        paths.append(tmp_path / f"bomb{number}")
        paths[-1].write_bytes(make())
    done = subprocess.run([sys.executable, "-c", LIMITED, *map(str, paths)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 50_000
