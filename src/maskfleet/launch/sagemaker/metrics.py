"""Metric definitions of a job: which of the run's metrics SageMaker extracts from its log lines."""

from __future__ import annotations

from maskfleet.config.run import RunConfig
from maskfleet.log import SAGEMAKER_METRICS, metric_pattern

MAX_DEFINITIONS = 40  # of a job, by SageMaker
# What the notebooks of AWS Samples left out, most useful first; as many as SageMaker allows are added.
MORE_METRICS = (
    "total_cost",
    "learning_rate",
    "images_per_s",
    "rpn_losses/label_loss",
    "rpn_losses/box_loss",
    "step",
    "epoch",
    "data_wait_s",
    "memory_mib",
    "ranks",
    "sample_fast_rcnn_targets/num_fg",
    "sample_fast_rcnn_targets/num_bg",
    "sample_fast_rcnn_targets/proposal_metrics/best_iou_per_gt",
    "sample_fast_rcnn_targets/proposal_metrics/recall_iou0.3",
    "sample_fast_rcnn_targets/proposal_metrics/recall_iou0.5",
    "mean_gt_box_area",
)
_BOX_HEAD = "fastrcnn_losses/"


def metric_definitions(run: RunConfig) -> list[dict[str, str]]:
    """Name and regular expression of each metric that the log lines of `run` have, at most 40.

    Without masks there are no mask metrics; a cascade has the box head's metrics of its last stage.
    """
    names = [_name_in(run, name) for name, _ in SAGEMAKER_METRICS if run.model.mask or not _is_of_masks(name)]
    names += MORE_METRICS[: MAX_DEFINITIONS - len(names)]
    return [{"Name": name, "Regex": metric_pattern(name)} for name in names]


def _name_in(run: RunConfig, name: str) -> str:
    if not run.model.cascade or not name.startswith(_BOX_HEAD):
        return name
    return f"cascade_loss_stage{len(run.model.cascade_head.foreground_ious)}/{name}"


def _is_of_masks(name: str) -> bool:
    return name.startswith(("maskrcnn_loss/", "mAP(segm)/"))
