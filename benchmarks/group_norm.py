"""Group normalisation of every layer of the default recipe's model, compared with torch's in the same run.

    python benchmarks/group_norm.py [--batch 8] [--tune] [--out FILE]

The layers are read off the model `scratch` trains (R50-FPN Mask R-CNN, canvas of 800 x 1344, bf16, channels last, with
the image area, the sum and the ReLU of each layer) and measured alone, forward and backward, each captured as a CUDA
graph and replayed with a cold cache; times are medians. The peer is torch's eager `F.group_norm` with sum and ReLU, on
the same tensors but without the image area, which it does not have; for the layer that takes longest, also the masked
formula compiled by Inductor. `least_ms` is the traffic of our kernels at the GPU's copy speed. Every layer is checked
against float32. `--tune` measures other tile sizes on the layers that take longest. Results are appended to FILE.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from machine import machine_facts
from maskfleet.bench.noise_batch import noise_batch
from maskfleet.bench.roofline import KNOWN
from maskfleet.config.model import ModelConfig
from maskfleet.model.build import build_mask_rcnn
from maskfleet.model.canvas import Area
from maskfleet.model.norm import GroupNorm
from maskfleet.ops.layers.group_norm import EPSILON, _normalised, group_norm
from step import MODELS

MODEL = "r50_fpn_gn_mask"
HALF = 2  # bytes
MEASURE_MS = 20
MAX_ERROR = 5e-2  # bf16 keeps three digits, and a rounded sum may fall on the other side of ReLU's 0
TILES = ((2048, 4), (4096, 4), (4096, 8), (8192, 8))  # numbers of a tile, warps
PROGRAMS = (1056, 2048, 4096)
TUNED_LAYERS = 6


@dataclass(frozen=True, slots=True)
class Layer:
    """One use of group normalisation in a step."""

    shape: tuple[int, ...]  # n, C, h, w
    groups: int
    has_mask: bool
    has_residual: bool
    relu: bool

    def least_bytes(self, *, is_small: bool) -> int:
        """Traffic of forward and backward if each pass reads and writes every number it needs once."""
        passes = (2 if is_small else 3) + self.has_residual
        if is_small:  # features and gradient, with the outputs for their sign
            passes += 3 + self.has_residual * (1 + self.relu)
        elif self.has_residual:  # the sum's gradient is written once and read instead of gradient and outputs
            passes += 6 + self.relu
        else:
            passes += 5
        return HALF * passes * torch.Size(self.shape).numel()


class Work:
    """A layer's tensors, and the functions to measure."""

    def __init__(self, layer: Layer, device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)
        maps, channels, height, width = layer.shape

        def half() -> Tensor:
            values = torch.randn(layer.shape, generator=generator, device=device)
            return (values * 2 + 1).to(torch.bfloat16).contiguous(memory_format=torch.channels_last)

        self.layer = layer
        self.features = half().requires_grad_()
        self.residual = half().requires_grad_() if layer.has_residual else None
        self.gradient = half()
        weight, bias = torch.randn(2, channels, generator=generator, device=device)
        self.weight, self.bias = weight.requires_grad_(), bias.requires_grad_()
        self.mask: Tensor | None = None
        if layer.has_mask:
            self.mask = torch.ones(maps, 1, height, width, device=device)
            self.mask[..., max(1, width * 1333 // 1344) :] = 0
        inputs = (self.features, self.weight, self.bias, self.residual)
        self.inputs = [value for value in inputs if value is not None]

    def ours(self) -> Tensor:
        options = {"mask": self.mask, "residual": self.residual, "relu": self.layer.relu}
        return group_norm(self.features, self.weight, self.bias, self.layer.groups, **options)  # type: ignore[arg-type]

    def eager(self) -> Tensor:
        # As autocast runs it: torch's kernel takes weights of the type of its input.
        weight, bias = self.weight.to(torch.bfloat16), self.bias.to(torch.bfloat16)
        normal = F.group_norm(self.features, self.layer.groups, weight, bias, EPSILON)
        total = normal if self.residual is None else normal + self.residual
        return F.relu(total) if self.layer.relu else total

    def formula(self) -> Tensor:
        """The masked formula in float32, for Inductor and for the check."""
        total = _normalised(self.features.float(), self.weight, self.bias, self.layer.groups, self.mask)
        total = total if self.residual is None else total + self.residual
        total = F.relu(total) if self.layer.relu else total
        return (total if self.mask is None else total * self.mask).to(torch.bfloat16)

    def with_gradients(self, forward: Callable[[], Tensor]) -> list[Tensor]:
        outputs = forward()
        return [outputs, *torch.autograd.grad(outputs, self.inputs, self.gradient)]


def main() -> None:
    options = _options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = model_layers(options.batch, tuple(options.canvas))
    record = {"what": "group_norm", "model": MODEL, "batch": options.batch, "canvas": options.canvas}
    rows = [measured(layer, count, device) for layer, count in layers.items()]
    rows.sort(key=lambda row: -row["count"] * (row["forward_ms"] + row["backward_ms"]))
    record |= totals(rows)
    if device == "cuda":
        record["inductor"] = inductor(Work(rows[0]["layer"], device), rows[0])
    if options.tune:
        record["tuned"] = tuned([row["layer"] for row in rows[:TUNED_LAYERS]], device)
    record["layers"] = [row | {"layer": _described(row["layer"])} for row in rows]
    record |= machine_facts()
    print(json.dumps({name: value for name, value in record.items() if name not in ("layers", "tuned")}), flush=True)
    if options.out is not None:
        with options.out.open("a") as file:
            file.write(json.dumps(record) + "\n")


def model_layers(batch: int, canvas: tuple[int, ...]) -> Counter[Layer]:
    """Every use of group normalisation in a training step, read off the model as it runs on the meta device."""
    config = ModelConfig.model_validate({"num_categories": 80, **MODELS[MODEL]})
    found: Counter[Layer] = Counter()

    run = GroupNorm.shared

    def record(module: GroupNorm, features: Tensor, area: Area | None, **options: Any) -> tuple[Tensor, ...]:
        has_mask = area is not None and area.mask is not None
        has_residual = options["residual"] is not None
        found[Layer(tuple(features.shape), module.num_groups, has_mask, has_residual, options["relu"])] += 1
        return run(module, features, area, **options)

    height, width = canvas
    with torch.device("meta"):
        model = build_mask_rcnn(config)
    batch_of_noise = noise_batch(batch, canvas=(height, width), size=(height, width - 11))
    with mock.patch.object(GroupNorm, "shared", record):
        model.to("meta").train().losses(batch_of_noise.to(torch.device("meta")))
    return found


def measured(layer: Layer, count: int, device: str) -> dict[str, Any]:
    """Times of a layer, of torch's, and the error against float32; also printed."""
    from maskfleet.ops.triton.group_norm_small import fits_small

    work = Work(layer, device)
    error = max(
        ((one.float() - other.float()).norm() / other.float().norm().clamp(min=1e-9)).item()
        for one, other in zip(work.with_gradients(work.ours), work.with_gradients(work.formula), strict=True)
    )
    assert error < MAX_ERROR, f"{layer}: wrong by {error}"
    row: dict[str, Any] = {"layer": layer, "count": count, "error": float(f"{error:.1e}")}
    for prefix, forward in (("", work.ours), ("peer_", work.eager)):
        row[f"{prefix}forward_ms"] = median_ms(forward, device)
        both = median_ms(lambda forward=forward: work.with_gradients(forward), device)
        row[f"{prefix}backward_ms"] = round(both - row[f"{prefix}forward_ms"], 4)
    gpu = KNOWN.get(torch.cuda.get_device_name()) if device == "cuda" else None
    if gpu is not None:
        is_small = fits_small(work.features, layer.groups)
        row["least_ms"] = round(1000 * layer.least_bytes(is_small=is_small) / gpu.bytes_per_s, 4)
    print(count, "x", _described(layer), {name: value for name, value in row.items() if name != "layer"}, flush=True)
    return row


def totals(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds of all layers of a step together."""

    def total(name: str) -> float:
        return round(sum(row["count"] * row.get(name, 0.0) for row in rows), 3)

    names = ("forward_ms", "backward_ms", "peer_forward_ms", "peer_backward_ms", "least_ms")
    result = {name: total(name) for name in names}
    ours, peer = result["forward_ms"] + result["backward_ms"], result["peer_forward_ms"] + result["peer_backward_ms"]
    return result | {"num_layers": sum(row["count"] for row in rows), "times_peer": round(peer / ours, 2)}


def inductor(work: Work, row: dict[str, Any]) -> dict[str, Any]:
    """The masked formula compiled by Inductor, on one layer."""
    compiled = torch.compile(work.formula, fullgraph=True, dynamic=False)
    both = median_ms(lambda: work.with_gradients(compiled), "cuda")
    ours = row["forward_ms"] + row["backward_ms"]
    return {"layer": _described(work.layer), "ms": both, "ours_ms": round(ours, 4), "times": round(both / ours, 2)}


def tuned(layers: list[Layer], device: str) -> list[dict[str, Any]]:
    """Times of `layers` with other tiles; forward and backward together."""
    from maskfleet.ops.triton import group_norm as kernels

    rows = []
    for (kernels.TILE, kernels.WARPS), kernels.PROGRAMS in itertools.product(TILES, PROGRAMS):
        kernels.FOLD = max(1, kernels.TILE // (256 * kernels.WARPS))
        row: dict[str, Any] = {"tile": kernels.TILE, "warps": kernels.WARPS, "programs": kernels.PROGRAMS, "ms": {}}
        for layer in layers:
            work = Work(layer, device)
            forward = median_ms(work.ours, device)
            both = median_ms(lambda work=work: work.with_gradients(work.ours), device)
            row["ms"][_described(layer)] = (forward, round(both - forward, 4))
        print(row, flush=True)
        rows.append(row)
    return rows


def median_ms(step: Callable[[], object], device: str) -> float:
    """Median time of `step`: on a GPU as a captured graph, with the cache cleared before each replay."""
    if device == "cpu":
        started_at = [time.perf_counter()]
        for _ in range(3):
            step()
            started_at.append(time.perf_counter())
        return round(1000 * statistics.median(b - a for a, b in itertools.pairwise(started_at)), 4)
    from triton.testing import do_bench

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step()
    time_ms = do_bench(graph.replay, warmup=5, rep=MEASURE_MS, return_mode="median")
    del kept
    return round(float(time_ms), 4)


def _described(layer: Layer) -> str:
    options = [name for name in ("has_mask", "has_residual", "relu") if getattr(layer, name)]
    return " ".join(["x".join(str(side) for side in layer.shape), *(name.removeprefix("has_") for name in options)])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--canvas", type=int, nargs=2, default=(800, 1344), metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    main()
