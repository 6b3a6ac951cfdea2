"""Weights keep every bit on their way between TensorPack, torchvision and us, and nothing is skipped silently."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from weight_samples import (
    VARIANTS,
    config_of,
    name_table,
    random_bits,
    random_state,
    small_config,
    write_backbone_npz,
    write_npz,
)

from maskfleet.config.base import replaced
from maskfleet.config.model import ModelConfig
from maskfleet.errors import ConfigError, WeightsError
from maskfleet.model.build import build_mask_rcnn
from maskfleet.model.weights import (
    Labels,
    class_layers,
    dialect_of,
    expected_shapes,
    file_config,
    fit,
    guess_config,
    load_weights,
    read_file,
    save_tensorpack,
    save_weights,
)
from maskfleet.model.weights.tensorpack import our_name, our_shape, rows_from_aws, rows_to_aws, tensorpack_name

SMALL_VARIANTS = {
    name: small_config(**{path.replace(".", "__"): value for path, value in changes.items() if "blocks" not in path})
    for name, changes in VARIANTS.items()
}


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint32)


@pytest.mark.parametrize("variant", VARIANTS)
def test_names_and_shapes_are_those_of_tensorpacks_graph(variant: str) -> None:
    config = config_of(variant)
    table = name_table(variant)
    assert sorted(tensorpack_name(name, config) for name in expected_shapes(config)) == sorted(table)
    theirs = {our_name(name): our_shape(tuple(shape)) for name, shape in table.items()}
    ours = {name.replace("box_heads.0.group3", "backbone.group3"): s for name, s in expected_shapes(config).items()}
    assert theirs == ours


@pytest.mark.parametrize("variant", VARIANTS)
def test_npz_to_ours_to_npz_is_equal_to_the_last_bit(variant: str, tmp_path: Path) -> None:
    config = config_of(variant)
    rng = np.random.default_rng(0)
    arrays = {name: random_bits(rng, shape) for name, shape in name_table(variant).items()}
    there, back = tmp_path / "there.npz", tmp_path / "back.npz"
    np.savez(there, **arrays)
    fitted = fit(read_file(there), config)
    assert fitted.report.complete
    assert not fitted.report.unexpected
    save_tensorpack(back, fitted.tensors, config)
    with np.load(back, allow_pickle=False) as again:
        assert sorted(again.files) == sorted(arrays)
        for name, array in arrays.items():
            assert np.array_equal(bits(again[name]), bits(array)), name
    # pytest keeps folders of several runs, and these files are hundreds of megabytes.
    there.unlink()
    back.unlink()


def test_layouts_by_hand(tmp_path: Path) -> None:
    config = small_config()
    path = write_npz(tmp_path / "small.npz", config)
    state = fit(read_file(path), config).tensors
    with np.load(path) as arrays:
        kernel = arrays["group1/block0/conv2/W"]  # [row, column, in, out]
        assert state["backbone.group1.0.conv2.weight"][5, 3, 0, 2] == kernel[0, 2, 3, 5]
        matrix = arrays["fastrcnn/fc7/W"]  # [in, out]
        assert state["box_heads.0.fc7.weight"][4, 7] == matrix[7, 4]
        deconv = arrays["maskrcnn/deconv/W"]  # [row, column, out, in]
        assert state["mask_head.deconv.weight"][6, 9, 1, 0] == deconv[1, 0, 9, 6]
        assert state["backbone.stem.norm.running_var"][3] == arrays["conv0/bn/variance/EMA"][3]


@pytest.mark.parametrize("variant", SMALL_VARIANTS)
def test_our_safetensors_keep_every_bit_the_configuration_and_the_categories(variant: str, tmp_path: Path) -> None:
    config = replaced(SMALL_VARIANTS[variant], {"max_size_px": 640})
    rng = np.random.default_rng(1)
    state = {name: torch.from_numpy(random_bits(rng, shape)) for name, shape in expected_shapes(config).items()}
    path = tmp_path / "model.safetensors"
    save_weights(path, state, config, Labels(["cat", "dog", "naïve “bird”"]))
    file = read_file(path)
    assert file.config == config
    assert file.labels.names == ("cat", "dog", "naïve “bird”")
    again = fit(file, config).tensors
    assert again.keys() == state.keys()
    assert all(np.array_equal(bits(again[name].numpy()), bits(state[name].numpy())) for name in state)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_failed_save_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config()
    path = tmp_path / "model.npz"
    path.write_bytes(b"old")

    def disk_full(out: object, **arrays: object) -> None:
        out.write(b"half")  # type: ignore[attr-defined]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", disk_full)
    with pytest.raises(WeightsError, match="No space left"):
        save_tensorpack(path, random_state(config), config)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_who_has_the_old_file_open_keeps_reading_it(tmp_path: Path) -> None:
    config = small_config()
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"old")
    with path.open("rb") as reader:
        save_weights(path, random_state(config), config)
        assert reader.read() == b"old"
    assert fit(read_file(path), config).report.complete


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such permissions")
def test_others_may_read_what_is_saved_as_far_as_the_user_lets_them(tmp_path: Path) -> None:
    config = small_config()
    before = os.umask(0o027)
    try:
        save_weights(tmp_path / "a.safetensors", random_state(config), config)
        save_tensorpack(tmp_path / "a.npz", random_state(config), config)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}


def test_a_state_dict_that_is_not_the_configurations_is_not_saved(tmp_path: Path) -> None:
    state = random_state(small_config())
    with pytest.raises(WeightsError, match="first mask_head"):
        save_weights(tmp_path / "x.safetensors", state, small_config(mask_head__channels=8))
    with pytest.raises(WeightsError, match="2 category names"):
        save_weights(tmp_path / "x.safetensors", state, small_config(), Labels(["a", "b"]))


def test_shapes_need_the_number_of_classes() -> None:
    with pytest.raises(ConfigError, match="num_categories"):
        expected_shapes(ModelConfig())
    assert "backbone.stem.conv.weight" in expected_shapes(ModelConfig(), "backbone")


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_network_is_guessed_from_tensorpacks_names(variant: str) -> None:
    shapes = {f"{name}:0": tuple(shape) for name, shape in name_table(variant).items()}
    expected = replaced(
        config_of(variant), {"backbone.norm": config_of(variant).backbone.norm.replace("Sync", "Freeze")}
    )
    assert guess_config(shapes) == expected


@pytest.mark.parametrize("variant", SMALL_VARIANTS)
def test_the_network_is_guessed_from_our_names_at_any_width(variant: str) -> None:
    config = SMALL_VARIANTS[variant]
    found = guess_config(expected_shapes(config))
    assert found is not None
    assert expected_shapes(found) == expected_shapes(config)


def test_no_network_is_guessed_where_there_is_none() -> None:
    assert guess_config({"encoder.weight": (3, 4)}) is None
    assert dialect_of(["encoder.weight"]) is None
    basic_block = {"conv1.weight": (64, 3, 7, 7), "layer1.0.conv1.weight": (64, 64, 3, 3)}
    assert guess_config(basic_block | {"layer1.0.conv2.weight": (64, 64, 3, 3)}) is None
    config = small_config()
    wide = {tensorpack_name(name, config): shape for name, shape in expected_shapes(config).items()}
    wide["rpn/class/W"] = (1, 1, 16, 9)
    assert guess_config(wide) is None


def test_training_leftovers_are_ignored_by_name_and_all_are_listed(tmp_path: Path) -> None:
    config = small_config()
    one = np.float32(1)
    extra = {
        "global_step:0": np.int64(5),
        "learning_rate:0": one,
        "conv0/W/Momentum:0": one,
        "AccumGrad/conv0/W": one,
        "rpn/class/W/AccumGrad": one,
        "EMA/total_cost": one,
        "EMA/rpn/class/W": one,
        "surprise": one,
    }
    path = write_npz(tmp_path / "checkpoint.npz", config, extra)
    report = fit(read_file(path), config).report
    assert set(report.ignored) == set(extra) - {"surprise"}
    assert report.unexpected == ("surprise",)
    assert report.complete
    text = report.render()
    assert "surprise" in text
    assert "state of the optimiser" in text
    assert f"matched       {len(expected_shapes(config)):>5}" in text


def test_tensorflows_output_numbers_do_not_matter(tmp_path: Path) -> None:
    config = small_config()
    with np.load(write_npz(tmp_path / "plain.npz", config)) as arrays:
        np.savez(tmp_path / "numbered.npz", **{f"{name}:0": arrays[name] for name in arrays.files})
    plain, numbered = (fit(read_file(tmp_path / f"{name}.npz"), config) for name in ("plain", "numbered"))
    assert all(torch.equal(plain.tensors[name], numbered.tensors[name]) for name in expected_shapes(config))


def test_rows_of_aws_samples_are_y_x_channel() -> None:
    channels, out = 2, 3
    ours = torch.arange(out * channels * 49).reshape(out, channels * 49)
    theirs = rows_to_aws(ours)
    for o, c, y, x in itertools.product(range(out), range(channels), range(7), range(7)):
        assert theirs[o, (y * 7 + x) * channels + c] == ours[o, c * 49 + y * 7 + x]
    assert torch.equal(rows_from_aws(theirs), ours)


def test_an_aws_file_is_read_as_such_only_when_it_is_said_to_be_one(tmp_path: Path) -> None:
    config = small_config()
    path = write_npz(tmp_path / "aws.npz", config, rows="aws")
    fc6 = "box_heads.0.fc6.weight"
    original = random_state(config)
    said, unsaid = fit(read_file(path), config, source="aws"), fit(read_file(path), config)
    assert torch.equal(said.tensors[fc6], original[fc6])
    assert not torch.equal(unsaid.tensors[fc6], original[fc6])
    assert all(torch.equal(said.tensors[name], original[name]) for name in original)
    assert any("--from aws" in note for note in unsaid.report.notes)
    assert file_config(read_file(path), source="aws").roi_align == "aws"  # type: ignore[union-attr]


def test_weights_of_2018_bring_advice_until_the_anchors_are_right(tmp_path: Path) -> None:
    config = small_config()
    path = write_npz(tmp_path / "COCO-R50FPN-MaskRCNN-Standard.npz", config)
    assert any("legacy_anchors=true" in note for note in fit(read_file(path), config).report.notes)
    legacy = file_config(read_file(path), legacy_2018=True)
    assert legacy is not None
    assert (legacy.rpn.legacy_anchors, legacy.box_head.box_loss) == (True, "huber")
    assert not any("legacy_anchors" in note for note in fit(read_file(path), legacy).report.notes)


@pytest.mark.parametrize("architecture", ["fpn", "c4"])
def test_an_imagenet_file_fills_the_backbone_and_leaves_the_rest(architecture: str, tmp_path: Path) -> None:
    path = write_backbone_npz(tmp_path / "ImageNet-R50-AlignPadding.npz", small_config())
    config = small_config(architecture=architecture)
    model = build_mask_rcnn(config)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = load_weights(model, config, path, scope="backbone")
    expected = random_state(small_config(), "backbone")
    for name, tensor in model.state_dict().items():
        source = expected.get(name.replace("box_heads.0.group3", "backbone.group3"))
        assert torch.equal(tensor, before[name] if source is None else source), name
    assert set(report.ignored) == {"linear/W", "linear/b"}
    assert report.complete
    assert any(name.startswith("box_heads.0.group3") for name in report.matched) == (architecture == "c4")


def test_a_whole_detector_lends_its_backbone(tmp_path: Path) -> None:
    config = small_config(num_categories=7)
    path = write_npz(tmp_path / "cascade.npz", small_config(cascade=True))
    report = fit(read_file(path), config, scope="backbone").report
    assert report.complete
    assert report.ignored["rpn/class/W"] == "only the backbone is loaded"
    assert not report.unexpected


def test_a_backbone_may_come_from_our_own_file_of_the_other_architecture(tmp_path: Path) -> None:
    c4, fpn = small_config(architecture="c4"), small_config()
    save_weights(tmp_path / "c4.safetensors", random_state(c4), c4)
    tensors = fit(read_file(tmp_path / "c4.safetensors"), fpn, scope="backbone").tensors
    assert torch.equal(tensors["backbone.group3.0.conv1.weight"], random_state(c4)["box_heads.0.group3.0.conv1.weight"])


def test_a_mask_head_too_many_is_left_out_and_named(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "mask.npz", small_config())
    report = fit(read_file(path), small_config(mask=False)).report
    assert report.complete
    assert report.ignored["maskrcnn/conv/W"] == "the model has no mask head"


def test_pixels_scaled_otherwise_bring_a_note(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "model.npz", small_config())
    assert not any("pixel" in note for note in fit(read_file(path), small_config()).report.notes)
    caffe = small_config(pixel_std_rgb=(1.0, 1.0, 1.0))
    assert any("pixel_std_rgb=[58.395, 57.12, 57.375]" in note for note in fit(read_file(path), caffe).report.notes)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_floats_become_float32_and_are_reported(dtype: torch.dtype, tmp_path: Path) -> None:
    config = small_config()
    state = {name: tensor.to(dtype) for name, tensor in random_state(config).items()}
    torch.save(state, tmp_path / "model.pth")
    fitted = fit(read_file(tmp_path / "model.pth"), config)
    assert set(fitted.report.converted) == set(state)
    assert all(torch.equal(fitted.tensors[name], state[name].float()) for name in state)
    assert f"stored as {str(dtype).removeprefix('torch.')}" in fitted.report.render()


def test_big_endian_files_are_read(tmp_path: Path) -> None:
    config = small_config()
    with np.load(write_npz(tmp_path / "little.npz", config)) as arrays:
        np.savez(tmp_path / "big.npz", **{name: arrays[name].astype(">f4") for name in arrays.files})
    tensors = fit(read_file(tmp_path / "big.npz"), config).tensors
    assert all(torch.equal(tensors[name], tensor) for name, tensor in random_state(config).items())


@pytest.mark.parametrize("variant", SMALL_VARIANTS)
def test_the_model_has_just_the_expected_tensors(variant: str) -> None:
    config = replaced(
        SMALL_VARIANTS[variant], {"backbone.stem_channels": 32, "fpn.channels": 32, "mask_head.channels": 64}
    )
    assert {name: tuple(t.shape) for name, t in build_mask_rcnn(config).state_dict().items()} == expected_shapes(config)


def test_the_whole_r50_model_has_just_the_expected_tensors() -> None:
    config = config_of("fpn_mask")
    with torch.device("meta"):
        model = build_mask_rcnn(config)
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == expected_shapes(config)


def test_a_detector_fills_a_model_of_other_classes_but_for_the_layers_that_count_them(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "three.npz", small_config())
    config = small_config(num_categories=5)
    model = build_mask_rcnn(config)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = load_weights(model, config, path, on_class_mismatch="reinit")
    layers = {"box_heads.0.class_logits", "box_heads.0.box_deltas", "mask_head.logits"}
    assert set(report.other_shape) == {f"{layer}.{part}" for layer in layers for part in ("weight", "bias")}
    assert set(report.other_shape) == class_layers(config)
    original = random_state(small_config())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name] if name in class_layers(config) else original[name]), name


def test_a_cascade_keeps_its_box_layers_whatever_the_classes(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "cascade.npz", small_config(cascade=True))
    config = small_config(cascade=True, num_categories=5)
    report = fit(read_file(path), config, on_class_mismatch="reinit").report
    assert "box_heads.2.box_deltas.weight" in report.matched
    assert set(report.other_shape) == class_layers(config)
    assert "box_heads.2.class_logits.weight" in report.other_shape


def test_a_fresh_mask_head_can_be_put_on_a_faster_rcnn(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "faster.npz", small_config(mask=False))
    report = fit(read_file(path), small_config(), on_class_mismatch="reinit").report
    assert set(report.missing) == {name for name in expected_shapes(small_config()) if name.startswith("mask_head.")}
