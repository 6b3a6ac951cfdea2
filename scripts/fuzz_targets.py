"""What `scripts/fuzz.py` feeds with random input: each fuzzer makes cases and gives them to the code that reads them.

A case is bytes. The code may give a result or raise a MaskfleetError; everything else is a finding.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import random
import re
import shutil
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from hypothesis import strategies as st

import maskfleet
from maskfleet.config.base import replaced
from maskfleet.config.load import dump, resolve
from maskfleet.config.model import ModelConfig
from maskfleet.config.recipes import recipe
from maskfleet.config.yaml import parse_value
from maskfleet.data.checks.annotations import check_split
from maskfleet.data.image_formats import ImageFileError
from maskfleet.data.image_header import read_image_header
from maskfleet.data.inspect.page import write_page
from maskfleet.data.inspect.report import Resize, inspect_splits
from maskfleet.data.pipeline.augment import Flip, ResizeShortEdge
from maskfleet.data.pipeline.decode import read_image
from maskfleet.data.pipeline.samples import Preparation, train_sample
from maskfleet.data.store.annotations import images_with_objects, open_store
from maskfleet.data.store.splits import split_from_paths
from maskfleet.errors import MaskfleetError
from maskfleet.evaluation.coco_eval import evaluate_detections
from maskfleet.launch.address import address_parts
from maskfleet.launch.backend import backend_of, parse_handle
from maskfleet.launch.ssh.hosts import parse_host
from maskfleet.model.build import build_mask_rcnn
from maskfleet.model.weights import Labels, file_config, fit, read_file, save_tensorpack, save_weights
from maskfleet.rle import RleError, bad_mask, check_runs, rle_pixels, runs_from_text, text_from_runs
from maskfleet.serve.app import App
from maskfleet.serve.batching import DetectionQueue
from maskfleet.serve.detection import DetectionService
from maskfleet.serve.page.guard import own_pages_only
from maskfleet.serve.page.site import Site
from maskfleet.serve.server import AppServer

HTTP_S = 120  # longest wait for an answer
NUMBERS = [0, 1, -1, 2, 255, 256, 32767, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64, -(2**31)]
SMALL_MODEL = {
    "num_categories": 3,
    "backbone.stem_channels": 8,
    "backbone.blocks": (1, 1, 1, 1),
    "fpn.channels": 8,
    "box_head.fc_channels": 8,
    "mask_head.channels": 8,
}


@dataclass(frozen=True, slots=True)
class Fuzzer:
    """A strategy for cases, and the code that reads one; `run` gets a folder for files of its own."""

    cases: st.SearchStrategy[bytes]
    run: Callable[[bytes, Path], None]


def mutated(samples: Callable[[], list[bytes]]) -> st.SearchStrategy[bytes]:
    """One of `samples` with up to eight changes of bytes, numbers, lengths and order."""
    return st.builds(lambda which, seed: mutate(samples()[which % len(samples())], _random(seed)), _INDEX, _SEED)


def _random(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311 - the same seed must give the same cases


def mutate(data: bytes, rng: random.Random) -> bytes:
    """`data` with a few random changes, most of them near its start, where headers are."""
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3, 5, 8])):
        limit = min(len(data), 400) if rng.random() < 0.7 else len(data)
        at = rng.randrange(limit + 1)
        match rng.randrange(7):
            case 0:
                data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
            case 1:
                data = data[:at]
            case 2:
                data = data[:at] + rng.randbytes(rng.randint(1, 16)) + data[at:]
            case 3:
                data = data[:at] + data[at + rng.randint(1, 64) :]
            case 4:
                form = rng.choice(["<H", ">H", "<I", ">I", "<Q", ">Q"])
                size = struct.calcsize(form)
                value = rng.choice(NUMBERS) % (1 << 8 * size)
                data = data[:at] + struct.pack(form, value) + data[at + size :]
            case 5:
                stop = at + rng.randint(1, 64)
                data = data[:at] + data[at:stop] * rng.randint(2, 4) + data[stop:]
            case _:
                digits = str(rng.choice(NUMBERS)).encode()
                data = data[:at] + digits + data[at + len(digits) :]
    return data


_INDEX, _SEED = st.integers(0, 2**16), st.integers(0, 2**48)
_TEXT = st.text(max_size=12) | st.sampled_from(["", "..", "../x.jpg", "/etc/passwd", "a\0b", "1.jpg", "é", "\ud800"])
_SCALARS = st.none() | st.booleans() | st.sampled_from(NUMBERS) | st.integers(-9, 99) | st.floats() | _TEXT
_JSON = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(_TEXT, inner, max_size=4), max_leaves=12
)


# COCO annotation files


@cache
def _coco_tree() -> str:
    square = [10, 10, 30, 10, 30, 30, 10, 30]
    rle = {"size": [48, 64], "counts": text_from_runs([500, 20, 48 * 64 - 520]).decode()}
    rows = [square, rle, [[1.5, 1.5, 9, 2, 3, 9], square]]
    annotations = [
        {"id": n, "image_id": 1 + n % 2, "category_id": 7, "bbox": [10, 10, 20, 20], "area": 400, "iscrowd": n % 2}
        | {"segmentation": [row] if isinstance(row[0] if isinstance(row, list) else row, int) else row}
        for n, row in enumerate(rows, 1)
    ]
    images = [{"id": n, "file_name": f"{n}.jpg", "width": 64, "height": 48} for n in (1, 2)]
    return json.dumps({"images": images, "annotations": annotations, "categories": [{"id": 7, "name": "seven"}]})


@st.composite
def _coco_cases(draw: st.DrawFn) -> bytes:
    """The annotation file with some values replaced, or with changed bytes."""
    if draw(st.integers(0, 4)) == 0:
        return mutate(_coco_tree().encode(), _random(draw(_SEED)))
    tree = json.loads(_coco_tree())
    for _ in range(draw(st.integers(1, 4))):
        node: Any = tree
        while isinstance(node, (dict, list)) and node:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            key = draw(st.sampled_from(keys))
            if draw(st.integers(0, 3)) == 0 or not isinstance(node[key], (dict, list)):
                node[key] = draw(_JSON)
                break
            node = node[key]
    return json.dumps(tree).encode("utf-8", "surrogatepass")


def _run_coco(case: bytes, folder: Path) -> None:
    images = folder / "train"
    if not images.exists():
        images.mkdir()
        for number in (1, 2):
            cv2.imwrite(str(images / f"{number}.jpg"), np.full((48, 64, 3), 90 * number, np.uint8))
    annotations = folder / "instances_train.json"
    annotations.write_bytes(case)
    split = split_from_paths(annotations, images)
    store = open_store(split, cache_dir=folder / "cache")
    try:
        problems = check_split(store)
        if len(case) % 7 == 0:
            report = inspect_splits([split], resize=Resize(64, 96, 32), workers=0, num_samples=3)
            write_page(report, folder / "page.html")
        preparation = Preparation((ResizeShortEdge((64, 64), 96), Flip(0.5)), masks=True, crowds=True)
        for index in images_with_objects(store):
            with suppress(MaskfleetError):
                train_sample(store, int(index), preparation=preparation, canvas=(96, 96), seed=1)
        if not any(problem.severity == "error" for problem in problems):
            evaluate_detections(annotations, [])
    finally:
        for path in (folder / "cache", folder / ".maskfleet"):
            shutil.rmtree(path, ignore_errors=True)


# Run-length masks


def _run_rle(case: bytes, folder: Path) -> None:
    height, width = struct.unpack_from("<ii", case.ljust(8, b"\0"))
    text = case[8:]
    with suppress(RleError):
        runs = runs_from_text(text)
        if runs.min(initial=0) >= 0:
            assert runs_from_text(text_from_runs(runs.tolist())).tolist() == runs.tolist()
        check_runs(runs, height, width)
        if height * width < 1 << 24:
            assert rle_pixels({"size": [height, width], "counts": text}).shape == (height, width)
    for counts in (text, text.decode("latin1"), list(text)):
        bad_mask([{"size": [height, width], "counts": counts}], [(height, width)])


_RLE_TEXT = st.text("".join(map(chr, range(48, 112))), max_size=60).map(str.encode) | st.binary(max_size=60)
_RLE_RUNS = st.lists(st.integers(0, 2**20) | st.sampled_from([2**31, 2**34]), max_size=20).map(text_from_runs)
_SIDE = st.integers(0, 300) | st.sampled_from([-1, -(2**31), 2**31 - 1, 65_536])
_RLE = st.builds(lambda h, w, text: struct.pack("<ii", h, w) + text, _SIDE, _SIDE, _RLE_TEXT | _RLE_RUNS)


# Image headers


@cache
def _images() -> list[bytes]:
    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 255, (9, 13, 3), np.uint8), np.full((40, 24, 3), 120, np.uint8)]
    suffixes = (".jpg", ".png", ".bmp", ".gif", ".webp", ".tiff", ".ppm")
    encoded = [cv2.imencode(suffix, picture)[1].tobytes() for suffix in suffixes for picture in pictures]
    encoded.append(cv2.imencode(".png", pictures[0][..., 0].astype(np.uint16) * 256)[1].tobytes())
    encoded.append(cv2.imencode(".tiff", pictures[0][..., 0].astype(np.float32))[1].tobytes())
    encoded.append(cv2.imencode(".webp", pictures[0], [cv2.IMWRITE_WEBP_QUALITY, 101])[1].tobytes())
    return encoded


def _run_image(case: bytes, folder: Path) -> None:
    path = folder / "image"
    path.write_bytes(case)
    try:
        pixels = read_image(path, max_mpx=4)
    finally:
        with suppress(ImageFileError):
            header = read_image_header(path)
    assert pixels.shape == (header.height, header.width, 3), "the header has another size than the pixels"


# Weights files


@cache
def _weights(folder: Path) -> list[bytes]:
    config = replaced(ModelConfig(), SMALL_MODEL)
    torch.manual_seed(0)
    state = build_mask_rcnn(config).state_dict()
    save_weights(folder / "ours.safetensors", state, config, Labels(["a", "b", "c"]))
    save_tensorpack(folder / "theirs.npz", state, config)
    few = {name: state[name] for name in list(state)[:3]}
    torch.save(few, folder / "few.pth")
    torch.save(few, folder / "old.pth", _use_new_zipfile_serialization=False)
    np.savez(folder / "few.npz", **{"conv0/W": np.zeros((7, 7, 3, 8), np.float32), "global_step": np.int64(3)})
    np.savez_compressed(folder / "packed.npz", **{"conv0/W": np.zeros((7, 7, 3, 8), np.float32)})
    arrays = {"stem.conv1.weight": np.zeros((8, 3, 7, 7), np.float32), "n": np.int64(3)}
    for protocol in (2, 5):
        (folder / f"zoo{protocol}.pkl").write_bytes(pickle.dumps({"model": arrays, "__author__": "a"}, protocol))
    names = ("ours.safetensors", "theirs.npz", "few.pth", "old.pth", "few.npz", "packed.npz", "zoo2.pkl", "zoo5.pkl")
    return [(folder / name).read_bytes() for name in names]


def _run_weights(case: bytes, folder: Path) -> None:
    path = folder / "weights"
    path.write_bytes(case)
    file = read_file(path)
    file_config(file)
    fit(file, replaced(ModelConfig(), SMALL_MODEL))


@st.composite
def _weights_cases(draw: st.DrawFn, folder: Path) -> bytes:
    """A changed file; in archives, the changes are in the directory at the end as often as in the headers in front."""
    samples = _weights(folder)
    data, rng = samples[draw(_INDEX) % len(samples)], _random(draw(_SEED))
    if draw(st.booleans()):
        at = rng.choice([max(0, len(data) - 600), 0, data.rfind(b"\x93NUMPY"), data.find(b"data.pkl")])
        return data[:at] + mutate(data[at:], rng) if at > 0 else mutate(data, rng)
    return mutate(data, rng)


# Configuration


@cache
def _configs() -> list[bytes]:
    texts = [dump(recipe("demo")), "recipe: demo\ntrain: {base_lr: 0.1}\n", "a: &a [1, *a]\n", "data:\n  train: [x]\n"]
    texts += ["launch: {on: ssh, hosts: [a, b=8]}\n", "? !!set {a}\n: <<\n", "TRAIN.BASE_LR: 0.1\nMODE_MASK: true\n"]
    return [text.encode() for text in texts]


def _run_yaml(case: bytes, folder: Path) -> None:
    path = folder / "run.yaml"
    path.write_bytes(case)
    text = case[:200].decode("utf-8", "replace")
    with suppress(MaskfleetError):
        parse_value(text, where="--set x")
    with suppress(MaskfleetError):
        resolve(sets=[text])
    resolve(file=path)


_YAML_TEXT = st.text("[]{}:-?!&*|>%@`'\"#,~<= \n\tab01.e_é", max_size=80).map(lambda text: text.encode())


# Handles


def _run_handle(case: bytes, folder: Path) -> None:
    text = os.fsdecode(case)
    with suppress(MaskfleetError):
        handle = parse_handle(text)
        assert parse_handle(str(handle)) == handle, "the handle does not read back"
        backend_of(handle)
    with suppress(MaskfleetError):
        parse_host(text, 1, where="--hosts")
    _, host, _ = address_parts(text)
    assert not set(host) & set("`$;|&<>()'\"\\ \n\t*?!#~{}")
    assert not host.startswith("-")


_HANDLES = [
    b"local:///runs/a",
    b"ssh://me@h1:22,h2/fleet/runs/a",
    b"eks://kube@ns/r50/log.txt",
    b"ssh://[fe80::1]:2/~/a",
]
_HANDLES += [b"me@[::1]:22", b"host=8", b"host slots=8", b"ssh://x%60id%60/a"]
_PART = st.sampled_from(
    ["ssh", "eks", "local", "://", "/", "@", ":", "[", "]", "%", "%60", "%00", ",", "-", "a", "1", "~"]
)
_HANDLE = st.lists(_PART | st.text(max_size=3), max_size=12).map(
    lambda parts: "".join(parts).encode("utf-8", "replace")
)


# HTTP requests


@cache
def _server(folder: Path) -> AppServer:
    """`maskfleet serve` with a small model of random weights, on a free port of loopback, until this process ends."""
    _weights(folder)
    detector = maskfleet.load(folder / "ours.safetensors", device="cpu")
    service = DetectionService(DetectionQueue(detector, batch_size=2), source="random", default_score=0.0)
    site = Site(detector, service, None, default_score=0.0)
    server = AppServer(App(site.routes, guard=own_pages_only()), "127.0.0.1", 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@st.composite
def _http_cases(draw: st.DrawFn) -> bytes:
    """A request with a changed body, whose length is true in most cases, or with changed lines before it."""
    rng = _random(draw(_SEED))
    kind = draw(st.sampled_from(["image/jpeg", "image/png", "application/json", "text/plain", ""]))
    body = draw(st.sampled_from(_images()))
    if kind == "application/json":
        encoded = base64.b64encode(body).decode()
        asked = {"image": encoded} | draw(st.just({}) | st.dictionaries(st.just("score"), _JSON))
        body = json.dumps(draw(st.sampled_from([asked, {"images": [encoded] * 2}, [encoded]]) | _JSON)).encode()
    body = mutate(body, rng) if draw(st.booleans()) else body
    method, path = draw(st.sampled_from(["POST", "GET", "PUT", "HEAD"])), draw(st.sampled_from(_PATHS))
    length = len(body) if draw(st.integers(0, 5)) else draw(st.sampled_from(NUMBERS))
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\r\n"
    return (mutate(head.encode(), rng) if draw(st.booleans()) else head.encode()) + body


def _run_http(case: bytes, folder: Path) -> None:
    with socket.create_connection(("127.0.0.1", _server(folder).server_port), timeout=HTTP_S) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):  # the server may answer before it has read everything
            connection.sendall(case)
            connection.shutdown(socket.SHUT_WR)
        answer = _read_all(connection)
    status = re.match(rb"HTTP/1\.1 ([0-9]{3}) ", answer)
    assert status or _is_cut_off(case, answer), f"the answer is {answer[:80]!r}"
    assert b"HTTP/1.1 500" not in answer, "the server failed"


def _read_all(connection: socket.socket) -> bytes:
    parts = []
    with suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def _is_cut_off(case: bytes, answer: bytes) -> bool:
    """Whether no status is due: the request ends too early, or it is one of HTTP/0.9, which has no status lines."""
    lines, _, body = case.partition(b"\r\n\r\n")
    lengths = re.findall(rb"(?mi)^content-length:[ \t]*([0-9]{1,18})[ \t]*\r?$", lines)
    is_old = len(lines.split(b"\n")[0].split()) < 3
    return is_old or (not answer and (not body or any(int(one) > len(body) for one in lengths)))


_PATHS = [
    "/detect",
    "/invocations",
    "/draw",
    "/model",
    "/images?start=1&count=9",
    "/image?id=1",
    "/ping",
    "/",
    "/a%00b",
]
_PATHS += ["/detect?score=0.5", "/detect?score=nan", "/../../etc/passwd", "//[", "http://[::1/detect", "/api", "/a%00b"]


def fuzzers(folder: Path) -> dict[str, Fuzzer]:
    """Every fuzzer by its name; `folder` is for sample files."""
    return {
        "coco": Fuzzer(_coco_cases(), _run_coco),
        "rle": Fuzzer(_RLE, _run_rle),
        "image": Fuzzer(mutated(_images), _run_image),
        "weights": Fuzzer(_weights_cases(folder), _run_weights),
        "yaml": Fuzzer(mutated(_configs) | _YAML_TEXT | _JSON.map(lambda v: json.dumps(v).encode()), _run_yaml),
        "handle": Fuzzer(mutated(partial(list, _HANDLES)) | _HANDLE, _run_handle),
        "http": Fuzzer(_http_cases(), _run_http),
    }
