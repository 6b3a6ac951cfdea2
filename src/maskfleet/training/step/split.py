"""The network by regions: their parameters, and the model's losses as one function per region.

Each function is compiled alone. So its backward pass is one piece, and while that of the next region computes, the
gradients of this one are exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor, nn

from maskfleet.batch import Batch, Images
from maskfleet.model.fpn import with_coarsest_map
from maskfleet.model.losses import training_losses
from maskfleet.model.mask_rcnn import MaskRCNN
from maskfleet.model.metrics import StepResults, step_results
from maskfleet.training.step.finite import Scalars


def regions_of(model: MaskRCNN) -> list[list[nn.Parameter]]:
    """The parameters of each region, in the order in which the backward pass completes their gradients.

    Heads; pyramid and RPN; the last stage of the backbone, which has most of its weights; the rest of the backbone,
    whose exchange nothing can overlap with.
    """
    last_stage = cast(nn.Module, model.backbone.last_stage)
    modules: Sequence[tuple[nn.Module | None, ...]] = (
        (model.box_heads, model.mask_head),
        (model.fpn, model.rpn),
        (last_stage,),
        (model,),
    )
    regions: list[list[nn.Parameter]] = []
    assigned: set[nn.Parameter] = set()
    for of_region in modules:
        parameters = [parameter for module in of_region if module is not None for parameter in module.parameters()]
        regions.append([parameter for parameter in parameters if parameter not in assigned])
        assigned.update(parameters)
    return regions


class SplitLosses:
    """`model.losses_and_results`, computed by one `compile`d function per region.

    Between the functions are tuples of tensors: torch 2.11 cannot return dataclasses with slots from a compiled one.
    """

    def __init__(self, model: MaskRCNN, compile: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self.model = model
        self._early_maps = compile(self._backbone_without_last_stage)
        self._last_map = compile(self._last_stage)
        self._pyramid = compile(self._pyramid_and_rpn)
        self._heads = compile(self._head_losses)

    def __call__(self, batch: Batch) -> tuple[Scalars, StepResults]:
        early = self._early_maps(batch.images)
        last = self._last_map(batch.images, early[-1])
        maps, logits, deltas = self._pyramid(batch.images, (*early, last))
        losses, results = self._heads(batch, maps, logits, deltas)
        return losses, results

    def _backbone_without_last_stage(self, images: Images) -> tuple[Tensor, ...]:
        pixels, canvas = self.model.prepared(images, learning=self.model.training)
        return tuple(self.model.backbone.early_maps(pixels, canvas))

    def _last_stage(self, images: Images, features: Tensor) -> Tensor:
        backbone = self.model.backbone
        canvas = self.model.canvas(images, learning=self.model.training)
        before, after = (canvas.areas[stride] for stride in backbone.strides[-2:])
        return backbone.last_stage(features, before, after)

    def _pyramid_and_rpn(self, images: Images, stages: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """Maps, and logits [B, N] and box deltas [B, N, 4] of the anchors."""
        model, learning = self.model, self.model.training
        canvas = model.canvas(images, learning=learning)
        maps = model.maps(stages, canvas)
        logits, deltas = model.rpn.scores_and_deltas(model.as_features(maps, canvas, images, learning=learning))
        # The coarsest map is a view of another one, and a view of an output would need a backward pass of its own.
        return maps[:-1] if model.fpn is not None else maps, logits, deltas

    def _head_losses(
        self, batch: Batch, maps: tuple[Tensor, ...], logits: Tensor, deltas: Tensor
    ) -> tuple[Scalars, StepResults]:
        model, learning = self.model, self.model.training
        canvas = model.canvas(batch.images, learning=learning)
        maps = tuple(with_coarsest_map(maps)) if model.fpn is not None else maps
        features = model.as_features(maps, canvas, batch.images, learning=learning)
        outputs = model.head_outputs(batch, features, model.rpn.at_anchors(features, logits, deltas))
        return training_losses(outputs, model.config), step_results(outputs)
