"""Names of the metrics that more than one part of the output uses."""

from __future__ import annotations

from collections.abc import Mapping

EPOCH, RANKS, TOTAL_LOSS = "epoch", "ranks", "total_cost"
LEARNING_RATE, IMAGES_PER_S = "learning_rate", "images_per_s"
DATA_WAIT_S, MEMORY_MIB = "data_wait_s", "memory_mib"
EVALUATION_S, CHECKPOINT_S = "evaluation_s", "checkpoint_s"
DETECT_S, SCORE_S = "evaluation_detect_s", "evaluation_score_s"


def loss_names(values: Mapping[str, float]) -> list[str]:
    """The total and the terms of the loss, without those of single pyramid levels."""
    terms = [name for name in values if name.endswith("_loss") and "/level" not in name]
    return [TOTAL_LOSS, *terms] if TOTAL_LOSS in values else terms
