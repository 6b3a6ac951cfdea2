"""ReLU's gradient in every layer of R50-FPN Mask R-CNN with frozen batch normalisation, compared with torch's.

    python benchmarks/relu_backward.py [--batch 16] [--tune] [--out FILE]

Each layer is measured alone (canvas of 800 x 1344, bf16, channels last), captured as a CUDA graph and replayed with a
cold cache; times are medians. The peer adds up the gradients of the readers, applies `threshold_backward` and sums over
pixels, eagerly. `least_ms` is the traffic of our kernel at the GPU's copy speed. Every layer is checked against the
peer. `--tune` measures other tile sizes on all layers together. Results are appended to FILE.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from group_norm import PROGRAMS, TILES, median_ms
from machine import machine_facts
from maskfleet.bench.roofline import KNOWN

HALF = 2  # bytes
STAGES = ((8, 128, 4), (16, 256, 6), (32, 512, 3))  # stride, inner channels and blocks of those that are trained
EXPANSION = 4
MASKS_PER_IMAGE, MASK_CHANNELS, MASK_SIDE, MASK_CONVS = 128, 256, 14, 4
MAX_ERROR = 2e-2  # the peer rounds after each sum


@dataclass(frozen=True, slots=True)
class Layer:
    """One ReLU of a step."""

    shape: tuple[int, int, int, int]  # n, C, h, w
    readers: int

    @property
    def least_bytes(self) -> int:
        """Gradients and outputs read once, the result written once."""
        return HALF * torch.Size(self.shape).numel() * (self.readers + 2)

    def inputs(self, device: str) -> tuple[list[Tensor], Tensor]:
        """Gradients of the readers, and outputs."""
        generator = torch.Generator(device).manual_seed(0)

        def half() -> Tensor:
            values = torch.randn(self.shape, generator=generator, device=device)
            return values.to(torch.bfloat16).contiguous(memory_format=torch.channels_last)

        return [half() for _ in range(self.readers)], half().relu_()


def main() -> None:
    options = _options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = model_layers(options.batch, *options.canvas)
    rows = [measured(layer, count, device) for layer, count in layers.items()]
    record: dict[str, Any] = {"what": "relu_backward", "batch": options.batch, "canvas": options.canvas}
    record |= {name: _total(rows, name) for name in ("ms", "peer_ms", "least_ms")}
    if options.tune:
        record["tuned"] = tuned(layers, device)
    record["layers"] = rows
    record |= machine_facts()
    print(json.dumps({name: value for name, value in record.items() if name not in ("layers", "tuned")}), flush=True)
    if options.out is not None:
        with options.out.open("a") as file:
            file.write(json.dumps(record) + "\n")


def model_layers(batch: int, height: int, width: int) -> Counter[Layer]:
    """Every ReLU with a gradient in backbone and mask head; a block of the backbone has three."""
    found: Counter[Layer] = Counter()
    for stride, inner, blocks in STAGES:
        sides = (height // stride, width // stride)
        found[Layer((batch, inner, 2 * sides[0], 2 * sides[1]), 1)] += 1  # before the stride of the first block
        found[Layer((batch, inner, *sides), 1)] += 2 * blocks - 1
        found[Layer((batch, EXPANSION * inner, *sides), 2)] += blocks - 1  # the next block and its shortcut
        is_last = stride == STAGES[-1][0]
        found[Layer((batch, EXPANSION * inner, *sides), 1 if is_last else 3)] += 1  # and the pyramid
    found[Layer((batch * MASKS_PER_IMAGE, MASK_CHANNELS, MASK_SIDE, MASK_SIDE), 1)] += MASK_CONVS
    return found


def measured(layer: Layer, count: int, device: str) -> dict[str, Any]:
    """Times of a layer and of the peer, also printed; fails if they disagree."""
    from maskfleet.ops.triton.relu import relu_backward

    gradients, outputs = layer.inputs(device)
    for one, other in zip(relu_backward(gradients, outputs, True), peer(gradients, outputs), strict=True):
        error = (one - other).float().norm() / other.float().norm()
        assert error < MAX_ERROR, f"{layer}: wrong by {error.item()}"
    row: dict[str, Any] = {"shape": layer.shape, "readers": layer.readers, "count": count}
    row["ms"] = median_ms(lambda: relu_backward(gradients, outputs, True), device)
    row["peer_ms"] = median_ms(lambda: peer(gradients, outputs), device)
    gpu = KNOWN.get(torch.cuda.get_device_name()) if device == "cuda" else None
    if gpu is not None:
        row["least_ms"] = round(1000 * layer.least_bytes / gpu.bytes_per_s, 4)
    print(row, flush=True)
    return row


def peer(gradients: list[Tensor], outputs: Tensor) -> tuple[Tensor, Tensor]:
    """The same by torch's operators."""
    masked = torch.ops.aten.threshold_backward(functools.reduce(torch.add, gradients), outputs, 0)
    return masked, masked.sum(dim=(0, 2, 3), dtype=torch.float32)


def tuned(layers: Counter[Layer], device: str) -> list[dict[str, Any]]:
    """Times of all layers with other tiles."""
    from maskfleet.ops.triton import relu as kernels

    rows = []
    for (kernels.TILE, kernels.WARPS), kernels.PROGRAMS in itertools.product(TILES, PROGRAMS):
        times = []
        for layer, count in layers.items():
            run = functools.partial(kernels.relu_backward, *layer.inputs(device), True)
            times.append({"count": count, "ms": median_ms(run, device)})
        row = {"tile": kernels.TILE, "warps": kernels.WARPS, "programs": kernels.PROGRAMS, "ms": _total(times, "ms")}
        print(row, flush=True)
        rows.append(row | {"layers_ms": [time["ms"] for time in times]})
    return rows


def _total(rows: list[dict[str, Any]], name: str) -> float:
    """Milliseconds of a step."""
    return round(sum(row["count"] * row.get(name, 0.0) for row in rows), 3)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--canvas", type=int, nargs=2, default=(800, 1344), metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    main()
