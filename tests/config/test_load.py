"""recipe < file < --set, and run.yaml."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from strategies import run_configs

from maskfleet.config import load as load_module
from maskfleet.config.base import replaced
from maskfleet.config.load import changes_of_run, differences, dump, load, resolve, write_run_file
from maskfleet.config.recipes import RECIPES, recipe
from maskfleet.config.run import RunConfig
from maskfleet.errors import ConfigError


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_set_overrides_the_file_and_the_file_overrides_the_recipe(tmp_path: Path) -> None:
    file = write(tmp_path / "my.yaml", "recipe: r50_fpn_2x\ntrain:\n  base_lr: 0.5\n  seed: 7\n")
    resolved = resolve(file=file, sets=["train.seed=8"])
    assert resolved.config.recipe == "r50_fpn_2x"
    assert resolved.config.train.step_schedule == (240_000, 320_000, 360_000)
    assert resolved.config.train.base_lr == 0.5
    assert resolved.config.train.seed == 8
    assert resolved.origins["train.step_schedule"] == "recipe r50_fpn_2x"
    assert resolved.origins["train.base_lr"] == f"{file}:3"
    assert resolved.origins["train.seed"] == "--set"


def test_the_recipe_option_overrides_the_recipe_of_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "my.yaml", "recipe: r50_fpn_2x\n")
    assert resolve(recipe_name="r50_c4_1x", file=file).config == recipe("r50_c4_1x")


def test_a_later_set_overrides_an_earlier_one() -> None:
    assert resolve(sets=["train.seed=1", "train.seed=2"]).config.train.seed == 2


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_reads_back_from_its_own_run_file(name: str, tmp_path: Path) -> None:
    config = recipe(name)
    assert config.recipe == name
    write_run_file(tmp_path, config)
    assert load(tmp_path / "run.yaml") == config


@settings(max_examples=150, deadline=None)
@given(config=run_configs())
def test_any_config_survives_the_yaml_round_trip(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("run") / "run.yaml"
    path.write_text(dump(config), encoding="utf-8")
    assert load(path) == config


def test_a_schedule_in_the_other_unit_replaces_the_recipes() -> None:
    config = resolve(recipe_name="r50_fpn_1x", sets=["train.epoch_schedule=[[8, 0.1], [12, null]]"]).config
    assert config.train.epoch_schedule == ((8, 0.1), (12, None))
    assert config.train.step_schedule is None


def test_a_launch_section_is_read_beside_the_run(tmp_path: Path) -> None:
    file = write(tmp_path / "run.yaml", "recipe: demo\nlaunch: {on: eks, nodes: 2}\n")
    resolved = resolve(file=file)
    assert resolved.config == recipe("demo")
    assert resolved.launch is not None
    assert resolved.launch.on == "eks"


def test_two_paths_name_a_users_own_set() -> None:
    config = resolve(sets=["data.train=[{annotations: a.json, images: pictures}]"]).config
    assert config.data.train[0].annotations == "a.json"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("sets", "what", "remedy"),
    [
        (["train.base_rl=1"], "no field train.base_rl", "train.base_lr"),
        (["base_lrr=1"], "no field base_lrr", "train.base_lr"),
        (["train.base_lr=fast"], "train.base_lr = 'fast'", "explain train.base_lr"),
        (["train.base_lr=-1"], "greater than 0", "explain train.base_lr"),
        (["model.backbone.freeze_at=3"], "less than or equal to 2", "explain model.backbone.freeze_at"),
        (["train.base_lr"], "has no value", "FIELD=VALUE"),
        (["=3"], "has no value", "FIELD=VALUE"),
        (["train.base_lr=[1"], "is not a value", "write numbers"),
        (["model.architecture=c4", "model.cascade=true"], "cascade needs a feature pyramid", "explain model"),
        (["model=3"], "is a section", "model.architecture"),
        (["train.step_schedule=[5,6]", "train.epoch_schedule=[[1,null]]"], "two units", "keep one"),
        (["train.epoch_schedule=null"], "neither is set", "explain train"),
        (["train.step_schedule=[6,5]"], "ascending order", "explain train"),
        (["train.epoch_schedule=[[1,0.1]]"], "must end with", "explain train"),
        (["data.train_short_edge_px=[9,8]"], "smaller one first", "explain data"),
        (["model.backbone.norm=GN", "model.backbone.freeze_affine=true"], "freeze_affine needs", "explain"),
        (["model.mask=false", "train.target_mask_ap=0.3"], "target_mask_ap", "config"),
        (["data.train=[]"], "train is empty", "explain data"),
        (["train.base_lr=.nan"], "finite", "explain train.base_lr"),
    ],
)
def test_the_error_about_a_bad_setting_has_a_remedy(sets: list[str], what: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(sets=sets)
    assert what in caught.value.what
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("train:\n  base_lr: [1\n", "line 3, column 1"),
        ("train: {seed: 1}\ntrain: {seed: 2}\n", "line 2, column 1"),
        ("- a\n- b\n", "not fields and values"),
        ("train:\n  base_rl: 1\n", ":2: there is no field train.base_rl"),
        ("trainn:\n  base_lr: 1\n", ":1: there is no field trainn"),
        ("train: 5\n", ":1: train is a section"),
        ("train:\n  seed: x\n", ":2: train.seed = 'x'"),
        ("launch: {on: moon}\n", "launch"),
    ],
)
def test_the_error_about_a_bad_file_names_the_line(text: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(file=write(tmp_path / "bad.yaml", text))
    assert what in caught.value.what


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        resolve(file=tmp_path / "nowhere.yaml")
    binary = tmp_path / "image.yaml"
    binary.write_bytes(b"\xff\xd8\xff\xe0")
    with pytest.raises(ConfigError, match="not a text file"):
        resolve(file=binary)


def test_unknown_recipe_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(recipe_name="r50_fpn_1")
    assert "r50_fpn_1x" in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "mask", "other"),
    [("r50_fpn_1x", "false", "faster_r50_fpn_1x"), ("faster_r101_c4_1x", "true", "r101_c4_1x")],
)
def test_the_mask_setting_selects_the_recipe_of_that_name(name: str, mask: str, other: str, tmp_path: Path) -> None:
    config = resolve(recipe_name=name, sets=[f"model.mask={mask}"]).config
    assert config == recipe(other)
    write_run_file(tmp_path, recipe(name))
    assert resolve(file=tmp_path / "run.yaml", sets=[f"model.mask={mask}"]).config == recipe(other)


def test_mask_off_without_a_recipe_selects_the_recipe_without_masks(tmp_path: Path) -> None:
    config = resolve(sets=["model.mask=false"]).config
    assert config.recipe == "faster_scratch"
    write_run_file(tmp_path, config)
    assert load(tmp_path / "run.yaml") == config


def test_the_presets_of_tensorpack_and_aws_samples_keep_their_mask_switch() -> None:
    assert not resolve(recipe_name="standard", sets=["model.mask=false"]).config.model.mask


def test_a_directory_of_another_run_is_rejected_and_not_changed(tmp_path: Path) -> None:
    first = recipe("r50_fpn_1x")
    write_run_file(tmp_path, first)
    (tmp_path / "metrics.jsonl").write_text('{"step": 20}\n')
    before = (tmp_path / "run.yaml").read_bytes()
    with pytest.raises(ConfigError) as caught:
        write_run_file(tmp_path, replaced(first, {"train.seed": 5}))
    assert "train.seed: there 1234, here 5" in caught.value.what
    assert (tmp_path / "run.yaml").read_bytes() == before


@pytest.mark.parametrize("result", ["metrics.jsonl", "checkpoints/step-000000020.json"])
def test_a_run_without_results_does_not_occupy_its_directory(tmp_path: Path, result: str) -> None:
    first, second = recipe("r50_fpn_1x"), recipe("faster_r50_fpn_1x")
    write_run_file(tmp_path, first)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "log.txt").write_text("failed before the first step")
    write_run_file(tmp_path, second)
    assert load(tmp_path / "run.yaml") == second
    (tmp_path / result).write_text("{}")
    with pytest.raises(ConfigError, match="holds another run"):
        write_run_file(tmp_path, first)


def test_sets_that_are_still_to_be_found_are_no_difference() -> None:
    found = replaced(recipe("r50_fpn_1x"), {"data.train": ("train2017",)})
    sought = replaced(found, {"data.train": ("auto",)})
    assert changes_of_run(found, sought) == ""
    assert changes_of_run(sought, found) == ""
    assert "data.train" in changes_of_run(found, replaced(found, {"data.train": ("other",)}))


def test_a_run_may_resume_with_moved_data_and_other_worker_and_checkpoint_settings(tmp_path: Path) -> None:
    first = recipe("r50_fpn_1x")
    write_run_file(tmp_path, first)
    moved = replaced(first, {"data.root": "elsewhere", "data.num_workers": 3, "checkpoint.keep_last": 9})
    write_run_file(tmp_path, moved)
    assert load(tmp_path / "run.yaml") == moved


@pytest.mark.parametrize(
    "change",
    [{"train.peer_timeout_s": 900.0}, {"train.join_timeout_s": 60.0}, {"data.on_bad": "skip"}, {"data.root": "moved"}],
    ids=lambda change: next(iter(change)),
)
def test_a_run_with_results_resumes_with_settings_that_change_no_number(
    tmp_path: Path, change: dict[str, object]
) -> None:
    first = recipe("r50_fpn_1x")
    write_run_file(tmp_path, first)
    (tmp_path / "metrics.jsonl").write_text("{}")
    changed = replaced(first, change)
    write_run_file(tmp_path, changed)
    assert load(tmp_path / "run.yaml") == changed


def test_writing_the_same_run_again_changes_nothing(tmp_path: Path) -> None:
    write_run_file(tmp_path, recipe("demo"))
    before = (tmp_path / "run.yaml").stat().st_mtime_ns
    write_run_file(tmp_path, recipe("demo"))
    assert (tmp_path / "run.yaml").stat().st_mtime_ns == before
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_differences_name_only_what_differs() -> None:
    one = RunConfig()
    assert differences(one, one) == {}
    assert differences(one, replaced(one, {"data.root": "x"})) == {"data.root": ("data", "x")}


def test_run_files_of_resnets_do_not_name_the_backbone_so_that_older_versions_read_them() -> None:
    assert "kind: resnet" not in dump(recipe("r50_fpn_1x"))


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("train.batch_size", "train.images_per_gpu"),
        ("lr", "train.base_lr"),
        ("epochs", "train.epochs"),
        ("workers", "data.num_workers"),
        ("imgsz", "data.train_short_edge_px"),
    ],
)
def test_names_of_other_trainers_are_understood_in_suggestions(name: str, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(sets=[f"{name}=2"])
    assert caught.value.remedy == f"did you mean {field}?"


def test_every_suggested_field_exists() -> None:
    assert set(load_module._OTHER_NAMES.values()) <= set(load_module._FIELDS)
