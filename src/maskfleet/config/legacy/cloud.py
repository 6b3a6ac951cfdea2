"""Hyperparameters of the SageMaker notebooks, values of the two EKS charts, and environment variables of both."""

from __future__ import annotations

from maskfleet.config.legacy.row import Alias, Explained, Mapped, Nested, Row
from maskfleet.config.legacy.values import choice, in_folder, switch
from maskfleet.config.model import R50_BLOCKS, R101_BLOCKS

_PRETRAINED = in_folder("pretrained-models")
_HALF = switch(on="fp16", off="fp32")

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
    Mapped(
        "backbone_weights",
        "model.backbone.weights",
        _PRETRAINED,
        "A bare file name is in pretrained-models/.",
    ),
    Mapped("load_model", "train.weights", _PRETRAINED, "A bare file name is in pretrained-models/."),
    Nested("extra_config", "Its value, OLD_NAME=VALUE, is translated like a setting of its own."),
    Mapped("tf_enable_auto_mixed_precision", "train.precision", _HALF, "1 is fp16, 0 is fp32."),
)


def _launch(name: str, why: str, remedy: str) -> Explained:
    return Explained(name, f"it belongs to `maskfleet launch`, which decides where a run is executed: {why}", remedy)


def _horovod(name: str, accepts: tuple[str, ...]) -> Explained:
    return Explained(
        name,
        "it configured Horovod, which torch.distributed replaces",
        "remove it",
        accepts=accepts,
    )


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
    Explained(
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
    _horovod("horovod_autotune", ("1", "0")),
    _horovod("horovod_log_level", ("INFO",)),
    _horovod("horovod_cycle_time", ("0.5",)),
    _horovod("horovod_fusion_threshold", ("67108864",)),
    Explained("nccl_min_rings", "NCCL chooses its channels automatically", "remove it", accepts=("8",)),
    Explained("tf_device_min_sys_mem_mb", "it reserved memory for TensorFlow", "remove it", accepts=("4096", "2560")),
)

ENVIRONMENT: tuple[Row, ...] = (
    Mapped("TENSORPACK_FP16", "train.precision", _HALF, "1 is fp16, 0 is fp32."),
    Alias("TF_ENABLE_AUTO_MIXED_PRECISION", "tf_enable_auto_mixed_precision"),
    Explained("TF_*", "it is read by TensorFlow, which is not used", "remove it"),
    Explained("HOROVOD_*", "it is read by Horovod, which torch.distributed replaces", "remove it"),
    Explained("NCCL_*", "it is an environment variable of NCCL, not a setting", "set it in the environment of the job"),
    Explained("OMPI_*", "it is an environment variable of Open MPI, not a setting", "set it where the job is launched"),
    Explained("SM_*", "SageMaker sets it inside the job, where it is read", "remove it"),
)
