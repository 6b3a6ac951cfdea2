"""How long a training step takes on a CPU, compared with torchvision's in the same process, in turns.

    python benchmarks/step_cpu.py [--peer torchvision] [--threads 2] [--rounds 7] [--out FILE]

R50-FPN Mask R-CNN, forward and backward, float32, two images of 512 x 512 with 8 objects each. Both freeze the stem and
the first group and use stored statistics. Weights are random, so a region is foreground from an IoU of 0.05 on: then
both use all 512 regions and 128 masks per image. torchvision runs in both memory layouts. `step_ms` and `cpu_ms` (of
all threads) are medians; `best_ms` is the fastest round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from machine import machine_facts
from maskfleet.batch import Batch
from maskfleet.bench.noise_batch import noise_batch
from maskfleet.config.model import ModelConfig
from maskfleet.model.build import build_mask_rcnn

NUM_CATEGORIES = 80
FULL_SLOTS_IOU = 0.05

Step = Callable[[], dict[str, Tensor]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=["torchvision"])
    parser.add_argument("--side", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "step_cpu.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    batch = noise_batch(options.batch, canvas=(options.side, options.side), size=(options.side, options.side))
    sides: dict[str, Step] = {"maskfleet": our_step(batch)}
    if options.peer == "torchvision":
        sides["torchvision"] = peer_step(batch, options.side, torch.contiguous_format)
        sides["torchvision_channels_last"] = peer_step(batch, options.side, torch.channels_last)
    record = machine_facts() | {
        "images": f"{options.batch} of {options.side} x {options.side}",
        "threads": options.threads,
        "rounds": options.rounds,
    }
    record |= measured(sides, options.rounds)
    if options.peer is not None:
        record["faster peer / maskfleet"] = {
            name: round(
                min(ms for side, ms in record[name].items() if side != "maskfleet") / record[name]["maskfleet"], 2
            )
            for name in ("step_ms", "cpu_ms", "best_ms")
        }
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


def measured(sides: dict[str, Step], rounds: int) -> dict[str, Any]:
    """Median wall and CPU milliseconds of a step of each side, measured in turns; the first round is a warm-up."""
    wall: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    losses = {}
    for number in range(rounds + 1):
        for name, step in sides.items():
            started_s, started_cpu_s = time.perf_counter(), time.process_time()
            terms = step()
            torch.stack(list(terms.values())).sum().backward()
            if number > 0:
                wall[name].append(1000 * (time.perf_counter() - started_s))
                cpu[name].append(1000 * (time.process_time() - started_cpu_s))
            losses[name] = {term: round(value.item(), 4) for term, value in terms.items()}
    return {
        "step_ms": {name: round(statistics.median(times), 1) for name, times in wall.items()},
        "cpu_ms": {name: round(statistics.median(times), 1) for name, times in cpu.items()},
        "best_ms": {name: round(min(times), 1) for name, times in wall.items()},
        "all_step_ms": {name: [round(ms) for ms in times] for name, times in wall.items()},
        "losses": losses,
    }


def our_step(batch: Batch) -> Step:
    torch.manual_seed(0)
    config = ModelConfig.model_validate(
        {"num_categories": NUM_CATEGORIES, "max_size_px": 512, "box_head": {"foreground_iou": FULL_SLOTS_IOU}}
    )
    model = build_mask_rcnn(config).train()
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    _, metrics = model.losses_and_metrics(batch)
    print("maskfleet foreground per image:", metrics["sample_fast_rcnn_targets/num_fg"].item())

    def step() -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        return model(batch)

    return step


def peer_step(batch: Batch, side: int, layout: torch.memory_format) -> Step:
    """torchvision's model as its reference trains it: three trainable layers and frozen batch norm."""
    from torchvision.models import resnet50
    from torchvision.models.detection import MaskRCNN
    from torchvision.models.detection.backbone_utils import _resnet_fpn_extractor
    from torchvision.ops import FrozenBatchNorm2d

    torch.manual_seed(0)
    backbone = _resnet_fpn_extractor(resnet50(weights=None, norm_layer=FrozenBatchNorm2d), 3)
    model = MaskRCNN(
        backbone,
        NUM_CATEGORIES + 1,
        min_size=side,
        max_size=side,
        box_fg_iou_thresh=FULL_SLOTS_IOU,
        box_bg_iou_thresh=FULL_SLOTS_IOU,
    ).train()
    model.to(memory_format=layout)  # type: ignore[call-overload]
    model.roi_heads.mask_head.register_forward_hook(_count_once("torchvision foreground of the batch:"))
    images = [pixels.flip(0).float() / 255 for pixels in batch.images.pixels]
    targets = []
    for boxes, labels in zip(batch.targets.boxes, batch.targets.labels, strict=True):
        masks = torch.zeros(len(boxes), side, side, dtype=torch.uint8)
        for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist(), strict=True):
            mask[top:bottom, left:right] = 1
        targets.append({"boxes": boxes, "labels": labels, "masks": masks})

    def step() -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        losses: dict[str, Tensor] = model(images, targets)
        return losses

    return step


def _count_once(words: str) -> Callable[..., None]:
    said: list[str] = []

    def hook(module: object, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if not said:
            said.append(words)
            print(words, output.shape[0])

    return hook


if __name__ == "__main__":
    main()
