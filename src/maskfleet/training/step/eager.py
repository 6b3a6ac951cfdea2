"""One training step in eager mode: forward, backward, and the update when it is due."""

from __future__ import annotations

import inspect
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from maskfleet.batch import Batch
from maskfleet.errors import TrainingError
from maskfleet.model.mask_rcnn import MaskRCNN
from maskfleet.training.optim import gradient_norm, set_lr, trainable
from maskfleet.training.step.precision import Precision

Scalars = dict[str, Tensor]

# torch 2.13 renamed the option.
_DDP_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
_NO_BUFFER_SYNC: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _DDP_OPTIONS else "broadcast_buffers": False
}


@dataclass(frozen=True, slots=True)
class StepSettings:
    """How steps are computed and when the weights are updated, whether the step is compiled or not."""

    precision: Precision
    gradient_clip: float = 0.0  # largest norm of all gradients together; 0 for off
    steps_per_update: int = 1
    world_size: int = 1


class TrainStep(nn.Module):
    """The model as a function of a batch, with or without metrics, so that DDP can wrap it."""

    def __init__(self, model: MaskRCNN) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch, with_metrics: bool) -> tuple[Scalars, Scalars]:
        if with_metrics:
            return self.model.losses_and_metrics(batch)
        return self.model.losses(batch), {}


class StepRunner:
    """Trains the model on one rank, synchronised with the others."""

    def __init__(self, model: MaskRCNN, optimizer: torch.optim.SGD, settings: StepSettings) -> None:
        self.optimizer = optimizer
        self.settings = settings
        self._parameters = list(trainable(model).values())
        self._module: nn.Module = TrainStep(model)
        if settings.world_size > 1:
            device = settings.precision.device
            self._module = DistributedDataParallel(
                self._module,
                device_ids=[device] if device.type == "cuda" else None,
                gradient_as_bucket_view=True,
                **_NO_BUFFER_SYNC,  # they are frozen, or SyncBN reduces them over the ranks itself
            )

    def step(self, batch: Batch, *, lr: float, update: bool, with_metrics: bool) -> tuple[Scalars, Scalars]:
        """Losses and metrics of `batch`; with `update`, the weights are updated by all gradients since the last one."""
        precision = self.settings.precision
        with self._gradient_sync(update):
            with precision.autocast():
                losses, metrics = self._module(batch, with_metrics)
            total = torch.stack(list(losses.values())).sum()
            raise_if_nonfinite(total, losses, batch)
            precision.scaler.scale(total / self.settings.steps_per_update).backward()  # type: ignore[no-untyped-call]
        if update:
            self._update(lr, batch)
        return losses, metrics

    def _update(self, lr: float, batch: Batch) -> None:
        scaler = self.settings.precision.scaler
        scaler.unscale_(self.optimizer)
        norm = gradient_norm(self._parameters)
        if not scaler.is_enabled():  # fp16 overflows occasionally, and its scaler skips the step
            raise_if_nonfinite(norm, {"gradient norm": norm}, batch)
        if self.settings.gradient_clip > 0:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self.settings.gradient_clip, norm)
        set_lr(self.optimizer, lr)
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def _gradient_sync(self, update: bool) -> AbstractContextManager[object]:
        """DDP reduces gradients over the ranks only in steps that update the weights."""
        if update or not isinstance(self._module, DistributedDataParallel):
            return nullcontext()
        return self._module.no_sync()


def raise_if_nonfinite(value: Tensor, terms: Scalars, batch: Batch) -> None:
    """Raise TrainingError if `value` is not finite, before it corrupts the weights."""
    if bool(torch.isfinite(value)):
        return
    numbers = {name: float(term.detach()) for name, term in terms.items()}
    bad = ", ".join(f"{name} = {number:g}" for name, number in numbers.items() if not math.isfinite(number))
    images = ", ".join(str(image) for image in batch.image_ids.tolist())
    raise TrainingError(
        f"the loss is not a finite number ({bad or 'the sum overflows'}) on images {images}; the weights are unchanged",
        remedy="check these images with `maskfleet data inspect`; if they are fine, lower train.base_lr, increase "
        "train.warmup_steps, or set train.gradient_clip",
    )
