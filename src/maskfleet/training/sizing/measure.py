"""Speed and memory of eager steps on this device, on images with a few objects each."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from maskfleet.batch import Batch
from maskfleet.config.model import ModelConfig
from maskfleet.model.build import build_mask_rcnn
from maskfleet.model.mask_rcnn import MaskRCNN
from maskfleet.ops.layers.mean_over_ranks import without_communication
from maskfleet.ops.outlines import pack_outlines, polygon_edges
from maskfleet.training.sizing.choose import Trial
from maskfleet.training.step.buffers import BatchShapes, Capacity
from maskfleet.training.step.precision import Precision

OBJECTS = 8  # per image; COCO has 7.3
STEPS = 3


@dataclass(frozen=True, slots=True)
class StepTrials:
    """Measures steps of a model with random weights, which nothing else uses."""

    model: MaskRCNN
    precision: Precision
    canvas: tuple[int, int]

    @classmethod
    def of(cls, config: ModelConfig, precision: Precision, canvas: tuple[int, int]) -> StepTrials:
        model = build_mask_rcnn(config).to(precision.device).train()
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return cls(model, precision, canvas)

    def __call__(self, images: int) -> Trial | None:
        """Steps with this many images; None if they do not fit into the memory."""
        device = self.precision.device
        is_cuda = device.type == "cuda"
        if is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        try:
            batch = example_batch(images, self.canvas, masks=self.model.config.mask).to(device)
            self._step(batch)  # loads kernels
            started_at = time.perf_counter()
            for _ in range(STEPS):
                self._step(batch)
            if is_cuda:
                torch.cuda.synchronize(device)
            elapsed_s = time.perf_counter() - started_at
        except torch.OutOfMemoryError:
            return None
        finally:
            self.model.zero_grad(set_to_none=True)
        share = 0.0
        if is_cuda:
            peak, total = torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
            share = peak / total
        return Trial(images, images * STEPS / elapsed_s, share)

    def _step(self, batch: Batch) -> None:
        with without_communication(), self.precision.autocast():
            losses = self.model.losses(batch)
        torch.stack(list(losses.values())).sum().backward()  # type: ignore[no-untyped-call]


def example_batch(images: int, canvas: tuple[int, int], *, masks: bool) -> Batch:
    """Gray images that fill the canvas, with `OBJECTS` rectangles side by side in each."""
    [blank] = BatchShapes(images, (canvas,), Capacity(), masks).examples(torch.device("cpu"))
    height, width = canvas
    left = torch.arange(OBJECTS) * (width / OBJECTS)
    box = torch.stack([left, torch.full_like(left, height / 4), left + width / OBJECTS, left * 0 + height / 2], dim=1)
    targets = replace(
        blank.targets,
        boxes=box.repeat(images, 1, 1),
        labels=torch.ones(images, OBJECTS, dtype=torch.int64),
        valid=torch.ones(images, OBJECTS, dtype=torch.bool),
    )
    if masks:
        corners = [np.array([[x, y], [right, y], [right, bottom], [x, bottom]]) for x, y, right, bottom in box.tolist()]
        outline = [polygon_edges([polygon]) for polygon in corners]
        targets = replace(targets, outlines=pack_outlines([outline] * images, num_instances=OBJECTS))
    pixels = torch.full_like(blank.images.pixels, 128)
    return replace(blank, images=replace(blank.images, pixels=pixels), targets=targets)
