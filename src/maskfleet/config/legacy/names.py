"""Every old name: those of TensorPack, AWS Samples, the SageMaker notebooks and the two EKS charts."""

from __future__ import annotations

from maskfleet.config.legacy.row import Alias, Mapped, Nested, Removed, Row
from maskfleet.config.legacy.values import (
    CLASSES_OR_DATA,
    COUNT_OR_DATA,
    EPOCH_SCHEDULE,
    FILE,
    FLAG,
    FOLDER,
    NAMES,
    NOT_FLAG,
    NUMBER,
    NUMBER_LISTS,
    NUMBERS,
    PERIOD,
    SHAPES,
    SHORT_EDGE,
    SOME_NAMES,
    STEP_SCHEDULE,
    WHOLE,
    WHOLES,
    choice,
    in_folder,
    switch,
)
from maskfleet.config.model import R50_BLOCKS, R101_BLOCKS

_BOX_HEADS = ("2fc", "4conv1fc", "4conv1fc_gn")
_FASTRCNN_HEADS = {f"fastrcnn_{kind}_head": kind for kind in _BOX_HEADS}
_BOXCLASS_HEADS = {f"boxclass_{kind}_head": kind for kind in _BOX_HEADS}
_MASK_HEADS = {f"maskrcnn_{kind}_head": kind for kind in ("up4conv", "up4conv_gn")}
_NORMS = {norm: norm for norm in ("FreezeBN", "SyncBN", "GN", "None")}
_PRETRAINED = in_folder("pretrained-models")
_HALF = switch(on="fp16", off="fp32")

_LAYOUT = "the memory layout of tensors is chosen for the device and changes no result"
_PROFILER = "it configured TensorFlow's profiler"
_HOROVOD = "it configured Horovod, which torch.distributed replaces"

