"""Weights on disk: what is inside a file, read without running any of it, and written all or nothing."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from pickle import UnpicklingError  # only the exception: see foreign/pickles.py for what is unpickled
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from maskfleet.config.base import replaced
from maskfleet.config.model import ModelConfig
from maskfleet.config.run import RunConfig
from maskfleet.errors import WeightsError
from maskfleet.model.weights.archives import check_npz, check_safetensors, check_zip
from maskfleet.model.weights.foreign import caffe2
from maskfleet.model.weights.foreign.pickles import TORCH_MAGIC, arrays_in, read_pickle
from maskfleet.model.weights.shapes import Scope, expected_shapes, scope_of
from maskfleet.model.weights.tensorpack import RowOrder, npz_arrays
from maskfleet.system.files import replacing

Container = Literal["npz", "pth", "pkl", "safetensors"]

FORMAT_VERSION = 1
_METADATA_KEY = "maskfleet"
_MAX_HEADER = 100_000_000  # bytes, safetensors' own limit
_KNOWN = "a TensorPack .npz, a torchvision .pth, a Detectron2 .pkl or a maskfleet .safetensors"
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")


DETECTION_FIELDS = ("data.test_short_edge_px", "eval.accurate_paste", "eval.show_score_threshold")
"""Fields outside of `model` that decide what is found in an image and which of it is drawn."""


@dataclass(frozen=True, slots=True)
class Labels:
    """What a detector's labels mean, and how it is used: what a weights file says beside the network."""

    names: Sequence[str] = ()  # by label, without background
    ids: Sequence[int] = ()  # category ids of the annotation file, by label
    settings: Mapping[str, Any] = field(default_factory=dict)  # values of DETECTION_FIELDS

    def of(self, num_categories: int | None) -> Labels:
        """These for a model of `num_categories`: names and ids only if there are as many."""
        names = self.names if len(self.names) == num_categories else ()
        return Labels(names, self.ids if len(self.ids) == num_categories else (), self.settings)

    def as_json(self, config: ModelConfig) -> str:
        """This and `config` as the JSON inside of a weights file."""
        for what, given in (("names", self.names), ("ids", self.ids)):
            if given and len(given) != config.num_categories:
                raise WeightsError(
                    f"{len(given)} category {what} were given for a model of {config.num_categories} classes",
                    remedy="give one per class, without background, in the order of the labels",
                )
        about: dict[str, Any] = {"format": FORMAT_VERSION, "model": config.model_dump(mode="json")}
        about |= {"categories": list(self.names), "category_ids": list(self.ids), "run": dict(self.settings)}
        return json.dumps(about)


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """What a file holds, still under its own names."""

    path: Path
    container: Container
    tensors: dict[str, Tensor]
    ignored: dict[str, str] = field(default_factory=dict)  # entry -> why it is no tensor of ours
    config: ModelConfig | None = None  # only files that maskfleet wrote know it
    labels: Labels = field(default_factory=Labels)
    author: str = ""  # who converted it, where a file says so


def labels_of(run: RunConfig, categories: Sequence[tuple[int, str]]) -> Labels:
    """The labels of a run with the ids and names of its `categories`."""
    settings = {name: attrgetter(name)(run) for name in DETECTION_FIELDS}
    return Labels([name for _, name in categories], [number for number, _ in categories], settings)


def read_file(path: Path) -> WeightsFile:
    """The tensors of any weights file we know, judged by its bytes and not by its name."""
    match _container(path):
        case "npz":
            return _read_npz(path)
        case "pth":
            return _read_pth(path)
        case "pkl":
            return _read_pkl(path)
        case "safetensors":
            return _read_safetensors(path)


def save_weights(path: Path, state: Mapping[str, Tensor], config: ModelConfig, labels: Labels | None = None) -> None:
    """Write our own format, with the configuration inside; the ResNet alone if the number of classes is unknown."""
    scope = _check_state(state, config)
    # One entry, because safetensors writes several in random order and equal weights would make unequal files.
    metadata = {_METADATA_KEY: (labels or Labels()).as_json(config)}
    tensors = {name: state[name].detach().cpu().contiguous() for name in expected_shapes(config, scope)}
    # As bytes, because safetensors' own writing makes files that nobody else may read.
    _replace_file(path, lambda out: out.write(safetensors_bytes(tensors, metadata)))


