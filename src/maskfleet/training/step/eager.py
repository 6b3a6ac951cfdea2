"""One training step in eager mode: forward, backward, and the update when it is due."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from maskfleet.batch import Batch
from maskfleet.model.mask_rcnn import MaskRCNN
from maskfleet.model.norm import share_statistics
from maskfleet.training.optim import gradient_norm, set_lr, trainable
from maskfleet.training.step.exchange import Exchange, gradient_buckets
from maskfleet.training.step.finite import FiniteCheck, Scalars
from maskfleet.training.step.precision import Precision
from maskfleet.training.step.split import regions_of


@dataclass(frozen=True, slots=True)
class StepSettings:
    """How steps are computed and when the weights are updated, whether the step is compiled or not."""

    precision: Precision
    gradient_clip: float = 0.0  # largest norm of all gradients together; 0 for off
    steps_per_update: int = 1
    world_size: int = 1
    exchange_dtype: torch.dtype = torch.float32  # in which gradients are sent
    split: bool = False  # exchange gradients by region also with a single rank, to measure what that costs

    @property
    def exchanges(self) -> bool:
        return self.world_size > 1 or self.split


def make_exchange(model: MaskRCNN, settings: StepSettings) -> Exchange | None:
    """The exchange of `model`'s gradients, whose weights are then those of rank 0; None if there is no other rank.

    From then on SyncBN takes its statistics from the images of all ranks.
    """
    share_statistics(model, over_ranks=settings.exchanges)
    if not settings.exchanges:
        return None
    exchange = Exchange(
        gradient_buckets(regions_of(model)), world_size=settings.world_size, dtype=settings.exchange_dtype
    )
    exchange.broadcast([*model.parameters(), *model.buffers()])
    return exchange


class StepRunner:
    """Trains the model on one rank, synchronised with the others."""

    def __init__(
        self,
        model: MaskRCNN,
        optimizer: torch.optim.Optimizer,
        settings: StepSettings,
        *,
        exchange: Exchange | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.settings = settings
        self._parameters = list(trainable(model).values())
        self.exchange = exchange or make_exchange(model, settings)
        self._check = FiniteCheck(settings.precision.device)

    def step(self, batch: Batch, *, lr: float, update: bool, with_metrics: bool) -> tuple[Scalars, Scalars]:
        """Losses and metrics of `batch`; with `update`, the weights are updated by all gradients since the last one.

        A loss that is not finite raises TrainingError; with several ranks it does so on all of them, at the update.
        """
        precision = self.settings.precision
        with precision.autocast():
            losses, metrics = self._forward(batch, with_metrics)
        total = torch.stack(list(losses.values())).sum()
        self._check.record(losses, batch.image_ids)
        if self.exchange is None and self._check.is_blocked():
            raise self._check.error(world_size=1)
        if self.exchange is not None and update:
            self.exchange.start(self._check.blocked)
        precision.scaler.scale(total / self.settings.steps_per_update).backward()  # type: ignore[no-untyped-call]
        if update:
            self._update(lr)
        return losses, metrics

    def expect_finite(self) -> None:
        """Nothing to do: every update has checked the losses before it."""

    @property
    def is_compiled(self) -> bool:
        return False

    def _forward(self, batch: Batch, with_metrics: bool) -> tuple[Scalars, Scalars]:
        if with_metrics:
            return self.model.losses_and_metrics(batch)
        return self.model.losses(batch), {}

    def _update(self, lr: float) -> None:
        scaler = self.settings.precision.scaler
        if self.exchange is not None:
            self.exchange.finish()
            self._check.blocked.copy_(self.exchange.blocked > 0)
        scaler.unscale_(self.optimizer)
        norm = gradient_norm(self._parameters)
        if not scaler.is_enabled():  # fp16 overflows occasionally, and its scaler skips the step
            self._check.block_unless_finite(norm)
        if self._check.is_blocked():
            raise self._check.error(world_size=self.settings.world_size)
        if self.settings.gradient_clip > 0:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self.settings.gradient_clip, norm)
        set_lr(self.optimizer, lr)
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
