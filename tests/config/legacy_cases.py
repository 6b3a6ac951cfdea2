"""What each old name means, by hand: our fields, and legal values with the text that spells them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

Spelled = st.SearchStrategy[tuple[str, Any]]


@dataclass(frozen=True)
class Case:
    """An old name's meaning: fields that get its value, values, and what else it changes."""

    paths: tuple[str, ...]
    values: Spelled
    also: dict[str, Any] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)


def python(values: st.SearchStrategy[Any]) -> Spelled:
    """Values spelled as Python prints them."""
    return values.map(lambda value: (repr(value), value))


def either(words: dict[str, Any]) -> Spelled:
    return st.sampled_from(sorted(words.items()))


def rising(values: st.SearchStrategy[Any], count: int) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(values, min_size=1, max_size=count, unique=True).map(lambda steps: tuple(sorted(steps)))


POSITIVE = st.integers(1, 10**6)
BLOCKS = st.integers(1, 256)  # the configuration limits the size of a network
FEATURES = st.integers(1, 16_384)
AMOUNT = st.floats(1e-6, 1e3)
SHARE_FLOATS = st.floats(0, 1)
WHOLE = python(POSITIVE)
CHANNELS = python(st.integers(1, 128).map(lambda eighth: 8 * eighth))
NUMBER = python(AMOUNT | st.integers(1, 1000))
SHARE = python(SHARE_FLOATS)
FLAG = either({"True": True, "False": False, "true": True, "1": True, "0": False})
HALF = either({"True": "fp16", "False": "fp32", "1": "fp16", "0": "fp32"})
WORD = st.text("abcdefghijklmnopqrstuvwxyzABCXYZ0123456789_-", min_size=1, max_size=12).filter(
    lambda word: word.lower() not in ("none", "null", "true", "false")
)
PATH = st.lists(WORD, min_size=2, max_size=4).map("/".join).map(lambda path: (path, path))
NAMES = python(st.lists(WORD, min_size=1, max_size=3).map(tuple)) | WORD.filter(lambda word: word[0].isalpha()).map(
    lambda word: (f'("{word}")', (word,))
)
FOUR = st.tuples(AMOUNT, AMOUNT, AMOUNT, AMOUNT)


def epoch_schedule() -> Spelled:
    epochs = rising(st.integers(1, 100), 4)
    factors = st.lists(AMOUNT, min_size=4, max_size=4)
    pairs = st.tuples(epochs, factors).map(
        lambda both: tuple(zip(both[0], [*both[1][: len(both[0]) - 1], None], strict=True))
    )
    return python(pairs)


def short_edge() -> Spelled:
    pairs = st.tuples(POSITIVE, POSITIVE).map(lambda pair: tuple(sorted(pair)))
    return python(pairs) | POSITIVE.map(lambda size: (str(size), (size, size)))


def shapes() -> Spelled:
    landscape = st.lists(st.tuples(st.integers(1, 800), st.integers(801, 1400)), min_size=1, max_size=3, unique=True)
    return landscape.map(lambda pairs: (repr(pairs), (*pairs, *((width, height) for height, width in pairs))))


def of(path: str, values: Spelled, **more: Any) -> Case:
    return Case((path,), values, **more)


def per_level(when: str) -> tuple[str, ...]:
    return tuple(f"model.rpn.{when}_{part}" for part in ("per_level_pre_nms", "per_level_post_nms", "per_image"))