# Keys of TensorPack's FasterRCNN example, in its order; AWS Samples also has most of them.
TENSORPACK: tuple[Row, ...] = (
    Removed(
        "TRAINER",
        "there is one trainer: torch.distributed connects the processes, whatever started them",
        "remove it; `maskfleet launch` starts the processes, and `maskfleet train` finds its rank",
        accepts=("replicated",),
    ),
    Mapped("MODE_MASK", "model.mask", FLAG),
    Mapped("MODE_FPN", "model.architecture", switch(on="fpn", off="c4"), "True is fpn, False is c4."),
    Mapped("DATA.BASEDIR", "data.root", FOLDER),
    Mapped("DATA.TRAIN", "data.train", SOME_NAMES, "`coco_train2017` and `train2017` are the same set."),
    Mapped("DATA.VAL", "data.val", NAMES),
    Mapped("DATA.NUM_CATEGORY", "model.num_categories", COUNT_OR_DATA),
    Removed(
        "DATA.CLASS_NAMES",
        "class names are read from the annotation file",
        "remove it; the categories of the first training set are used",
        accepts=("[]",),
    ),
    Removed(
        "DATA.ABSOLUTE_COORD",
        "boxes and polygons in annotation files are in pixels, as in COCO, never relative to the image size",
        "remove it, and multiply relative coordinates by the image's width and height in the annotation file",
        accepts=("True",),
    ),
    Mapped("DATA.FILTER_EMPTY_ANNOTATIONS", "data.filter_empty", FLAG),
    Mapped("DATA.NUM_WORKERS", "data.num_workers", WHOLE),
    Mapped("BACKBONE.WEIGHTS", "model.backbone.weights", FILE),
    Mapped("BACKBONE.RESNET_NUM_BLOCKS", "model.backbone.blocks", WHOLES),
    Mapped("BACKBONE.FREEZE_AFFINE", "model.backbone.freeze_affine", FLAG),
    Mapped("BACKBONE.NORM", "model.backbone.norm", choice(_NORMS)),
    Mapped("BACKBONE.FREEZE_AT", "model.backbone.freeze_at", WHOLE),
    Mapped("BACKBONE.TF_PAD_MODE", "model.backbone.tf_pad_mode", FLAG),
    Mapped("BACKBONE.STRIDE_1X1", "model.backbone.stride_1x1", FLAG),
    Removed(
        "TRAIN.NUM_GPUS",
        "the number of GPUs is not part of the configuration",
        "remove it, and use `maskfleet train --gpus N`",
        accepts=("None",),
    ),
    Mapped("TRAIN.WEIGHT_DECAY", "train.weight_decay", NUMBER),
    Mapped(
        "TRAIN.BASE_LR",
        "train.base_lr",
        NUMBER,
        "In the units of the recipe, `train.base_lr_images` images per update: 8 in TensorPack, 1 in AWS Samples.",
    ),
    Mapped("TRAIN.WARMUP", "train.warmup_steps", WHOLE),
    Mapped("TRAIN.WARMUP_INIT_LR", "train.warmup_init_lr", NUMBER, "In the units of `train.base_lr`."),
    Mapped("TRAIN.STEPS_PER_EPOCH", "train.steps_per_epoch", WHOLE, "Replaces `train.images_per_epoch`."),
    Removed(
        "TRAIN.STARTING_EPOCH",
        "a checkpoint stores where the run stopped",
        "remove it; `maskfleet train` on an existing run directory resumes from its last checkpoint",
        accepts=("1",),
    ),
    Mapped(
        "TRAIN.LR_SCHEDULE",
        "train.step_schedule",
        STEP_SCHEDULE,
        "`1x` is [120000, 160000, 180000]; `kx` ends at k·180000 and drops 120000 and 40000 steps before that. "
        "Replaces `train.epoch_schedule`.",
    ),
    Mapped("TRAIN.EVAL_PERIOD", "eval.every_epochs", PERIOD),
    Mapped("TRAIN.CHECKPOINT_PERIOD", "checkpoint.every_epochs", WHOLE),
    Mapped("PREPROC.TRAIN_SHORT_EDGE_SIZE", "data.train_short_edge_px", SHORT_EDGE, "One number is both ends."),
    Mapped("PREPROC.TEST_SHORT_EDGE_SIZE", "data.test_short_edge_px", WHOLE),
    Mapped("PREPROC.MAX_SIZE", "model.max_size_px", WHOLE),
    Mapped("PREPROC.PIXEL_MEAN", "model.pixel_mean_rgb", NUMBERS, "Red, green, blue, as before."),
    Mapped("PREPROC.PIXEL_STD", "model.pixel_std_rgb", NUMBERS, "Red, green, blue, as before."),
    Mapped("RPN.ANCHOR_STRIDE", "model.rpn.anchor_stride", WHOLE),
    Mapped("RPN.ANCHOR_SIZES", "model.rpn.anchor_sizes", NUMBERS),
    Mapped("RPN.ANCHOR_RATIOS", "model.rpn.anchor_ratios", NUMBERS),
    Mapped("RPN.POSITIVE_ANCHOR_THRESH", "model.rpn.positive_iou", NUMBER),
    Mapped("RPN.NEGATIVE_ANCHOR_THRESH", "model.rpn.negative_iou", NUMBER),
    Mapped("RPN.FG_RATIO", "model.rpn.positive_fraction", NUMBER),
    Mapped("RPN.BATCH_PER_IM", "model.rpn.samples_per_image", WHOLE),
    Mapped("RPN.MIN_SIZE", "model.rpn.min_size", NUMBER),
    Mapped("RPN.PROPOSAL_NMS_THRESH", "model.rpn.nms_iou", NUMBER),
    Mapped("RPN.CROWD_OVERLAP_THRESH", "model.rpn.crowd_overlap", NUMBER),
    Mapped("RPN.HEAD_DIM", "model.rpn.head_channels", WHOLE),
    Mapped("RPN.TRAIN_PRE_NMS_TOPK", "model.rpn.train_pre_nms", WHOLE),
    Mapped("RPN.TRAIN_POST_NMS_TOPK", "model.rpn.train_post_nms", WHOLE),
    Mapped("RPN.TEST_PRE_NMS_TOPK", "model.rpn.test_pre_nms", WHOLE),
    Mapped("RPN.TEST_POST_NMS_TOPK", "model.rpn.test_post_nms", WHOLE),
    Mapped(
        "RPN.TRAIN_PER_LEVEL_NMS_TOPK",
        ("model.rpn.train_per_level_pre_nms", "model.rpn.train_per_level_post_nms", "model.rpn.train_per_image"),
        WHOLE,
        "TensorPack used one number for all three.",
    ),
    Mapped(
        "RPN.TEST_PER_LEVEL_NMS_TOPK",
        ("model.rpn.test_per_level_pre_nms", "model.rpn.test_per_level_post_nms", "model.rpn.test_per_image"),
        WHOLE,
        "TensorPack used one number for all three.",
    ),
    Removed(
        "RPN.NUM_ANCHOR",
        "it follows from the anchor sizes and ratios",
        "remove it; set model.rpn.anchor_sizes and model.rpn.anchor_ratios",
        accepts=("15",),
    ),
    Mapped("FRCNN.BATCH_PER_IM", "model.box_head.samples_per_image", WHOLE),
    Mapped("FRCNN.BBOX_REG_WEIGHTS", "model.box_head.box_weights", NUMBERS),
    Mapped("FRCNN.FG_THRESH", "model.box_head.foreground_iou", NUMBER),
    Mapped("FRCNN.FG_RATIO", "model.box_head.positive_fraction", NUMBER),
    Mapped("FPN.ANCHOR_STRIDES", "model.fpn.anchor_strides", WHOLES),
    Mapped("FPN.PROPOSAL_MODE", "model.fpn.proposal_mode", choice({"Level": "Level", "Joint": "Joint"})),
    Mapped("FPN.NUM_CHANNEL", "model.fpn.channels", WHOLE),
    Mapped("FPN.NORM", "model.fpn.norm", choice({"None": "None", "GN": "GN"})),
    Mapped("FPN.FRCNN_HEAD_FUNC", "model.box_head.kind", choice(_FASTRCNN_HEADS)),
    Mapped("FPN.FRCNN_CONV_HEAD_DIM", "model.box_head.conv_channels", WHOLE),
    Mapped("FPN.FRCNN_FC_HEAD_DIM", "model.box_head.fc_channels", WHOLE),
    Mapped("FPN.MRCNN_HEAD_FUNC", "model.mask_head.kind", choice(_MASK_HEADS)),
    Mapped("FPN.CASCADE", "model.cascade", FLAG),
    Removed(
        "FPN.RESOLUTION_REQUIREMENT",
        "it follows from the pyramid: images are padded to a multiple of 32 pixels",
        accepts=("32",),
    ),
    Mapped("MRCNN.HEAD_DIM", "model.mask_head.channels", WHOLE),
    Mapped("MRCNN.ACCURATE_PASTE", "eval.accurate_paste", FLAG),
    Mapped("CASCADE.IOUS", "model.cascade_head.foreground_ious", NUMBERS),
    Mapped("CASCADE.BBOX_REG_WEIGHTS", "model.cascade_head.box_weights", NUMBER_LISTS),
    Mapped("TEST.FRCNN_NMS_THRESH", "model.inference.nms_iou", NUMBER),
    Mapped("TEST.RESULT_SCORE_THRESH", "model.inference.score_threshold", NUMBER),
    Mapped("TEST.RESULT_SCORE_THRESH_VIS", "eval.show_score_threshold", NUMBER),
    Mapped("TEST.RESULTS_PER_IM", "model.inference.max_detections", WHOLE),
)