def save_tensorpack(
    path: Path,
    state: Mapping[str, Tensor],
    config: ModelConfig,
    labels: Labels | None = None,
    *,
    rows: RowOrder = "tensorpack",
) -> None:
    """Write TensorPack's .npz; `rows` is the order of the first fully connected layer's rows.

    With `labels`, one more array holds them and the configuration as JSON.
    TensorPack should skip a name it does not know; that was not tried.
    """
    arrays: dict[str, Any] = npz_arrays(state, config, scope=_check_state(state, config), rows=rows)
    if labels is not None:
        arrays[_METADATA_KEY] = np.array(labels.as_json(config))
    _replace_file(path, lambda out: np.savez(out, **arrays))


def check_suffix(path: Path) -> None:
    """An error if no weights can be written to a file of this name."""
    if path.suffix not in (".safetensors", ".npz"):
        raise WeightsError(
            f"{path} does not say by its suffix in which format to write",
            remedy="end it in .safetensors (ours, with the configuration inside) or .npz (TensorPack)",
        )


def _check_state(state: Mapping[str, Tensor], config: ModelConfig) -> Scope:
    """What `config` says the state dict is: everything, or a backbone; an error if it is not that."""
    scope = scope_of(config)
    expected = expected_shapes(config, scope)
    wrong = [name for name, shape in expected.items() if name not in state or tuple(state[name].shape) != shape]
    if wrong:
        raise WeightsError(
            f"{len(wrong)} of {len(expected)} tensors are absent or of another shape than the configuration says, "
            f"first {wrong[0]}",
            remedy="save the state dict together with the configuration that its model was built from",
        )
    return scope


def _replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace `path` by what `write` writes."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as out:
            write(out)
    except OSError as error:
        raise WeightsError(
            f"{path} cannot be written: {error}", remedy="check the folder, its permissions and the free space"
        ) from error


def _container(path: Path) -> Container:
    if path.is_dir():
        raise WeightsError(f"{path} is a folder, not a weights file", remedy=f"name the file in it: {_KNOWN}")
    if not path.is_file():
        raise WeightsError(f"{path} does not exist", remedy="check the path, or download the file first")
    with path.open("rb") as opened:
        head = opened.read(64)
    if not head:
        raise WeightsError(f"{path} is empty", remedy="download or copy it again")
    # First, because the length of its header may look like the start of any other format.
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= _MAX_HEADER:
        return "safetensors"
    if head.startswith(b"PK"):
        return _zip_container(path)
    if head[:1] == b"\x80":
        return "pth" if TORCH_MAGIC in head else "pkl"
    looks_like = "it is an ONNX model, which other programs run" if path.suffix == ".onnx" else _first_bytes(head)
    raise WeightsError(f"{path} is not a weights file: {looks_like}", remedy=f"give {_KNOWN}")


def _first_bytes(head: bytes) -> str:
    text = head.lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "it is a web page, perhaps the error page of a download"
    if text.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer; `git lfs pull` fetches the file it stands for"
    return f"it starts with {head[:8]!r}"


