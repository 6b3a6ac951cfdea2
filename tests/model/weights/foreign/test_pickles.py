"""A pickle builds arrays and builtins, and cannot run code, whatever is in it."""

from __future__ import annotations

import os
import pickle
import random
import struct
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maskfleet.errors import WeightsError
from maskfleet.model.weights import read_file
from maskfleet.model.weights.foreign import pickles

PROTO = b"\x80\x04"
GOOD = {"stem.conv1.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.int64(3)}


def refused(path: Path, content: bytes) -> WeightsError:
    path.write_bytes(content)
    with pytest.raises(WeightsError) as caught:
        read_file(path)
    assert str(path) in caught.value.what
    return caught.value


class Runs:
    """Calls a function with arguments when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


@pytest.mark.parametrize("protocol", range(2, 6))
def test_code_is_refused_and_not_run(protocol: int, tmp_path: Path) -> None:
    evil = {"model": {"a": Runs(os.mkdir, str(tmp_path / "ran"))}}
    error = refused(tmp_path / "evil.pkl", pickle.dumps(evil, protocol=protocol))
    assert "asks for posix.mkdir, and opening it could run code" in error.what
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "value",
    [
        Runs(getattr, {}, "clear"),
        Runs(eval, "1"),
        Runs(__import__, "os"),
        Runs(np.load, "file"),
        Runs(np.frombuffer, b"1234"),
        torch.zeros(2),
        np.array([{}], dtype=object),
        Path("x"),
    ],
    ids=["getattr", "eval", "import", "np.load", "np.frombuffer", "tensor", "objects", "path"],
)
def test_other_names_are_refused(value: Any, tmp_path: Path) -> None:
    refused(tmp_path / "evil.pkl", pickle.dumps({"model": {"a": value, "b": np.zeros(2)}}))


@pytest.mark.parametrize("name", ["__class__", "values.__class__", "__globals__", "sys.modules"])
def test_dotted_names_are_not_followed(name: str, tmp_path: Path) -> None:
    module = b"numpy"
    content = PROTO + b"\x8c" + bytes([len(module)]) + module + b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93."
    assert "asks for numpy." in refused(tmp_path / "evil.pkl", content).what


def test_attributes_that_a_pickle_sets_do_not_last(tmp_path: Path) -> None:
    """BUILD on a function of ours changes a function that only this pickle has."""
    state = pickle.dumps((None, {"__defaults__": (1, 2)}), protocol=2)[2:-1]
    content = b"\x80\x02cnumpy\ndtype\n" + state + b"b."
    refused(tmp_path / "evil.pkl", content)
    (tmp_path / "good.pkl").write_bytes(pickle.dumps({"model": GOOD}))
    assert torch.equal(read_file(tmp_path / "good.pkl").tensors["stem.conv1.weight"], torch.arange(6.0).reshape(2, 3))


def test_scalars_and_empty_arrays(tmp_path: Path) -> None:
    values = GOOD | {"empty": np.zeros((0, 3), np.float32), "half": np.ones(2, np.float16), "flag": np.array([True])}
    for protocol in range(2, 6):
        (tmp_path / "a.pkl").write_bytes(pickle.dumps(OrderedDict(values), protocol=protocol))
        found = read_file(tmp_path / "a.pkl").tensors
        assert found["n"] == 3
        assert found["empty"].shape == (0, 3)
        assert found["half"].dtype == torch.float16
        assert found["flag"].tolist() == [True]


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps({"model": {}}),
        pickle.dumps([1, 2]),
        pickle.dumps("text"),
        pickle.dumps({"model": {"a": 1}}),
    ],
)
def test_pickles_without_arrays(content: bytes, tmp_path: Path) -> None:
    assert "holds no arrays" in refused(tmp_path / "a.pkl", content).what


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps({"model": GOOD})[:-20],
        pickle.dumps({"model": GOOD})[:40],
        PROTO + b"\x96" + struct.pack("<Q", 1 << 40) + b".",
        PROTO + b"\x8e" + struct.pack("<Q", 1 << 40) + b".",
        PROTO + b"r\xff\xff\xff\x7f.",
        PROTO + b"}" + b"r\xff\xff\xff\x7f.",
        PROTO + b"K\x01" + b"\x85" * 60_000 + b".",
        PROTO + b"}K\x01" + b"\x85" * 60_000 + b"K\x01s.",
        PROTO + b"Pid\n.",
        PROTO + b"\x82\x01.",
        PROTO + b"\x97.",
        PROTO + b".",
        PROTO + b"0" * 10 + b".",
        b"\x80\x63.",
    ],
    ids=[
        "cut", "cut early", "large bytearray", "large bytes", "memo without value", "large memo", "nested",
        "nested key", "persistent", "extension", "buffer", "no value", "empty stack", "unknown protocol",
    ],
)  # fmt: skip
def test_damaged_pickles_are_called_damaged(content: bytes, tmp_path: Path) -> None:
    error = refused(tmp_path / "bad.pkl", content)
    assert "damaged" in error.what or "run code" in error.what or "no arrays" in error.what


def op(text: str) -> bytes:
    """Text as BINUNICODE."""
    return b"X" + struct.pack("<I", len(text)) + text.encode("latin1")


NESTED = op("x") + b"\x85" + b"q\x00h\x00\x86" * 60  # (x,), and sixty times a tuple of the last one twice
LONG = op("y" * 1_000_000) + b"q\x01"

NDARRAY = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85C\x01btR"
FLOATS = b"cnumpy\ndtype\nX\x02\x00\x00\x00u1\x85R"
BILLION_LAUGHS = {
    "key": b"}" + NESTED + b"K\x01s.",
    "keys": b"}(" + NESTED + b"K\x01u.",
    "dict": b"(" + NESTED + b"K\x01d.",
    "ordered": b"ccollections\nOrderedDict\n]" + NESTED + b"K\x01\x86a\x85R.",
    "set": b"\x8f(" + NESTED + b"\x90.",
    "author": b"}(" + op("model") + b"}" + op("a") + NDARRAY + b"(K\x01K\x01\x85" + FLOATS + b"\x89C\x01atbs"
    + op("__author__") + NESTED + b"u.",
    "shape": NDARRAY + b"(K\x01" + NESTED + b"\x85" + FLOATS + b"\x89C\x00tb.",
    "type": b"cnumpy\ndtype\n" + NESTED + b"\x85R.",
    "encoded": LONG + b"]" + b"c_codecs\nencode\nq\x02" + b"0(" + b"h\x02h\x01\x85R" * 40_000 + b"e.",
    "arrays": LONG + b"0](" + (NDARRAY + b"(K\x01J@B\x0f\x00\x85" + FLOATS + b"\x89h\x01tb") * 10_000 + b"e.",
    "states": b"}q\x00(" + b"".join(op(str(n)) + b"N" for n in range(10_000)) + b"u0" + b"cnumpy\ndtype\n"
    + b"h\x00b" * 100_000 + b".",
    "pairs": b"](" + b"".join(op(str(n)) + b"N\x86" for n in range(10_000)) + b"e\x85q\x000"
    + b"ccollections\nOrderedDict\nq\x01](" + b"h\x01h\x00R" * 10_000 + b"e.",
    "number": b"\x8b" + struct.pack("<I", 1_000_000) + b"\x01" * 1_000_000 + b"q\x000}" + b"h\x00Ns" * 100_000 + b".",
}  # fmt: skip

READ = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
from maskfleet.errors import WeightsError
from maskfleet.model.weights import read_file
for path in map(Path, sys.argv[1:]):
    try:
        print(path.stem, "was read:", len(read_file(path).tensors), flush=True)
    except WeightsError as error:
        print(path.stem, "damaged" if "damaged" in error.what else error.what, flush=True)
"""


def test_a_pickle_that_names_one_value_very_often_ends_before_memory_and_patience(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.pkl" for name in BILLION_LAUGHS]
    for path in paths:
        path.write_bytes(PROTO + BILLION_LAUGHS[path.stem])
    command = [sys.executable, "-c", READ, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = {name: f"{name} damaged" for name in BILLION_LAUGHS} | {"author": "author was read: 1"}
    assert done.stdout.splitlines() == list(expected.values())


def test_an_array_of_many_names_is_one_array_in_memory(tmp_path: Path) -> None:
    shared = np.ones((1000, 1000), np.float32)
    (tmp_path / "a.pkl").write_bytes(pickle.dumps({"model": {f"n{number}": shared for number in range(1000)}}))
    tensors = read_file(tmp_path / "a.pkl").tensors
    assert len(tensors) == 1000
    assert len({tensor.data_ptr() for tensor in tensors.values()}) == 1


def test_random_changes_never_do_more_than_fail(tmp_path: Path) -> None:
    """Every change gives arrays or an error about the file."""
    generator, good = random.Random(0), pickle.dumps({"model": GOOD, "__author__": "me"}, protocol=2)
    outcomes = set()
    for _ in range(100):
        content = bytearray(good)
        for _ in range(generator.randint(1, 3)):
            content[generator.randrange(2, len(content))] = generator.randrange(256)
        (tmp_path / "bad.pkl").write_bytes(content)
        try:
            read_file(tmp_path / "bad.pkl")
            outcomes.add("read")
        except WeightsError as error:
            outcomes.add("damaged" if "damaged" in error.what else "other")
    assert {"read", "damaged"} <= outcomes


@pytest.mark.parametrize(
    ("raw", "kind", "shape", "order"),
    [
        (bytes(24), "f4", (2, 4), "C"),
        (bytes(24), "f4", (-2, -3), "C"),
        (bytes(24), "f4", (1 << 40, 1 << 40), "C"),
        (bytes(24), "f4", (True, 6), "C"),
        (bytes(24), "f4", [2, 3], "C"),
        (bytes(24), "O8", (3,), "C"),
        (bytes(24), "V24", (1,), "C"),
        (bytes(24), "f4", (2, 3), "X"),
        ([1, 2], "f4", (2,), "C"),
    ],
)
def test_arrays_that_lie_about_themselves(raw: Any, kind: str, shape: Any, order: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        pickles._array(raw, pickles._Type(kind), shape, order)
