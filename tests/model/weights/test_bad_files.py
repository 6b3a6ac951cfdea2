"""A weights file that is broken, unsafe or another network's is refused with its name and the cure."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from weight_samples import (
    random_state,
    slim_config,
    small_config,
    torchvision_state,
    write_backbone_npz,
    write_npz,
)

from maskfleet.config.model import ModelConfig
from maskfleet.errors import WeightsError
from maskfleet.model.build import build_mask_rcnn
from maskfleet.model.weights import fit, load_weights, read_file, save_weights
from maskfleet.model.weights.tensorpack import npz_arrays


def refusal(path: Path, config: ModelConfig | None = None, **options: Any) -> WeightsError:
    """The error with which a file is refused; it always names the file."""
    with pytest.raises(WeightsError) as caught:
        fit(read_file(path), config or small_config(), **options)
    assert str(path) in caught.value.what
    assert caught.value.remedy
    return caught.value


def test_a_missing_file(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "none.npz").what


def test_a_folder(tmp_path: Path) -> None:
    assert "is a folder" in refusal(tmp_path).what


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty.npz").touch()
    assert "is empty" in refusal(tmp_path / "empty.npz").what


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (b"<!DOCTYPE html><html>404</html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"\x89PNG\r\n\x1a\n" + bytes(50), "PNG"),
        (b"x", "starts with"),
    ],
)
def test_something_that_is_no_weights_file(content: bytes, hint: str, tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    path.write_bytes(content)
    error = refusal(path)
    assert "not a weights file" in error.what
    assert hint in error.what


def test_a_zip_of_other_things(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "photos.npz", "w") as archive:
        archive.writestr("photo.jpg", b"")
    assert "without arrays" in refusal(tmp_path / "photos.npz").what


def write_each_kind(folder: Path) -> list[Path]:
    config = small_config()
    state = random_state(config)
    save_weights(folder / "ours.safetensors", state, config)
    torch.save(state, folder / "zip.pth")
    torch.save(state, folder / "legacy.pth", _use_new_zipfile_serialization=False)
    write_npz(folder / "plain.npz", config)
    np.savez_compressed(folder / "packed.npz", **npz_arrays(state, config))  # type: ignore[arg-type]
    return sorted(folder.iterdir())


@pytest.mark.parametrize("share", [0.001, 0.3, 0.9, 0.999])
def test_a_truncated_file_of_any_kind(share: float, tmp_path: Path) -> None:
    for path in write_each_kind(tmp_path):
        whole = path.read_bytes()
        path.write_bytes(whole[: int(len(whole) * share)])
        assert "damaged" in refusal(path).what, path


def test_flipped_bytes_never_escape_as_another_error(tmp_path: Path) -> None:
    chance = random.Random(0)
    for path in write_each_kind(tmp_path):
        whole = path.read_bytes()
        for _ in range(20):
            broken = bytearray(whole)
            for _ in range(4):
                # The first bytes hold the structure, where damage does most.
                broken[chance.randrange(min(4000, len(broken)))] = chance.randrange(256)
            path.write_bytes(broken)
            # No error is fine: damage to a few numbers of a file without checksums shows nowhere.
            with contextlib.suppress(WeightsError):
                fit(read_file(path), small_config())


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.folder),))


def test_a_pickled_npz_is_refused_and_not_run(tmp_path: Path) -> None:
    np.savez(tmp_path / "evil.npz", **{"conv0/W": np.array([Evil(tmp_path / "ran")], dtype=object)})
    assert "pickled" in refusal(tmp_path / "evil.npz").what
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("as_zip", [True, False])
def test_a_pth_with_code_is_refused_and_not_run(as_zip: bool, tmp_path: Path) -> None:
    state = {"conv1.weight": torch.zeros(1), "evil": Evil(tmp_path / "ran")}
    torch.save(state, tmp_path / "evil.pth", _use_new_zipfile_serialization=as_zip)
    error = refusal(tmp_path / "evil.pth")
    assert "mkdir" in error.what
    assert "weights_only=False" not in str(error)
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_with_other_objects_says_which(tmp_path: Path) -> None:
    torch.save({"model": torchvision_state("resnet50"), "args": argparse.Namespace(lr=1)}, tmp_path / "checkpoint.pth")
    error = refusal(tmp_path / "checkpoint.pth")
    assert "argparse.Namespace" in error.what
    assert "state_dict()" in error.remedy


def test_a_pth_without_a_state_dict(tmp_path: Path) -> None:
    torch.save([torch.zeros(2)], tmp_path / "list.pth")
    assert "no state dict" in refusal(tmp_path / "list.pth").what


def test_another_networks_weights(tmp_path: Path) -> None:
    save_file({"encoder.weight": torch.zeros(2)}, tmp_path / "bert.safetensors")
    assert "encoder.weight" in refusal(tmp_path / "bert.safetensors").what


def test_a_wrong_source(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "model.npz", small_config())
    assert "names are TensorPack's" in refusal(path, source="torchvision").what


def test_a_newer_format_and_a_spoilt_configuration(tmp_path: Path) -> None:
    state = random_state(small_config())
    save_file(state, tmp_path / "new.safetensors", {"maskfleet": '{"format": 2}'})
    assert "format 2" in refusal(tmp_path / "new.safetensors").what
    for text in ("[]", "{", '{"format": 1}', '{"format": 1, "model": {"mask": 7}, "categories": []}'):
        save_file(state, tmp_path / "old.safetensors", {"maskfleet": text})
        assert "unreadable configuration" in refusal(tmp_path / "old.safetensors").what


@pytest.mark.parametrize(
    ("theirs", "ours", "looks_like", "cure"),
    [
        ("r101_fpn_mask", "fpn_mask", "R101 with 8 channels fpn Mask R-CNN", "model.backbone.blocks=[3,4,23,3]"),
        ("fpn_mask", "r101_fpn_mask", "R50 with 8 channels fpn Mask R-CNN", "model.backbone.blocks=[3,4,6,3]"),
        ("c4_mask", "fpn_mask", "R50 with 8 channels c4 Mask R-CNN", "model.architecture=c4"),
        ("fpn_mask", "c4_mask", "R50 with 8 channels fpn Mask R-CNN", "model.architecture=fpn"),
        ("r50_fpn_gn_mask", "fpn_mask", "GN, 4conv1fc_gn head", "model.backbone.norm=GN"),
        ("fpn_mask", "r50_fpn_nonorm_mask", "batch norm", "model.backbone.norm=FreezeBN"),
        ("fpn_cascade_mask", "fpn_mask", "cascade", "model.cascade=true"),
        ("fpn_joint", "fpn_mask", "R50 with 8 channels fpn Faster R-CNN", "model.mask=false"),
    ],
)
def test_weights_of_another_architecture_say_which(
    theirs: str, ours: str, looks_like: str, cure: str, tmp_path: Path
) -> None:
    path = write_npz(tmp_path / "other.npz", slim_config(theirs))
    error = refusal(path, slim_config(ours))
    assert error.what.index("looks like") < error.what.index(looks_like) < error.what.index("the model is")
    assert cure in error.remedy


def test_a_deeper_resnet_is_no_backbone_for_a_shallow_one(tmp_path: Path) -> None:
    path = write_backbone_npz(tmp_path / "deep.npz", small_config(backbone__blocks=(1, 2, 5, 1)))
    error = refusal(path, scope="backbone")
    assert "ResNet 1,2,5,1 with 8 channels backbone" in error.what
    assert "model.backbone.blocks=[1,2,5,1]" in error.remedy


def test_a_backbone_is_no_detector(tmp_path: Path) -> None:
    path = write_backbone_npz(tmp_path / "ImageNet.npz", small_config())
    assert f"model.backbone.weights={path}" in refusal(path).remedy


def test_the_second_version_of_torchvisions_detector(tmp_path: Path) -> None:
    torch.save(torchvision_state("maskrcnn_resnet50_fpn_v2"), tmp_path / "v2.pth")
    assert "_fpn_v2" in refusal(tmp_path / "v2.pth", ModelConfig(num_categories=80)).what
    report = fit(read_file(tmp_path / "v2.pth"), ModelConfig(num_categories=80), scope="backbone").report
    assert report.complete


def test_a_detector_with_a_part_missing(tmp_path: Path) -> None:
    arrays: dict[str, Any] = npz_arrays(random_state(small_config()), small_config())
    del arrays["rpn/box/b"]
    np.savez(tmp_path / "part.npz", **arrays)
    error = refusal(tmp_path / "part.npz")
    assert "1 tensors are missing (first rpn.box.bias)" in error.what
    assert "download or convert it again" in error.remedy


def test_two_tensors_for_one_place(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "double.npz", small_config(), {"fastrcnn/class/b": np.zeros(4, np.float32)})
    assert "fastrcnn/outputs/class/b and fastrcnn/class/b" in refusal(path).what


def test_another_number_of_classes_offers_to_keep_the_rest(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "three.npz", small_config())
    error = refusal(path, small_config(num_categories=5))
    assert "3 classes and the model has 5" in error.what
    assert "box_heads.0.class_logits.weight" in error.what
    assert "--reinit-heads" in error.remedy
    assert "model.num_categories=3" in error.remedy


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_name_their_tensor(value: float, tmp_path: Path) -> None:
    arrays: dict[str, Any] = npz_arrays(random_state(small_config()), small_config())
    arrays["rpn/box/W"] = arrays["rpn/box/W"].copy()
    arrays["rpn/box/W"][0, 0, 1, 1] = value
    np.savez(tmp_path / "diverged.npz", **arrays)
    assert "rpn/box/W has 1 of" in refusal(tmp_path / "diverged.npz").what


def test_doubles_beyond_float32_are_not_made_infinite(tmp_path: Path) -> None:
    state = {name: tensor.double() for name, tensor in random_state(small_config()).items()}
    state["rpn.conv.bias"][3] = 1e300
    torch.save(state, tmp_path / "double.pth")
    assert "rpn.conv.bias has 1 of" in refusal(tmp_path / "double.pth").what


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool])
def test_whole_numbers_are_no_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    state = random_state(small_config())
    state["rpn.conv.weight"] = state["rpn.conv.weight"].to(dtype)
    torch.save(state, tmp_path / "quantised.pth")
    assert "rpn.conv.weight has" in refusal(tmp_path / "quantised.pth").what


def test_text_in_an_npz_is_listed_as_ignored(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "text.npz", small_config(), {"comment": np.array("by hand")})
    assert "not numbers" in fit(read_file(path), small_config()).report.ignored["comment"]


def test_a_model_is_not_touched_by_a_file_that_is_refused(tmp_path: Path) -> None:
    arrays: dict[str, Any] = npz_arrays(random_state(small_config()), small_config())
    last = list(arrays)[-1]
    arrays[last] = np.full_like(arrays[last], np.nan)
    np.savez(tmp_path / "diverged.npz", **arrays)
    model = build_mask_rcnn(small_config())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(WeightsError, match="NaN"):
        load_weights(model, small_config(), tmp_path / "diverged.npz")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