def _zip_container(path: Path) -> Container:
    with _readable(path):
        check_zip(path)
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    if any(name.endswith("data.pkl") for name in names):
        return "pth"
    if any(name.endswith(".npy") for name in names):
        return "npz"
    raise WeightsError(f"{path} is a zip archive without arrays in it", remedy=f"give {_KNOWN}")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what a cut or damaged file makes the readers raise into one error that names it."""
    try:
        yield
    except WeightsError:
        raise
    except Exception as error:  # a flipped bit makes zip, numpy and torch raise nearly anything
        raise _damaged(path, _first_line(error)) from error


def _damaged(path: Path, reason: str) -> WeightsError:
    return WeightsError(
        f"{path} is cut short or damaged: {reason}",
        remedy="download or copy it again, and compare the size with the original",
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _read_npz(path: Path) -> WeightsFile:
    tensors, ignored, about = {}, {}, None
    with _readable(path):
        check_npz(path)
    with _readable(path), np.load(path, allow_pickle=False) as arrays:
        for name in arrays.files:
            array = arrays[name]
            if name == _METADATA_KEY and array.dtype.kind == "U" and array.ndim == 0:
                about = str(array)
            elif array.dtype.kind in "fiub":
                # Torch takes no byte order but the machine's.
                tensors[name] = torch.from_numpy(np.asarray(array, dtype=array.dtype.newbyteorder("=")))
            else:
                ignored[name] = f"not numbers but {array.dtype}"
    if about is None:
        return WeightsFile(path, "npz", tensors, ignored)
    config, labels = _parsed(path, about)
    return WeightsFile(path, "npz", tensors, ignored, config=config, labels=labels)


def _read_pth(path: Path) -> WeightsFile:
    with _readable(path):
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        except UnpicklingError as error:
            raise _refused_pickle(path, error) from error
    ignored: dict[str, str] = {}
    if isinstance(loaded, Mapping):
        for wrapper in ("model", "state_dict"):
            if isinstance(loaded.get(wrapper), Mapping):
                ignored = {
                    str(name): f"stands beside {wrapper!r} in a checkpoint" for name in loaded if name != wrapper
                }
                loaded = loaded[wrapper]
                break
    if not isinstance(loaded, Mapping) or not any(isinstance(value, Tensor) for value in loaded.values()):
        raise WeightsError(
            f"{path} holds no state dict (names and tensors)", remedy="torch.save(model.state_dict(), path)"
        )
    tensors = {}
    for name, value in loaded.items():
        if not isinstance(value, Tensor):
            ignored[str(name)] = f"not a tensor but {type(value).__name__}"
        elif value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
            ignored[str(name)] = "not a plain tensor"
        elif value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise _damaged(path, f"{name} announces {list(value.shape)}, more numbers than the file has")
        else:
            tensors[str(name).removeprefix("module.")] = value.detach()
    return WeightsFile(path, "pth", tensors, ignored)


def _read_pkl(path: Path) -> WeightsFile:
    with _readable(path):
        loaded = read_pickle(path)
        found = loaded.get("model", loaded) if isinstance(loaded, dict) else None
        if isinstance(found, dict) and isinstance(found.get("blobs"), dict):
            found = found["blobs"]
            if not caffe2.is_resnet(arrays_in(found)):
                raise WeightsError(
                    f"{path} is from Detectron, which used Caffe2",
                    remedy="take the same model from Detectron2's model zoo",
                )
        arrays = arrays_in(found) if isinstance(found, dict) else {}
        if not arrays or not isinstance(loaded, dict):
            raise WeightsError(f"{path} holds no arrays by name", remedy=f"give {_KNOWN}")
        # Torch takes no byte order but the machine's, and no read-only memory. An array of many names is copied once.
        distinct = {id(array): array for array in arrays.values()}
        copied = {
            number: torch.from_numpy(array.astype(array.dtype.newbyteorder("="))) for number, array in distinct.items()
        }
        tensors = {name: copied[id(array)] for name, array in arrays.items()}
    author = loaded.get("__author__")
    ignored = {str(name): "not an array" for name in found or () if str(name) not in tensors}
    if found is not loaded:
        ignored |= {str(name): "stands beside the arrays in a pickle" for name in loaded if loaded[name] is not found}
    if caffe2.is_resnet(tensors):
        tensors, left_out = caffe2.as_detectron2(tensors)
        return WeightsFile(path, "pkl", tensors, ignored | left_out, author=caffe2.AUTHOR)
    return WeightsFile(path, "pkl", tensors, ignored, author=author if isinstance(author, str) else "")


def _refused_pickle(path: Path, error: UnpicklingError) -> WeightsError:
    asked_for = _GLOBAL.search(str(error))
    if asked_for is None:
        return _damaged(path, "its pickle cannot be read")  # torch's own words advise unsafe loading
    return WeightsError(
        f"{path} holds more than tensors: it asks for {asked_for[1]}, and opening it could run code",
        remedy="where you trust it, save only its numbers: torch.save(model.state_dict(), path)",
    )


def _read_safetensors(path: Path) -> WeightsFile:
    with _readable(path):
        check_safetensors(path)
    with _readable(path), safe_open(path, framework="pt") as opened:
        metadata = opened.metadata() or {}
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  not a mapping
    if _METADATA_KEY not in metadata:
        return WeightsFile(path, "safetensors", tensors)
    config, labels = _parsed(path, metadata[_METADATA_KEY])
    return WeightsFile(path, "safetensors", tensors, config=config, labels=labels)


def _parsed(path: Path, text: str) -> tuple[ModelConfig, Labels]:
    """What `Labels.as_json` wrote; files of before have no ids and no settings."""
    try:
        about = json.loads(text)
        version = about["format"]
        if version != FORMAT_VERSION:
            raise WeightsError(
                f"{path} is in format {version}, and this maskfleet reads format {FORMAT_VERSION}",
                remedy="use the maskfleet that wrote it, or a newer one",
            )
        settings = {name: value for name, value in about.get("run", {}).items() if name in DETECTION_FIELDS}
        replaced(RunConfig(), settings)  # an error here rather than when the file is used
        names, ids = tuple(map(str, about["categories"])), tuple(map(int, about.get("category_ids", ())))
        return ModelConfig.model_validate(about["model"]), Labels(names, ids, settings)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise WeightsError(
            f"{path} has an unreadable configuration inside: {_first_line(error)}",
            remedy="convert it again from the original weights",
        ) from error