CASES: dict[str, Case] = {
    "MODE_MASK": of("model.mask", FLAG),
    "MODE_FPN": of("model.architecture", either({"True": "fpn", "False": "c4"})),
    "DATA.BASEDIR": of("data.root", PATH),
    "DATA.TRAIN": of("data.train", NAMES),
    "DATA.VAL": of("data.val", NAMES | st.just(("()", ()))),
    "DATA.NUM_CATEGORY": of("model.num_categories", WHOLE | st.just(("-1", None))),
    "DATA.FILTER_EMPTY_ANNOTATIONS": of("data.filter_empty", FLAG),
    "DATA.NUM_WORKERS": of("data.num_workers", python(st.integers(0, 64))),
    "BACKBONE.WEIGHTS": of("model.backbone.weights", PATH | st.just(("", None))),
    "BACKBONE.RESNET_NUM_BLOCKS": of("model.backbone.blocks", python(st.tuples(BLOCKS, BLOCKS, BLOCKS, BLOCKS))),
    "BACKBONE.FREEZE_AFFINE": of("model.backbone.freeze_affine", FLAG),
    "BACKBONE.NORM": of(
        "model.backbone.norm", either({"FreezeBN": "FreezeBN", "SyncBN": "SyncBN", "GN": "GN", "None": "None"})
    ),
    "BACKBONE.FREEZE_AT": of("model.backbone.freeze_at", python(st.integers(0, 2))),
    "BACKBONE.TF_PAD_MODE": of("model.backbone.tf_pad_mode", FLAG),
    "BACKBONE.STRIDE_1X1": of("model.backbone.stride_1x1", FLAG),
    "TRAIN.WEIGHT_DECAY": of("train.weight_decay", python(SHARE_FLOATS)),
    "TRAIN.BASE_LR": of("train.base_lr", NUMBER),
    "TRAIN.WARMUP": of("train.warmup_steps", python(st.integers(0, 10**6))),
    "TRAIN.WARMUP_INIT_LR": of("train.warmup_init_lr", python(SHARE_FLOATS)),
    "TRAIN.STEPS_PER_EPOCH": of(
        "train.steps_per_epoch",
        WHOLE,
        also={"train.images_per_epoch": None},
        before={"train.images_per_epoch": 120_000},
    ),
    "TRAIN.LR_SCHEDULE": of(
        "train.step_schedule",
        python(rising(POSITIVE, 4)) | st.just(("2x", (240_000, 320_000, 360_000))),
        also={"train.epoch_schedule": None},
        before={"train.step_schedule": None, "train.epoch_schedule": ((12, None),)},
    ),
    "TRAIN.EVAL_PERIOD": of("eval.every_epochs", python(st.integers(0, 100)) | st.just(("-1", 0))),
    "TRAIN.CHECKPOINT_PERIOD": of("checkpoint.every_epochs", WHOLE),
    "PREPROC.TRAIN_SHORT_EDGE_SIZE": of("data.train_short_edge_px", short_edge()),
    "PREPROC.TEST_SHORT_EDGE_SIZE": of("data.test_short_edge_px", WHOLE),
    "PREPROC.MAX_SIZE": of("model.max_size_px", WHOLE | POSITIVE.map(lambda size: (repr(float(size)), size))),
    "PREPROC.PIXEL_MEAN": of("model.pixel_mean_rgb", python(st.tuples(AMOUNT, AMOUNT, AMOUNT))),
    "PREPROC.PIXEL_STD": of("model.pixel_std_rgb", python(st.tuples(AMOUNT, AMOUNT, AMOUNT))),
    "RPN.ANCHOR_STRIDE": of("model.rpn.anchor_stride", WHOLE),
    "RPN.ANCHOR_SIZES": of("model.rpn.anchor_sizes", python(st.lists(AMOUNT, min_size=5, max_size=5).map(tuple))),
    "RPN.ANCHOR_RATIOS": of("model.rpn.anchor_ratios", python(st.lists(AMOUNT, min_size=1, max_size=5).map(tuple))),
    "RPN.POSITIVE_ANCHOR_THRESH": of("model.rpn.positive_iou", python(st.floats(0.3, 1))),
    "RPN.NEGATIVE_ANCHOR_THRESH": of("model.rpn.negative_iou", python(st.floats(0, 0.7))),
    "RPN.FG_RATIO": of("model.rpn.positive_fraction", SHARE),
    "RPN.BATCH_PER_IM": of("model.rpn.samples_per_image", WHOLE),
    "RPN.MIN_SIZE": of("model.rpn.min_size", NUMBER),
    "RPN.PROPOSAL_NMS_THRESH": of("model.rpn.nms_iou", SHARE),
    "RPN.CROWD_OVERLAP_THRESH": of("model.rpn.crowd_overlap", NUMBER),
    "RPN.HEAD_DIM": of("model.rpn.head_channels", python(FEATURES)),
    "RPN.TRAIN_PRE_NMS_TOPK": of("model.rpn.train_pre_nms", WHOLE),
    "RPN.TRAIN_POST_NMS_TOPK": of("model.rpn.train_post_nms", WHOLE),
    "RPN.TEST_PRE_NMS_TOPK": of("model.rpn.test_pre_nms", WHOLE),
    "RPN.TEST_POST_NMS_TOPK": of("model.rpn.test_post_nms", WHOLE),
    "RPN.TRAIN_PER_LEVEL_NMS_TOPK": Case(per_level("train"), WHOLE),
    "RPN.TEST_PER_LEVEL_NMS_TOPK": Case(per_level("test"), WHOLE),
    "FRCNN.BATCH_PER_IM": of("model.box_head.samples_per_image", WHOLE),
    "FRCNN.BBOX_REG_WEIGHTS": of("model.box_head.box_weights", python(FOUR)),
    "FRCNN.FG_THRESH": of("model.box_head.foreground_iou", SHARE),
    "FRCNN.FG_RATIO": of("model.box_head.positive_fraction", SHARE),
    "FPN.ANCHOR_STRIDES": of("model.fpn.anchor_strides", python(st.lists(POSITIVE, min_size=5, max_size=5).map(tuple))),
    "FPN.PROPOSAL_MODE": of("model.fpn.proposal_mode", either({"Level": "Level", "Joint": "Joint"})),
    "FPN.NUM_CHANNEL": of("model.fpn.channels", CHANNELS),
    "FPN.NORM": of("model.fpn.norm", either({"None": "None", "GN": "GN"})),
    "FPN.FRCNN_HEAD_FUNC": of(
        "model.box_head.kind",
        either(
            {
                "fastrcnn_2fc_head": "2fc",
                "fastrcnn_4conv1fc_head": "4conv1fc",
                "fastrcnn_4conv1fc_gn_head": "4conv1fc_gn",
            }
        ),
    ),
    "FPN.FRCNN_CONV_HEAD_DIM": of("model.box_head.conv_channels", CHANNELS),
    "FPN.FRCNN_FC_HEAD_DIM": of("model.box_head.fc_channels", python(FEATURES)),
    "FPN.MRCNN_HEAD_FUNC": of(
        "model.mask_head.kind", either({"maskrcnn_up4conv_head": "up4conv", "maskrcnn_up4conv_gn_head": "up4conv_gn"})
    ),
    "FPN.CASCADE": of("model.cascade", FLAG),
    "MRCNN.HEAD_DIM": of("model.mask_head.channels", CHANNELS),
    "MRCNN.ACCURATE_PASTE": of("eval.accurate_paste", FLAG),
    "CASCADE.IOUS": of(
        "model.cascade_head.foreground_ious", python(st.tuples(SHARE_FLOATS, SHARE_FLOATS, SHARE_FLOATS))
    ),
    "CASCADE.BBOX_REG_WEIGHTS": of("model.cascade_head.box_weights", python(st.tuples(FOUR, FOUR, FOUR))),
    "TEST.FRCNN_NMS_THRESH": of("model.inference.nms_iou", SHARE),
    "TEST.RESULT_SCORE_THRESH": of("model.inference.score_threshold", SHARE),
    "TEST.RESULT_SCORE_THRESH_VIS": of("eval.show_score_threshold", SHARE),
    "TEST.RESULTS_PER_IM": of("model.inference.max_detections", WHOLE),
    "DATA.NUM_CLASS": of(
        "model.num_categories",
        POSITIVE.map(lambda count: (str(count + 1), count)) | st.sampled_from([("1", None), ("0", None)]),
    ),
    "TRAIN.LR_EPOCH_SCHEDULE": of("train.epoch_schedule", epoch_schedule(), also={"train.step_schedule": None}),
    "TRAIN.BATCH_SIZE_PER_GPU": of("train.images_per_gpu", python(st.integers(1, 256))),
    "TRAIN.SEED": of("train.seed", python(st.integers(0, 2**32))),
    "TRAIN.GRADIENT_CLIP": of("train.gradient_clip", NUMBER | st.just(("0", 0))),
    "PREPROC.PREDEFINED_PADDING": of("data.buckets", either({"True": "tight", "False": "none"})),
    "PREPROC.PADDING_SHAPES": of("data.buckets", shapes()),
    "RPN.TRAIN_PER_LEVEL_PRE_NMS_TOPK": of("model.rpn.train_per_level_pre_nms", WHOLE),
    "RPN.TRAIN_PER_LEVEL_POST_NMS_TOPK": of("model.rpn.train_per_level_post_nms", WHOLE),
    "RPN.TRAIN_IMAGE_POST_NMS_TOPK": of("model.rpn.train_per_image", WHOLE),
    "RPN.TEST_PER_LEVEL_PRE_NMS_TOPK": of("model.rpn.test_per_level_pre_nms", WHOLE),
    "RPN.TEST_PER_LEVEL_POST_NMS_TOPK": of("model.rpn.test_per_level_post_nms", WHOLE),
    "RPN.TEST_IMAGE_POST_NMS_TOPK": of("model.rpn.test_per_image", WHOLE),
    "RPN.UNQUANTIZED_ANCHOR": of("model.rpn.legacy_anchors", either({"True": False, "False": True})),
    "FPN.BOXCLASS_HEAD_FUNC": of(
        "model.box_head.kind",
        either(
            {
                "boxclass_2fc_head": "2fc",
                "boxclass_4conv1fc_head": "4conv1fc",
                "boxclass_4conv1fc_gn_head": "4conv1fc_gn",
            }
        ),
    ),
    "TEST.BOX_TARGET": of("train.target_box_ap", SHARE),
    "TEST.MASK_TARGET": of("train.target_mask_ap", SHARE),
    "TEST.BATCH_SIZE_PER_GPU": of("eval.images_per_gpu", python(st.integers(1, 256))),
    "load": of("train.weights", PATH),
    "throughput_log_freq": of("train.log_every_steps", WHOLE),
    "images_per_epoch": of(
        "train.images_per_epoch", WHOLE, also={"train.steps_per_epoch": None}, before={"train.steps_per_epoch": 500}
    ),
    "fp16": of("train.precision", HALF),
    "resnet_arch": of("model.backbone.blocks", either({"resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3)})),
    "backbone_weights": of(
        "model.backbone.weights", PATH | WORD.map(lambda name: (f"{name}.npz", f"pretrained-models/{name}.npz"))
    ),
    "load_model": of("train.weights", PATH | WORD.map(lambda name: (f"{name}.npz", f"pretrained-models/{name}.npz"))),
    "tf_enable_auto_mixed_precision": of("train.precision", HALF),
    "TENSORPACK_FP16": of("train.precision", HALF),
}

ALIASES = {
    "TRAIN.WARMUP_STEPS": "TRAIN.WARMUP",
    "FPN.BOXCLASS_CONV_HEAD_DIM": "FPN.FRCNN_CONV_HEAD_DIM",
    "FPN.BOXCLASS_FC_HEAD_DIM": "FPN.FRCNN_FC_HEAD_DIM",
    "mode_fpn": "MODE_FPN",
    "mode_mask": "MODE_MASK",
    "eval_period": "TRAIN.EVAL_PERIOD",
    "eval_period_in_epochs": "TRAIN.EVAL_PERIOD",
    "lr_schedule": "TRAIN.LR_SCHEDULE",
    "lr_epoch_schedule": "TRAIN.LR_EPOCH_SCHEDULE",
    "base_lr": "TRAIN.BASE_LR",
    "batch_norm": "BACKBONE.NORM",
    "backbone_norm": "BACKBONE.NORM",
    "batch_size_per_gpu": "TRAIN.BATCH_SIZE_PER_GPU",
    "steps_per_epoch": "TRAIN.STEPS_PER_EPOCH",
    "data_train": "DATA.TRAIN",
    "data_val": "DATA.VAL",
    "TF_ENABLE_AUTO_MIXED_PRECISION": "fp16",
}

PATH_NAMES = {"DATA.BASEDIR", "BACKBONE.WEIGHTS", "load", "backbone_weights", "load_model"}

# Names without a meaning here, with the old defaults that are let through.
EXPLAINED: dict[str, tuple[str, ...]] = {
    "TRAINER": ("replicated", "'replicated'"),
    "DATA.CLASS_NAMES": ("[]",),
    "DATA.ABSOLUTE_COORD": ("True",),
    "TRAIN.NUM_GPUS": ("None",),
    "TRAIN.STARTING_EPOCH": ("1",),
    "RPN.NUM_ANCHOR": ("15",),
    "FPN.RESOLUTION_REQUIREMENT": ("32",),
    "TRAIN.BACKBONE_NCHW": ("False",),
    "TRAIN.FPN_NCHW": ("False",),
    "TRAIN.RPN_NCHW": ("False",),
    "TRAIN.MASK_NCHW": ("False",),
    "TRAIN.SHOULD_STOP": ("False",),
    "RPN.TOPK_PER_IMAGE": ("True",),
    "RPN.SLOW_ACCURATE_MASK": ("True",),
    "logdir": (),
    "config": (),
    "evaluate": (),
    "predict": (),
    "visualize": (),
    "async_eval": ("False",),
    "tfprof": ("False",),
    "tfprof_start_step": (),
    "tfprof_end_step": (),
    "log_full_git_diff": ("False",),
    "gpus": (),
    "gpu_nodes": (),
    "gpus_per_node": (),
    "gpu_instance_type": (),
    "name": (),
    "namespace": (),
    "image": (),
    "image_pull_policy": (),
    "shared_fs": (),
    "shared_pvc": (),
    "data_fs": (),
    "data_dir": (),
    "train_script": (),
    "working_dir": (),
    "backoff_limit": (),
    "nccl_socket_ifname": (),
    "nccl_debug": (),
    "if_exclude": (),
    "horovod_autotune": ("1", "0"),
    "horovod_log_level": ("INFO",),
    "horovod_cycle_time": ("0.5",),
    "horovod_fusion_threshold": ("67108864",),
    "nccl_min_rings": ("8",),
    "tf_device_min_sys_mem_mb": ("4096", "2560"),
    "TF_*": (),
    "HOROVOD_*": (),
    "NCCL_*": (),
    "OMPI_*": (),
    "SM_*": (),
}
