"""`maskfleet weights inspect` and `convert`, as a user types them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner
from weight_samples import random_state, small_config, torchvision_state, write_backbone_npz, write_npz

from maskfleet.cli.weights import app
from maskfleet.errors import ConfigError, MaskfleetError, WeightsError
from maskfleet.model.weights import Labels, class_layers, expected_shapes, fit, read_file, save_weights


def weights(*arguments: str | Path) -> str:
    """What the command prints; its error is raised as it would reach `main`."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, MaskfleetError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from maskfleet.cli.weights import app;"
        "result = CliRunner().invoke(app, ['convert', '--help']);"
        "assert result.exit_code == 0 and '--reinit-heads' in result.output, result.output;"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    # A wide terminal and no colours, so that no option's name is cut.
    plain = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=plain)
    assert done.returncode == 0, done.stderr


def test_inspect_prints_the_network_and_that_it_is_complete(tmp_path: Path) -> None:
    config = small_config(cascade=True, backbone__norm="GN")
    text = weights("inspect", write_npz(tmp_path / "model.npz", config, {"global_step": np.int64(3)}))
    lines = {line.split("  ")[0]: line.split("  ")[-1].strip() for line in text.splitlines() if line}
    assert lines["kind"] == "TensorPack npz"
    assert lines["network"] == "ResNet 1,2,1,1 with 8 channels fpn Mask R-CNN, cascade, GN, 3 classes"
    assert (lines["cascade"], lines["mask"], lines["norm"], lines["classes"]) == ("True", "True", "GN", "3")
    tensors = len(expected_shapes(config))
    assert lines["tensors"] == str(tensors + 1)
    assert f"matched       {tensors:>5}" in text
    assert "missing           0" in text
    assert "global_step: state of the training" in text


def test_inspect_json_holds_the_configuration_and_the_report(tmp_path: Path) -> None:
    config = small_config()
    save_weights(tmp_path / "ours.safetensors", random_state(config), config, Labels(["cat", "dog", "bird"]))
    found = json.loads(weights("inspect", tmp_path / "ours.safetensors", "--json"))
    assert found["config"] == config.model_dump(mode="json")
    assert found["categories"] == ["cat", "dog", "bird"]
    assert sorted(found["report"]["matched"]) == sorted(expected_shapes(config))
    assert found["parameters"] == sum(tensor.numel() for tensor in random_state(config).values())


def test_inspect_knows_a_backbone(tmp_path: Path) -> None:
    found = json.loads(weights("inspect", write_backbone_npz(tmp_path / "ImageNet.npz", small_config()), "--json"))
    assert found["network"] == "ResNet 1,2,1,1 with 8 channels backbone, batch norm"
    assert "classes" not in found
    assert found["report"]["ignored"] == {"linear/W": "the ImageNet classifier", "linear/b": "the ImageNet classifier"}


def test_inspect_lists_every_name_on_request(tmp_path: Path) -> None:
    extra = {f"extra/{number}": np.zeros(1, np.float32) for number in range(20)}
    path = write_npz(tmp_path / "model.npz", small_config(), extra)
    assert "… and 12 more" in weights("inspect", path)
    assert "extra/19" not in weights("inspect", path)
    assert "extra/19" in weights("inspect", path, "--all")


def test_inspect_of_a_network_we_cannot_build_still_says_what_it_can(tmp_path: Path) -> None:
    state = {"conv1.weight": torch.zeros(64, 3, 7, 7), "layer1.0.conv1.weight": torch.zeros(64, 64, 3, 3)}
    torch.save(state, tmp_path / "resnet18.pth")
    assert "none that maskfleet can build" in weights("inspect", tmp_path / "resnet18.pth")


def test_convert_there_and_back_is_the_same_file_of_numbers(tmp_path: Path) -> None:
    there = write_npz(tmp_path / "there.npz", small_config())
    text = weights("convert", there, tmp_path / "ours.safetensors")
    assert "fpn Mask R-CNN, batch norm, 3 classes" in text
    weights("convert", tmp_path / "ours.safetensors", tmp_path / "back.npz")
    with np.load(there) as first, np.load(tmp_path / "back.npz") as second:
        assert sorted(first.files) == sorted(second.files)
        assert all(first[name].tobytes() == second[name].tobytes() for name in first.files)


def test_convert_of_torchvisions_resnet_gives_a_backbone_of_either_kind(tmp_path: Path) -> None:
    torch.save(torchvision_state("resnet50"), tmp_path / "resnet50.pth")
    weights("convert", tmp_path / "resnet50.pth", tmp_path / "backbone.safetensors")
    weights("convert", tmp_path / "resnet50.pth", tmp_path / "backbone.npz")
    config = read_file(tmp_path / "backbone.safetensors").config
    assert config is not None
    assert config.num_categories is None
    with np.load(tmp_path / "backbone.npz") as arrays:
        kernel = torchvision_state("resnet50")["conv1.weight"].numpy()  # [out, RGB, row, column]
        assert np.array_equal(arrays["conv0/W"], kernel[:, ::-1].transpose(2, 3, 1, 0))
        assert len(arrays.files) == 5 * 53


