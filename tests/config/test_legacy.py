"""Old names. The lists here are written out by hand from the old trainers, and not taken from the table under test."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from legacy_cases import ALIASES, CASES, EXPLAINED, PATH_NAMES, Case
from old_names import AWS_SAMPLES_KEYS, CHART_NAMES, NEW_HERE, SAGEMAKER_NAMES, TENSORPACK_KEYS

from maskfleet.config.base import replaced
from maskfleet.config.fields import walk_fields
from maskfleet.config.legacy.names import TABLE
from maskfleet.config.legacy.row import Mapped
from maskfleet.config.legacy.table import is_legacy, translate
from maskfleet.config.run import RunConfig
from maskfleet.errors import ConfigError

ROOT = Path(__file__).parents[2]
MAPPED = sorted({*CASES, *ALIASES})

FIELDS = [field.path for field in walk_fields(RunConfig) if not field.is_section]


def to_legacy(path: str, value: Any) -> tuple[str, str] | None:
    """The first old name for our field `path` alone, and `value` in its spelling; None if there is none."""
    for row in (row for rows in TABLE.values() for row in rows):
        if isinstance(row, Mapped) and row.paths == (path,):
            text = row.kind.spell(value)
            if text is not None and reads_as(row, text, value):
                return row.name, text
    return None


def reads_as(row: Mapped, text: str, value: Any) -> bool:
    try:
        return bool(row.kind.read(text) == value)
    except ValueError:
        return False


def case_of(name: str) -> Case:
    return CASES[ALIASES.get(name, name)]


def bare(name: str) -> str:
    return name.removeprefix("config:").removeprefix("maskrcnn.").removeprefix("global.")


@pytest.mark.parametrize("name", sorted({*TENSORPACK_KEYS, *AWS_SAMPLES_KEYS, *SAGEMAKER_NAMES, *CHART_NAMES}))
def test_every_name_of_the_old_systems_is_mapped_or_explained(name: str) -> None:
    assert is_legacy(name)
    if bare(name) in {*MAPPED, "extra_config"}:
        return  # its meaning is the next tests' matter
    with pytest.raises(ConfigError, match="no meaning here") as refusal:
        translate(name, "something-else")
    assert name in refusal.value.what
    assert refusal.value.remedy


def test_the_table_has_no_name_that_these_tests_do_not_know() -> None:
    in_table = {row.name for rows in TABLE.values() for row in rows}
    assert in_table == {*MAPPED, *EXPLAINED, "extra_config"}
    assert sum(map(len, TABLE.values())) == len(in_table)


@pytest.mark.parametrize("name", MAPPED)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_an_old_spelling_and_ours_give_equal_runs(name: str, data: st.DataObject) -> None:
    case = case_of(name)
    text, value = data.draw(case.values)
    prefix = data.draw(st.sampled_from(["", "config:", "maskrcnn."]))
    around = data.draw(st.sampled_from(["{}", " {} ", '"{}"'] if '"' not in text else ["{}", " {} "]))
    ours = {**dict.fromkeys(case.paths, value), **case.also}
    start = replaced(RunConfig(), case.before)
    assert replaced(start, translate(prefix + name, around.format(text))) == replaced(start, ours)


@pytest.mark.parametrize("name", MAPPED)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_field_spelled_the_old_way_reads_back(name: str, data: st.DataObject) -> None:
    case = case_of(name)
    _, value = data.draw(case.values)
    for path in case.paths:
        spelled = to_legacy(path, value)
        assert spelled is not None
        assert translate(*spelled)[path] == value


def test_every_field_has_an_old_spelling_or_is_new_here() -> None:
    mapped = {path for case in CASES.values() for path in case.paths}
    assert mapped | set(NEW_HERE) == set(FIELDS)
    assert not mapped & set(NEW_HERE)
    assert all(to_legacy(path, getattr_path(RunConfig(), path)) is None for path in NEW_HERE)


def getattr_path(config: Any, path: str) -> Any:
    for part in path.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.parametrize(
    ("path", "value", "spelled"),
    [
        ("train.base_lr", 0.01, ("TRAIN.BASE_LR", "0.01")),
        ("train.warmup_steps", 1000, ("TRAIN.WARMUP", "1000")),
        ("model.architecture", "c4", ("MODE_FPN", "False")),
        ("model.box_head.kind", "4conv1fc_gn", ("FPN.FRCNN_HEAD_FUNC", "fastrcnn_4conv1fc_gn_head")),
        ("model.backbone.weights", None, ("BACKBONE.WEIGHTS", "")),
        ("model.num_categories", None, ("DATA.NUM_CATEGORY", "-1")),
        ("model.rpn.train_per_image", 2000, ("RPN.TRAIN_IMAGE_POST_NMS_TOPK", "2000")),
        ("data.train", ("train2017",), ("DATA.TRAIN", '["train2017"]')),
        ("data.buckets", "tight", ("PREPROC.PREDEFINED_PADDING", "True")),
        ("data.buckets", ((800, 1000), (1000, 800)), ("PREPROC.PADDING_SHAPES", "[(800, 1000)]")),
        (
            "train.epoch_schedule",
            ((16.0, 0.1), (24.0, None)),
            ("TRAIN.LR_EPOCH_SCHEDULE", "[(16.0, 0.1), (24.0, None)]"),
        ),
        ("data.buckets", "orientation", None),
        ("data.buckets", ((800, 1000),), None),
        ("train.precision", "bf16", None),
        ("train.epoch_schedule", None, None),
        ("train.target_box_ap", None, None),
        ("data.train", ("it's",), None),
    ],
)
def test_old_spellings_of_our_fields(path: str, value: Any, spelled: tuple[str, str] | None) -> None:
    assert to_legacy(path, value) == spelled


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("1x", (120_000, 160_000, 180_000)),
        ("2x", (240_000, 320_000, 360_000)),
        ("'3x'", (420_000, 500_000, 540_000)),
        ("9x", (1_500_000, 1_580_000, 1_620_000)),
        ("[240000,320000,360000]", (240_000, 320_000, 360_000)),
    ],
)
def test_step_schedules_short_and_long(text: str, steps: tuple[int, ...]) -> None:
    assert translate("TRAIN.LR_SCHEDULE", text) == {"train.step_schedule": steps, "train.epoch_schedule": None}


@pytest.mark.parametrize(
    ("name", "text", "ours"),
    [
        (
            "lr_epoch_schedule",
            '"[(16, 0.1), (20, 0.01), (24, None)]"',
            {"train.epoch_schedule": ((16, 0.1), (20, 0.01), (24, None)), "train.step_schedule": None},
        ),
        ("steps_per_epoch", "7500", {"train.steps_per_epoch": 7500, "train.images_per_epoch": None}),
        ("images_per_epoch", "120000", {"train.images_per_epoch": 120_000, "train.steps_per_epoch": None}),
        ("data_val", '("coco_val2017")', {"data.val": ("coco_val2017",)}),
        ("data_train", '["coco_train2017"]', {"data.train": ("coco_train2017",)}),
        ("DATA.TRAIN", "('coco_train2014', 'coco_valminusminival2014')",
         {"data.train": ("coco_train2014", "coco_valminusminival2014")}),
        ("DATA.VAL", "()", {"data.val": ()}),
        ("mode_mask", '"False"', {"model.mask": False}),
        ("MODE_FPN", "true", {"model.architecture": "fpn"}),
        ("BACKBONE.NORM", "None", {"model.backbone.norm": "None"}),
        ("BACKBONE.WEIGHTS", "''", {"model.backbone.weights": None}),
        ("load_model", "none", {"train.weights": None}),
        ("backbone_weights", "ImageNet-R50-AlignPadding.npz",
         {"model.backbone.weights": "pretrained-models/ImageNet-R50-AlignPadding.npz"}),
        ("backbone_weights", "/data/R50.npz", {"model.backbone.weights": "/data/R50.npz"}),
        ("resnet_arch", "resnet101", {"model.backbone.blocks": (3, 4, 23, 3)}),
        ("PREPROC.TRAIN_SHORT_EDGE_SIZE", "800", {"data.train_short_edge_px": (800, 800)}),
        ("PREPROC.TRAIN_SHORT_EDGE_SIZE", "[640,800]", {"data.train_short_edge_px": (640, 800)}),
        ("PREPROC.MAX_SIZE", "1344.0", {"model.max_size_px": 1344}),
        ("PREPROC.PREDEFINED_PADDING", "False", {"data.buckets": "none"}),
        (
            "PREPROC.PADDING_SHAPES",
            "[(800,1000),(800,1200),(800,1350)]",
            {"data.buckets": ((800, 1000), (800, 1200), (800, 1350), (1000, 800), (1200, 800), (1350, 800))},
        ),
        ("TRAIN.EVAL_PERIOD", "-1", {"eval.every_epochs": 0}),
        ("DATA.NUM_CATEGORY", "-1", {"model.num_categories": None}),
        ("DATA.NUM_CLASS", "81", {"model.num_categories": 80}),
        ("RPN.UNQUANTIZED_ANCHOR", "False", {"model.rpn.legacy_anchors": True}),
        (
            "RPN.TRAIN_PER_LEVEL_NMS_TOPK",
            "1500",
            {
                "model.rpn.train_per_level_pre_nms": 1500,
                "model.rpn.train_per_level_post_nms": 1500,
                "model.rpn.train_per_image": 1500,
            },
        ),
        ("tf_enable_auto_mixed_precision", "1", {"train.precision": "fp16"}),
        ("extra_config", "TRAIN.GRADIENT_CLIP=0.36", {"train.gradient_clip": 0.36}),
        ("maskrcnn.extra_config", "'TRAIN.CHECKPOINT_PERIOD=2'", {"checkpoint.every_epochs": 2}),
        ("extra_config", "", {}),
    ],
)  # fmt: skip
def test_values_worked_by_hand(name: str, text: str, ours: dict[str, Any]) -> None:
    assert translate(name, text) == ours


@pytest.mark.parametrize(("name", "defaults"), EXPLAINED.items())
def test_a_name_without_meaning_here_accepts_only_its_old_default(name: str, defaults: tuple[str, ...]) -> None:
    example = name.replace("*", "ANYTHING")
    for default in defaults:
        assert translate(example, default) == {}
    for text in ("something-else", "99", "[[", ""):
        with pytest.raises(ConfigError, match="no meaning here") as refusal:
            translate(example, text)
        assert refusal.value.remedy


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("TRAINER", "horovod", "torch.distributed"),
        ("TRAIN.NUM_GPUS", "8", "not part of the configuration"),
        ("TRAIN.STARTING_EPOCH", "5", "stores where the run stopped"),
        ("DATA.ABSOLUTE_COORD", "False", "pixels"),
        ("DATA.CLASS_NAMES", "['BG', 'cat']", "annotation file"),
        ("gpus", "16", "belongs to `maskfleet launch`"),
        ("global.shared_fs", "efs", "belongs to `maskfleet launch`"),
        ("logdir", "/fsx/logs", "run directory"),
        ("TF_CPP_MIN_LOG_LEVEL", "2", "TensorFlow"),
    ],
)
def test_the_error_about_a_name_without_meaning_here_says_why(name: str, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        translate(name, text)


def test_the_values_of_the_old_optimized_chart_give_the_same_run() -> None:
    values = {
        "maskrcnn.batch_size_per_gpu": "4",
        "maskrcnn.images_per_epoch": "120000",
        "maskrcnn.lr_epoch_schedule": "[(16, 0.1), (20, 0.01), (24, None)]",
        "maskrcnn.base_lr": "0.0015625",
        "maskrcnn.eval_period_in_epochs": "1",
        "maskrcnn.data_train": '["train2017"]',
        "maskrcnn.data_val": '("val2017")',
        "maskrcnn.mode_fpn": "True",
        "maskrcnn.mode_mask": "True",
        "maskrcnn.backbone_norm": "FreezeBN",
        "maskrcnn.tf_enable_auto_mixed_precision": "0",
        "maskrcnn.horovod_autotune": "1",
        "maskrcnn.extra_config": "TRAIN.GRADIENT_CLIP=0.36",
        "PREPROC.PREDEFINED_PADDING": "True",
    }
    changes = {path: value for name, text in values.items() for path, value in translate(name, text).items()}
    assert replaced(RunConfig(), changes) == replaced(
        RunConfig(),
        {
            "train.images_per_gpu": 4,
            "train.images_per_epoch": 120_000,
            "train.step_schedule": None,
            "train.epoch_schedule": ((16, 0.1), (20, 0.01), (24, None)),
            "train.base_lr": 0.0015625,
            "train.gradient_clip": 0.36,
            "data.buckets": "tight",
        },
    )


def test_no_field_name_is_also_an_old_name() -> None:
    for field in walk_fields(RunConfig):
        assert not is_legacy(field.path)
    for name in ("", "launch.image", "train.base_lrr", "lr", "Train.base_lr", "configure", "maskrcnn"):
        assert not is_legacy(name)


@pytest.mark.parametrize(
    ("name", "old", "ours"),
    [
        ("TRAIN.BASE_LRR", "TRAIN.BASE_LR", "train.base_lr"),
        ("BASE_LR", "TRAIN.BASE_LR", "train.base_lr"),
        ("config:BACKBONE.NROM", "BACKBONE.NORM", "model.backbone.norm"),
        ("TRAIN.weight_decay", "TRAIN.WEIGHT_DECAY", "train.weight_decay"),
        ("config:train.base_lr", "base_lr", "train.base_lr"),
        ("maskrcnn.batch_size", "batch_size_per_gpu", ""),
    ],
)
def test_the_error_about_an_unknown_old_name_suggests_the_nearest_ones(name: str, old: str, ours: str) -> None:
    assert is_legacy(name)
    with pytest.raises(ConfigError, match="not a name") as refusal:
        translate(name, "1")
    assert name in refusal.value.what
    assert old in refusal.value.remedy
    assert ours in refusal.value.remedy


def test_a_name_without_a_near_match_still_gets_a_remedy() -> None:
    with pytest.raises(ConfigError) as refusal:
        translate("QQQQ.ZZZZ" + "\x1b[31m" + "X" * 500, "1")
    assert refusal.value.remedy
    assert str(refusal.value).replace("\n", "").isprintable()
    assert len(refusal.value.what) < 200


@pytest.mark.parametrize("name", MAPPED)
def test_a_bad_value_names_the_old_name_and_our_field(name: str) -> None:
    bad = "\x00" if name in PATH_NAMES else "[[[]]]"
    with pytest.raises(ConfigError) as refusal:
        translate(f"config:{name}", bad)
    assert f"config:{name}=" in refusal.value.what
    for path in case_of(name).paths:
        assert path in refusal.value.what
    assert refusal.value.remedy.startswith("write ")
    assert str(refusal.value).replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("TRAIN.BASE_LR", "1.25e-2/8", "arithmetic"),
        ("batch_size_per_gpu", "-1", "greater than or equal to 1"),
        ("TRAIN.BASE_LR", "1.25e-2 / 8", "arithmetic"),
        ("TRAIN.WARMUP", "2*500", "arithmetic"),
        ("TRAIN.WARMUP", "9**9**9**9", "arithmetic"),
        ("TRAIN.BASE_LR", "-0.1", "greater than 0"),
        ("TRAIN.BASE_LR", "nan", "not a number"),
        ("TRAIN.BASE_LR", "True", "not a number"),
        ("TRAIN.WARMUP", "0.5", "not a whole number"),
        ("TRAIN.WARMUP", "", "empty"),
        ("MODE_MASK", "2", "neither True nor False"),
        ("BACKBONE.NORM", "BN", "FreezeBN, SyncBN, GN, None"),
        ("BACKBONE.FREEZE_AT", "3", "less than or equal to 2"),
        ("BACKBONE.RESNET_NUM_BLOCKS", "[3, 4, 6]", "entry 4"),
        ("resnet_arch", "resnet152", "resnet50, resnet101"),
        ("TRAIN.LR_SCHEDULE", "[3, 2, 1]", "ascending"),
        ("TRAIN.LR_SCHEDULE", "[]", "ascending"),
        ("TRAIN.LR_SCHEDULE", "10x", "not a list"),
        ("lr_epoch_schedule", "[(16, 0.1), (24, 0.01)]", "factor None"),
        ("lr_epoch_schedule", "[(16, None), (24, None)]", "factor None"),
        ("lr_epoch_schedule", "[16, 20]", "not a list"),
        ("lr_epoch_schedule", "[(16, 0.1, 3)]", "pair"),
        ("PREPROC.TRAIN_SHORT_EDGE_SIZE", "[800, 640]", "smaller one first"),
        ("PREPROC.TRAIN_SHORT_EDGE_SIZE", "[800]", "has 1 numbers"),
        ("PREPROC.PADDING_SHAPES", "[800, 1000]", "not a list"),
        ("DATA.TRAIN", "()", "empty"),
        ("DATA.TRAIN", "[1]", "not the name of a dataset"),
        ("TEST.BOX_TARGET", "37.7", "less than or equal to 1"),
        ("extra_config", "GRADIENT_CLIP", "not OLD_NAME=VALUE"),
        ("extra_config", "maskrcnn.extra_config=extra_config=1", "not OLD_NAME=VALUE"),
    ],
)
def test_bad_values_say_what_is_wrong(name: str, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        translate(name, text)


@pytest.mark.parametrize("name", MAPPED)
def test_hostile_values_are_rejected_or_stay_plain_text(name: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    code = f"__import__('pathlib').Path('{marker}').touch()"
    for text in (code, f"[{code}]", f"({code},)", f"{{1: {code}}}", "__import__('os').system('x')"):
        if name in PATH_NAMES:
            [path] = translate(name, text).values()
            assert path.endswith(text)
        else:
            with pytest.raises(ConfigError):
                translate(name, text)
    for text in ("[" * 100_000, "(" * 4000 + ")" * 4000, "9" * 1_000_000, "a" * 1_000_000, "\x00", "1\x00", "\ud800"):
        with pytest.raises(ConfigError):
            translate(name, text)
    assert not marker.exists()


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from([*MAPPED, *EXPLAINED, "extra_config"]) | st.text(max_size=20), text=st.text(max_size=40))
def test_any_name_and_value_is_a_change_or_a_config_error(name: str, text: str) -> None:
    try:
        changes = translate(name, text)
    except ConfigError as error:
        refusal = error
    else:
        assert set(changes) <= set(FIELDS)
        return
    assert refusal.remedy
    assert str(refusal).replace("\n", "").isprintable()


def test_the_page_of_old_names_is_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "legacy_names_page.py"))
    page = (ROOT / "docs" / "reference" / "legacy-names.md").read_text(encoding="utf-8")
    assert page == script["page"](), "run: python scripts/legacy_names_page.py"
    for name in (*MAPPED, *EXPLAINED):
        assert f"| `{name}` |" in page
