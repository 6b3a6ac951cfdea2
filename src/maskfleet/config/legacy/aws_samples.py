"""Keys that AWS Samples' mask-rcnn-tensorflow has besides TensorPack's, and the flags of both training scripts."""

from __future__ import annotations

from maskfleet.config.legacy.row import Alias, Explained, Mapped, Row
from maskfleet.config.legacy.values import (
    CLASSES_OR_DATA,
    EPOCH_SCHEDULE,
    FILE,
    NOT_FLAG,
    NUMBER,
    SHAPES,
    WHOLE,
    choice,
    switch,
)

_BOX_HEADS = {f"boxclass_{kind}_head": kind for kind in ("2fc", "4conv1fc", "4conv1fc_gn")}


def _layout(part: str) -> Explained:
    return Explained(
        f"TRAIN.{part}_NCHW",
        "the memory layout of tensors is chosen for the device and changes no result",
        "remove it",
        accepts=("False",),
    )


AWS_SAMPLES: tuple[Row, ...] = (
    Mapped("DATA.NUM_CLASS", "model.num_categories", CLASSES_OR_DATA, "Ours does not count the background."),
    Alias("TRAIN.WARMUP_STEPS", "TRAIN.WARMUP"),
    Mapped(
        "TRAIN.LR_EPOCH_SCHEDULE",
        "train.epoch_schedule",
        EPOCH_SCHEDULE,
        "Replaces `train.step_schedule`.",
        also={"train.step_schedule": None},
    ),
    Mapped("TRAIN.BATCH_SIZE_PER_GPU", "train.images_per_gpu", WHOLE),
    Mapped("TRAIN.SEED", "train.seed", WHOLE),
    Mapped("TRAIN.GRADIENT_CLIP", "train.gradient_clip", NUMBER),
    _layout("BACKBONE"),
    _layout("FPN"),
    _layout("RPN"),
    _layout("MASK"),
    Explained(
        "TRAIN.SHOULD_STOP",
        "it passed a message between threads of the old trainer",
        "remove it; train.target_box_ap and train.target_mask_ap stop a run early",
        accepts=("False",),
    ),
    Mapped(
        "PREPROC.PREDEFINED_PADDING",
        "data.buckets",
        switch(on="tight", off="none"),
        "True chooses canvases by aspect ratio that fit the image sizes of the run, False one for each batch.",
    ),
    Mapped(
        "PREPROC.PADDING_SHAPES",
        "data.buckets",
        SHAPES,
        "Each landscape (height, width) also adds its portrait. Write it after PREDEFINED_PADDING, which sets the same "
        "field.",
    ),
    Mapped("RPN.TRAIN_PER_LEVEL_PRE_NMS_TOPK", "model.rpn.train_per_level_pre_nms", WHOLE),
    Mapped("RPN.TRAIN_PER_LEVEL_POST_NMS_TOPK", "model.rpn.train_per_level_post_nms", WHOLE),
    Mapped("RPN.TRAIN_IMAGE_POST_NMS_TOPK", "model.rpn.train_per_image", WHOLE),
    Mapped("RPN.TEST_PER_LEVEL_PRE_NMS_TOPK", "model.rpn.test_per_level_pre_nms", WHOLE),
    Mapped("RPN.TEST_PER_LEVEL_POST_NMS_TOPK", "model.rpn.test_per_level_post_nms", WHOLE),
    Mapped("RPN.TEST_IMAGE_POST_NMS_TOPK", "model.rpn.test_per_image", WHOLE),
    Explained(
        "RPN.TOPK_PER_IMAGE",
        "proposals are always chosen image by image, never over a batch",
        "remove it",
        accepts=("True",),
    ),
    Explained(
        "RPN.SLOW_ACCURATE_MASK",
        "the proposal losses always leave out exactly the anchors they should",
        "remove it",
        accepts=("True",),
    ),
    Mapped("RPN.UNQUANTIZED_ANCHOR", "model.rpn.legacy_anchors", NOT_FLAG, "Inverted: False sets it."),
    Mapped("FPN.BOXCLASS_HEAD_FUNC", "model.box_head.kind", choice(_BOX_HEADS)),
    Alias("FPN.BOXCLASS_CONV_HEAD_DIM", "FPN.FRCNN_CONV_HEAD_DIM"),
    Alias("FPN.BOXCLASS_FC_HEAD_DIM", "FPN.FRCNN_FC_HEAD_DIM"),
    Mapped("TEST.BOX_TARGET", "train.target_box_ap", NUMBER),
    Mapped("TEST.MASK_TARGET", "train.target_mask_ap", NUMBER),
    Mapped("TEST.BATCH_SIZE_PER_GPU", "eval.images_per_gpu", WHOLE),
)


def _profiler(name: str, *, accepts: tuple[str, ...]) -> Explained:
    return Explained(name, "it configured TensorFlow's profiler", "remove it", accepts=accepts)


FLAGS: tuple[Row, ...] = (
    Mapped("load", "train.weights", FILE, "Starts from a detector; a stopped run resumes without it."),
    Mapped("throughput_log_freq", "train.log_every_steps", WHOLE),
    Mapped(
        "images_per_epoch",
        "train.images_per_epoch",
        WHOLE,
        "Replaces `train.steps_per_epoch`.",
        also={"train.steps_per_epoch": None},
    ),
    Mapped("fp16", "train.precision", switch(on="fp16", off="fp32"), "True is fp16, False is fp32."),
    Explained(
        "logdir",
        "the run directory is not part of the configuration, so that one configuration serves many runs",
        "remove it, and pass the run directory to `maskfleet train`",
    ),
    Explained("config", "it introduced KEY=VALUE pairs", "write each pair as --set KEY=VALUE"),
    Explained("evaluate", "evaluation is a command", "use `maskfleet eval RUN_OR_WEIGHTS`"),
    Explained("predict", "prediction is a command", "use `maskfleet predict RUN_OR_WEIGHTS IMAGE…`"),
    Explained("visualize", "drawing is part of prediction", "use `maskfleet predict RUN_OR_WEIGHTS IMAGE…`"),
    Explained(
        "async_eval",
        "all ranks evaluate together between two epochs",
        "remove it; eval.every_epochs sets how often, train.target_box_ap when to stop early",
        accepts=("False",),
    ),
    _profiler("tfprof", accepts=("False",)),
    _profiler("tfprof_start_step", accepts=()),
    _profiler("tfprof_end_step", accepts=()),
    Explained(
        "log_full_git_diff",
        "a run is described by its run.yaml, not by the state of a source folder",
        "remove it",
        accepts=("False",),
    ),
)