# Keys of AWS Samples' mask-rcnn-tensorflow besides TensorPack's.
AWS_SAMPLES: tuple[Row, ...] = (
    Mapped("DATA.NUM_CLASS", "model.num_categories", CLASSES_OR_DATA, "Ours does not count the background."),
    Alias("TRAIN.WARMUP_STEPS", "TRAIN.WARMUP"),
    Mapped("TRAIN.LR_EPOCH_SCHEDULE", "train.epoch_schedule", EPOCH_SCHEDULE, "Replaces `train.step_schedule`."),
    Mapped("TRAIN.BATCH_SIZE_PER_GPU", "train.images_per_gpu", WHOLE),
    Mapped("TRAIN.SEED", "train.seed", WHOLE),
    Mapped("TRAIN.GRADIENT_CLIP", "train.gradient_clip", NUMBER),
    Removed("TRAIN.BACKBONE_NCHW", _LAYOUT, accepts=("False",)),
    Removed("TRAIN.FPN_NCHW", _LAYOUT, accepts=("False",)),
    Removed("TRAIN.RPN_NCHW", _LAYOUT, accepts=("False",)),
    Removed("TRAIN.MASK_NCHW", _LAYOUT, accepts=("False",)),
    Removed(
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
    Removed("RPN.TOPK_PER_IMAGE", "proposals are always chosen image by image, never over a batch", accepts=("True",)),
    Removed(
        "RPN.SLOW_ACCURATE_MASK",
        "the proposal losses always leave out exactly the anchors they should",
        accepts=("True",),
    ),
    Mapped("RPN.UNQUANTIZED_ANCHOR", "model.rpn.legacy_anchors", NOT_FLAG, "Inverted: False sets it."),
    Mapped("FPN.BOXCLASS_HEAD_FUNC", "model.box_head.kind", choice(_BOXCLASS_HEADS)),
    Alias("FPN.BOXCLASS_CONV_HEAD_DIM", "FPN.FRCNN_CONV_HEAD_DIM"),
    Alias("FPN.BOXCLASS_FC_HEAD_DIM", "FPN.FRCNN_FC_HEAD_DIM"),
    Mapped("TEST.BOX_TARGET", "train.target_box_ap", NUMBER),
    Mapped("TEST.MASK_TARGET", "train.target_mask_ap", NUMBER),
    Mapped("TEST.BATCH_SIZE_PER_GPU", "eval.images_per_gpu", WHOLE),
)

# Flags of both training scripts.
FLAGS: tuple[Row, ...] = (
    Mapped("load", "train.weights", FILE, "Starts from a detector; a stopped run resumes without it."),
    Mapped("throughput_log_freq", "train.log_every_steps", WHOLE),
    Mapped("images_per_epoch", "train.images_per_epoch", WHOLE, "Replaces `train.steps_per_epoch`."),
    Mapped("fp16", "train.precision", _HALF, "True is fp16, False is fp32."),
    Removed(
        "logdir",
        "the run directory is not part of the configuration, so that one configuration serves many runs",
        "remove it, and pass the run directory to `maskfleet train`",
    ),
    Removed("config", "it introduced KEY=VALUE pairs", "write each pair as --set KEY=VALUE"),
    Removed("evaluate", "evaluation is a command", "use `maskfleet eval RUN_OR_WEIGHTS`"),
    Removed("predict", "prediction is a command", "use `maskfleet predict RUN_OR_WEIGHTS IMAGE…`"),
    Removed("visualize", "drawing is part of prediction", "use `maskfleet predict RUN_OR_WEIGHTS IMAGE…`"),
    Removed(
        "async_eval",
        "all ranks evaluate together between two epochs",
        "remove it; eval.every_epochs sets how often, train.target_box_ap when to stop early",
        accepts=("False",),
    ),
    Removed("tfprof", _PROFILER, accepts=("False",)),
    Removed("tfprof_start_step", _PROFILER),
    Removed("tfprof_end_step", _PROFILER),
    Removed(
        "log_full_git_diff",
        "a run is described by its run.yaml, not by the state of a source folder",
        accepts=("False",),
    ),
)

# Hyperparameters of the SageMaker notebooks, most of which are chart values too.
HYPERPARAMETERS: tuple[Row, ...] = (
    Alias("mode_fpn", "MODE_FPN"),
    Alias("mode_mask", "MODE_MASK"),
    Alias("eval_period", "TRAIN.EVAL_PERIOD"),
    Alias("eval_period_in_epochs", "TRAIN.EVAL_PERIOD"),
    Alias("lr_schedule", "TRAIN.LR_SCHEDULE"),
    Alias("lr_epoch_schedule", "TRAIN.LR_EPOCH_SCHEDULE"),
    Alias("base_lr", "TRAIN.BASE_LR", "Values of the optimized chart are in the unit of the recipe `optimized`."),
    Alias("batch_norm", "BACKBONE.NORM"),
    Alias("backbone_norm", "BACKBONE.NORM"),
    Alias("batch_size_per_gpu", "TRAIN.BATCH_SIZE_PER_GPU"),
    Alias("steps_per_epoch", "TRAIN.STEPS_PER_EPOCH"),
    Alias("data_train", "DATA.TRAIN"),
    Alias("data_val", "DATA.VAL"),
    Mapped("resnet_arch", "model.backbone.blocks", choice({"resnet50": R50_BLOCKS, "resnet101": R101_BLOCKS})),
    Mapped("backbone_weights", "model.backbone.weights", _PRETRAINED, "A bare file name is in pretrained-models/."),
    Mapped("load_model", "train.weights", _PRETRAINED, "A bare file name is in pretrained-models/."),
    Nested("extra_config", "Its value, OLD_NAME=VALUE, is translated like a setting of its own."),
    Mapped("tf_enable_auto_mixed_precision", "train.precision", _HALF, "1 is fp16, 0 is fp32."),
)


def _launch(name: str, why: str, remedy: str) -> Removed:
    return Removed(name, f"it belongs to `maskfleet launch`, which decides where a run is executed: {why}", remedy)


CHART_VALUES: tuple[Row, ...] = (
    _launch(
        "gpus", "ranks are nodes times the GPUs of the instance", "use `maskfleet launch --nodes N --instance TYPE`"
    ),
    _launch("gpu_nodes", "it is the number of nodes", "use `maskfleet launch --nodes N`"),
    _launch("gpus_per_node", "it follows from the instance type", "use `maskfleet launch --instance TYPE`"),
    _launch("gpu_instance_type", "it is the instance type", "use `maskfleet launch --instance TYPE`"),
    _launch("name", "it is the name of the job", "remove it; `maskfleet launch` names the job after the run"),
    _launch("namespace", "it is the namespace of the job", "set namespace of `maskfleet launch --on eks`"),
    _launch("image", "it is the training image", "set image of `maskfleet launch`"),
    _launch("image_pull_policy", "it belongs to the training image", "remove it, or set it in the chart's values"),
    _launch("shared_fs", "it is the shared volume's mount", "set shared_path of `maskfleet launch --on eks`"),
    _launch("shared_pvc", "it is the shared volume's claim", "set shared_claim of `maskfleet launch --on eks`"),
    _launch("data_fs", "it is the data volume's mount", "set data_path of `maskfleet launch --on eks`"),
    Removed(
        "data_dir",
        "it was the second half of a path, after data_fs",
        "set the whole path: data.root=/DATA_FS/DATA_DIR, such as data.root=/fsx/data/coco2017",
    ),
    _launch("train_script", "the program is always `maskfleet train`", "remove it"),
    _launch("working_dir", "the program needs no working directory", "remove it"),
    _launch("backoff_limit", "it counts restarts of the job", "set retries of `maskfleet launch --on eks`"),
    _launch("nccl_socket_ifname", "it selects network interfaces", "set NCCL_SOCKET_IFNAME in the job's environment"),
    _launch("nccl_debug", "it is the log level of NCCL", "set NCCL_DEBUG in the job's environment"),
    _launch("if_exclude", "it selects network interfaces for Open MPI", "set it where the job is launched"),
    Removed("horovod_autotune", _HOROVOD, accepts=("1", "0")),
    Removed("horovod_log_level", _HOROVOD, accepts=("INFO",)),
    Removed("horovod_cycle_time", _HOROVOD, accepts=("0.5",)),
    Removed("horovod_fusion_threshold", _HOROVOD, accepts=("67108864",)),
    Removed("nccl_min_rings", "NCCL chooses its channels automatically", accepts=("8",)),
    Removed("tf_device_min_sys_mem_mb", "it reserved memory for TensorFlow", accepts=("4096", "2560")),
)

ENVIRONMENT: tuple[Row, ...] = (
    Mapped("TENSORPACK_FP16", "train.precision", _HALF, "1 is fp16, 0 is fp32."),
    Alias("TF_ENABLE_AUTO_MIXED_PRECISION", "tf_enable_auto_mixed_precision"),
    Removed("TF_*", "it is read by TensorFlow, which is not used"),
    Removed("HOROVOD_*", "it is read by Horovod, which torch.distributed replaces"),
    Removed("NCCL_*", "it is an environment variable of NCCL, not a setting", "set it in the environment of the job"),
    Removed("OMPI_*", "it is an environment variable of Open MPI, not a setting", "set it where the job is launched"),
    Removed("SM_*", "SageMaker sets it inside the job, where it is read"),
)


TABLE: dict[str, tuple[Row, ...]] = {
    "TensorPack": TENSORPACK,
    "AWS Samples": AWS_SAMPLES,
    "Flags of the training scripts": FLAGS,
    "SageMaker hyper-parameters and chart values": HYPERPARAMETERS,
    "Chart values about the cluster": CHART_VALUES,
    "Environment variables": ENVIRONMENT,
}