def test_convert_to_another_number_of_classes(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "three.npz", small_config())
    with pytest.raises(WeightsError, match="--reinit-heads"):
        weights("convert", path, tmp_path / "five.safetensors", "--num-classes", "5")
    assert not (tmp_path / "five.safetensors").exists()
    text = weights("convert", path, tmp_path / "five.safetensors", "--num-classes", "5", "--reinit-heads")
    assert "other shape       6" in text
    file = read_file(tmp_path / "five.safetensors")
    config = small_config(num_categories=5)
    assert file.config is not None
    assert file.config.num_categories == 5
    original = random_state(small_config())
    for name, tensor in file.tensors.items():
        if name in class_layers(config):
            # TensorPack starts these layers at a deviation of 0.01 or 0.001, and biases at 0.
            assert tensor.abs().max() < 0.06
            assert name.endswith("weight") == bool(tensor.any())
        else:
            assert torch.equal(tensor, original[name])
    weights("convert", path, tmp_path / "again.safetensors", "--num-classes", "5", "--reinit-heads")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "five.safetensors").read_bytes()


def test_convert_from_aws_reorders_rows_and_remembers_the_differences(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "aws.npz", small_config(), rows="aws")
    weights("convert", path, tmp_path / "ours.safetensors", "--from", "aws")
    file = read_file(tmp_path / "ours.safetensors")
    assert file.config is not None
    assert (file.config.roi_align, file.config.box_head.box_loss) == ("aws", "huber")
    original = random_state(small_config())
    assert all(torch.equal(tensor, original[name]) for name, tensor in file.tensors.items())


def test_an_npz_from_aws_remembers_the_differences_too(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "aws.npz", small_config(), rows="aws")
    weights("convert", path, tmp_path / "ours.npz", "--from", "aws")
    file = read_file(tmp_path / "ours.npz")
    assert file.config is not None
    assert (file.config.roi_align, file.config.box_head.box_loss) == ("aws", "huber")
    original = random_state(small_config())
    assert all(torch.equal(tensor, original[name]) for name, tensor in fit(file, file.config).tensors.items())


def test_convert_of_a_2018_file_advises_and_obeys(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "COCO-R50FPN-MaskRCNN-Standard.npz", small_config())
    assert "--legacy-2018" in weights("convert", path, tmp_path / "new.safetensors")
    assert "--legacy-2018" not in weights("convert", path, tmp_path / "old.safetensors", "--legacy-2018")
    old = read_file(tmp_path / "old.safetensors").config
    assert old is not None
    assert (old.rpn.legacy_anchors, old.box_head.box_loss) == (True, "huber")


def test_convert_takes_settings_that_weights_do_not_show(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "model.npz", small_config(backbone__stem_channels=16))
    weights("convert", path, tmp_path / "a.safetensors", "--set", "model.backbone.norm=SyncBN", "-s", "MODE_MASK=False")
    config = read_file(tmp_path / "a.safetensors").config
    assert config is not None
    assert (config.backbone.norm, config.mask, config.backbone.stem_channels) == ("SyncBN", False, 16)
    assert not any(name.startswith("mask_head") for name in read_file(tmp_path / "a.safetensors").tensors)
    with pytest.raises(ConfigError, match=r"model\.nonsense"):
        weights("convert", path, tmp_path / "b.safetensors", "--set", "model.nonsense=1")


def test_convert_with_a_recipe_checks_the_file_against_it(tmp_path: Path) -> None:
    torch.save(torchvision_state("maskrcnn_resnet50_fpn"), tmp_path / "tv.pth")
    weights("convert", tmp_path / "tv.pth", tmp_path / "tv.safetensors", "--recipe", "r50_fpn_1x")
    file = read_file(tmp_path / "tv.safetensors")
    assert file.config is not None
    assert file.config.num_categories == 80
    assert fit(file, file.config).report.complete
    with pytest.raises(WeightsError, match="looks like R50 fpn Mask R-CNN"):
        weights("convert", tmp_path / "tv.pth", tmp_path / "b.safetensors", "--recipe", "r50_c4_1x")


def test_convert_needs_a_suffix_it_knows_before_it_reads(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="suffix"):
        weights("convert", tmp_path / "not there.npz", tmp_path / "out.pth")
    with pytest.raises(WeightsError, match="does not exist"):
        weights("convert", tmp_path / "not there.npz", tmp_path / "out.npz")


def test_convert_keeps_category_names_while_their_number_is_right(tmp_path: Path) -> None:
    config = small_config()
    save_weights(tmp_path / "a.safetensors", random_state(config), config, Labels(["cat", "dog", "bird"]))
    weights("convert", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert read_file(tmp_path / "b.safetensors").labels.names == ("cat", "dog", "bird")
    weights("convert", tmp_path / "a.safetensors", tmp_path / "c.safetensors", "--num-classes", "9", "--reinit-heads")
    assert read_file(tmp_path / "c.safetensors").labels.names == ()
