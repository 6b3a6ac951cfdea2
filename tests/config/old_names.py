"""Names of the old systems, written out by hand, system by system; and of our fields that none of them had."""

from __future__ import annotations


def words(text: str) -> list[str]:
    return text.split()


TENSORPACK_KEYS = words("""
TRAINER MODE_MASK MODE_FPN
DATA.BASEDIR DATA.TRAIN DATA.VAL DATA.NUM_CATEGORY DATA.CLASS_NAMES DATA.ABSOLUTE_COORD DATA.FILTER_EMPTY_ANNOTATIONS
DATA.NUM_WORKERS
BACKBONE.WEIGHTS BACKBONE.RESNET_NUM_BLOCKS BACKBONE.FREEZE_AFFINE BACKBONE.NORM BACKBONE.FREEZE_AT
BACKBONE.TF_PAD_MODE BACKBONE.STRIDE_1X1
TRAIN.NUM_GPUS TRAIN.WEIGHT_DECAY TRAIN.BASE_LR TRAIN.WARMUP TRAIN.WARMUP_INIT_LR TRAIN.STEPS_PER_EPOCH
TRAIN.STARTING_EPOCH TRAIN.LR_SCHEDULE TRAIN.EVAL_PERIOD TRAIN.CHECKPOINT_PERIOD
PREPROC.TRAIN_SHORT_EDGE_SIZE PREPROC.TEST_SHORT_EDGE_SIZE PREPROC.MAX_SIZE PREPROC.PIXEL_MEAN PREPROC.PIXEL_STD
RPN.ANCHOR_STRIDE RPN.ANCHOR_SIZES RPN.ANCHOR_RATIOS RPN.POSITIVE_ANCHOR_THRESH RPN.NEGATIVE_ANCHOR_THRESH
RPN.FG_RATIO RPN.BATCH_PER_IM RPN.MIN_SIZE RPN.PROPOSAL_NMS_THRESH RPN.CROWD_OVERLAP_THRESH RPN.HEAD_DIM
RPN.TRAIN_PRE_NMS_TOPK RPN.TRAIN_POST_NMS_TOPK RPN.TEST_PRE_NMS_TOPK RPN.TEST_POST_NMS_TOPK
RPN.TRAIN_PER_LEVEL_NMS_TOPK RPN.TEST_PER_LEVEL_NMS_TOPK RPN.NUM_ANCHOR
FRCNN.BATCH_PER_IM FRCNN.BBOX_REG_WEIGHTS FRCNN.FG_THRESH FRCNN.FG_RATIO
FPN.ANCHOR_STRIDES FPN.PROPOSAL_MODE FPN.NUM_CHANNEL FPN.NORM FPN.FRCNN_HEAD_FUNC FPN.FRCNN_CONV_HEAD_DIM
FPN.FRCNN_FC_HEAD_DIM FPN.MRCNN_HEAD_FUNC FPN.CASCADE FPN.RESOLUTION_REQUIREMENT
MRCNN.HEAD_DIM MRCNN.ACCURATE_PASTE CASCADE.IOUS CASCADE.BBOX_REG_WEIGHTS
TEST.FRCNN_NMS_THRESH TEST.RESULT_SCORE_THRESH TEST.RESULT_SCORE_THRESH_VIS TEST.RESULTS_PER_IM
""")

AWS_SAMPLES_KEYS = words("""
DATA.NUM_CLASS TRAIN.WARMUP_STEPS TRAIN.LR_EPOCH_SCHEDULE TRAIN.BATCH_SIZE_PER_GPU TRAIN.SEED TRAIN.GRADIENT_CLIP
TRAIN.BACKBONE_NCHW TRAIN.FPN_NCHW TRAIN.RPN_NCHW TRAIN.MASK_NCHW TRAIN.SHOULD_STOP
PREPROC.PREDEFINED_PADDING PREPROC.PADDING_SHAPES
RPN.TRAIN_PER_LEVEL_PRE_NMS_TOPK RPN.TEST_PER_LEVEL_PRE_NMS_TOPK
RPN.TRAIN_PER_LEVEL_POST_NMS_TOPK RPN.TEST_PER_LEVEL_POST_NMS_TOPK
RPN.TRAIN_IMAGE_POST_NMS_TOPK RPN.TEST_IMAGE_POST_NMS_TOPK RPN.TOPK_PER_IMAGE RPN.SLOW_ACCURATE_MASK
RPN.UNQUANTIZED_ANCHOR FPN.BOXCLASS_HEAD_FUNC FPN.BOXCLASS_CONV_HEAD_DIM FPN.BOXCLASS_FC_HEAD_DIM
TEST.BOX_TARGET TEST.MASK_TARGET TEST.BATCH_SIZE_PER_GPU
load logdir visualize evaluate predict config async_eval throughput_log_freq images_per_epoch
fp16 tfprof tfprof_start_step tfprof_end_step log_full_git_diff
""")

SAGEMAKER_NAMES = words("""
mode_fpn mode_mask eval_period lr_schedule lr_epoch_schedule batch_norm batch_size_per_gpu images_per_epoch data_train
data_val resnet_arch backbone_weights load_model horovod_cycle_time horovod_fusion_threshold nccl_min_rings
TENSORPACK_FP16 config:TRAIN.BASE_LR config:BACKBONE.FREEZE_AT
""")

CHART_NAMES = words("""
global.namespace global.shared_fs global.shared_pvc maskrcnn.name gpus gpu_nodes gpus_per_node gpu_instance_type image
image_pull_policy train_script working_dir data_fs data_dir steps_per_epoch lr_schedule base_lr eval_period_in_epochs
data_train data_val mode_fpn mode_mask backbone_norm backbone_weights nccl_socket_ifname if_exclude
tf_device_min_sys_mem_mb tf_enable_auto_mixed_precision nccl_debug horovod_autotune horovod_log_level extra_config
backoff_limit batch_size_per_gpu images_per_epoch lr_epoch_schedule maskrcnn.batch_size_per_gpu maskrcnn.gpus
HOROVOD_AUTOTUNE HOROVOD_LOG_LEVEL NCCL_SOCKET_IFNAME NCCL_DEBUG TF_DEVICE_MIN_SYS_MEMORY_IN_MB TF_CPP_MIN_LOG_LEVEL
TF_GPU_ALLOCATOR TF_AUTOTUNE_THRESHOLD TF_ENABLE_AUTO_MIXED_PRECISION TF_ENABLE_CUBLAS_TENSOR_OP_MATH_FP32
TF_ENABLE_CUDNN_TENSOR_OP_MATH_FP32 HOROVOD_HIERARCHICAL_ALLREDUCE HOROVOD_HIERARCHICAL_ALLGATHER
HOROVOD_TORUS_ALLREDUCE HOROVOD_CYCLE_TIME HOROVOD_FUSION_THRESHOLD NCCL_MIN_NRINGS
""")

# What the old trainers could not be told.
NEW_HERE = words("""
recipe model.roi_align model.loss_mean_over model.backbone.kind model.backbone.stem_channels
model.box_head.fill_with_foreground
model.box_head.box_loss data.flip_probability data.scale_jitter data.color_jitter data.on_bad data.cache_dir
data.cache_gb data.max_image_mpx data.allow_outside
train.accumulate_to_images train.base_lr_images train.momentum train.compile train.exchange_dtype train.ema_decay
train.join_timeout_s train.peer_timeout_s eval.max_images eval.precision eval.compile
checkpoint.every_minutes checkpoint.keep_last checkpoint.keep_best log.all_metrics log.wandb log.mlflow
train.optimizer train.epochs train.steps train.decay train.patience
""")
