"""The prediction as data: what --json prints, the page shows and benchmarks/results/scaling.json holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from maskfleet.bench.scaling.parameters import (
    GPU_SPEEDS,
    PARAMETERS,
    REGIONS,
    SGD_LIMIT,
    STEP_MS,
    STEP_RATIOS,
    Parameter,
)
from maskfleet.bench.scaling.predict import Prediction, Setting
from maskfleet.bench.scaling.topology import NODES, Link, Node

# One instance type per family: the largest.
USUAL_INSTANCES = (
    "p4d.24xlarge",
    "p5.48xlarge",
    "p5e.48xlarge",
    "p5en.48xlarge",
    "p6-b200.48xlarge",
    "g5.48xlarge",
    "g6.48xlarge",
    "g6e.48xlarge",
)
JITTER_SOURCE = "results/step_cpu.json, 15 steps on a CPU; none on a GPU"
MODEL_NOTE = (
    "This is a model, not a measurement: maskfleet has not been timed on more than one GPU. One H200, the loader and a "
    "run of 4 processes on a CPU were measured; the column origin tells measured from assumed."
)
SGD_NOTE = (
    f"* More than {SGD_LIMIT} images per step: do not expect the linear learning-rate rule to hold. We know of no "
    f"published SGD run with more than 272 images that reaches the same AP; {SGD_LIMIT} already need more epochs, 17 "
    "instead of 14 in MLPerf.\n"
    "Weak scaling keeps the images per GPU. Strong scaling reduces them, down to 1, so that a step has at most "
    f"{SGD_LIMIT} images."
)


def as_record(predictions: Sequence[Prediction], setting: Setting) -> dict[str, Any]:
    """Everything that was predicted, and what from."""
    instances = dict.fromkeys(one.instance for one in predictions)
    return {
        "what": "R50-FPN Mask R-CNN, 800 x 1344, bf16; COCO's 1x schedule for whole runs",
        "notes": [MODEL_NOTE, SGD_NOTE],
        "setting": dataclasses.asdict(setting),
        "parameters": [dataclasses.asdict(one) for one in all_parameters([NODES[name] for name in instances])],
        "regions": [dataclasses.asdict(region) for region in REGIONS],
        "step_ratios": STEP_RATIOS,
        "predictions": [_row(one) for one in predictions],
    }


def all_parameters(nodes: Sequence[Node]) -> list[Parameter]:
    """The numbers behind predictions for `nodes`, each once, measured ones first."""
    found = dict.fromkeys(one for node in nodes for one in _parameters_of(node))
    order = ("measured", "published", "derived", "assumed")
    return sorted(found, key=lambda one: order.index(one.origin))


def _parameters_of(node: Node) -> list[Parameter]:
    """The numbers behind a prediction for `node`."""
    speed, relative = GPU_SPEEDS[node.gpu], f"speed of the {node.gpu} / the H200's"
    steps = [
        Parameter(f"step, {images} per GPU, H200", step_ms, "ms", "measured", "results/step.json")
        for images, step_ms in STEP_MS.items()
    ]
    ratios = Parameter(
        "single steps / their median, at most", max(map(max, STEP_RATIOS)), "", "measured", JITTER_SOURCE
    )
    return [
        *steps,
        ratios,
        *([] if node.gpu == "H200" else [Parameter(relative, speed.relative, "", speed.origin, speed.source)]),
        *(_bandwidth(f"inside {node.name}", node.inside) if node.gpus > 1 else ()),
        *_bandwidth(f"between {node.name}", node.network),
        *PARAMETERS,
    ]


def _bandwidth(where: str, link: Link) -> list[Parameter]:
    return [Parameter(f"bus bandwidth {where}", link.bytes_per_s / 1e9, "GB/s", link.origin, link.source)]


def _row(one: Prediction) -> dict[str, Any]:
    return {
        "instance": one.instance,
        "scaling": one.scaling,
        "gpus": one.gpus,
        "nodes": one.nodes,
        "images_per_gpu": one.images_per_gpu,
        "images_per_step": one.images_per_step,
        "beyond_sgd": one.beyond_sgd,
        "step_ms": round(1000 * one.step.total_s, 2),
        "images_per_s": round(one.images_per_s, 1),
        "efficiency": round(one.efficiency, 4),
        "limit": one.limit,
        "lost_by": {name: round(share, 4) + 0.0 for name, share in one.losses.items()},
        "run_hours": round(one.run.total_s / 3600, 3),
        "run_failures": one.run.num_failures,
        "run_efficiency": round(one.run_efficiency, 4),
        "run_limit": one.run_limit,
        "run_lost_by": {name: round(share, 4) + 0.0 for name, share in one.run_losses.items()},
    }
