"""A detector as a torch.export program (.pt2), which needs torch and nothing of maskfleet.

Shapes: one image on an S x S canvas, D detections, M x M mask pixels.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from maskfleet.batch import Images
from maskfleet.errors import WeightsError
from maskfleet.inference.detector import Detector
from maskfleet.model.mask_rcnn import MaskRCNN
from maskfleet.model.weights import labels_of
from maskfleet.ops.layers.exporting import exporting
from maskfleet.system.files import replacing

ABOUT_FILE = "maskfleet.json"  # in the archive: class names, category ids, sizes, inputs and outputs
OUTPUTS = ("boxes", "scores", "labels", "valid", "masks")


class DetectionProgram(nn.Module):
    """Detection as a function of plain tensors."""

    def __init__(self, model: MaskRCNN) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor, sizes: Tensor) -> dict[str, Tensor]:
        """Objects in `pixels` [1, 3, S, S] uint8 RGB, of which the top left `sizes` [1, 2] (height, width) are used."""
        found = self.model.detect(Images(pixels.flip(1), sizes))  # the network reads BGR
        return {name: value for name in OUTPUTS if (value := getattr(found, name)) is not None}


def exported(detector: Detector) -> ExportedProgram:
    """The program of `detector`, which is on the CPU: every image that is resized as the run says fits its canvas."""
    side = canvas_side(detector)
    pixels, sizes = torch.zeros(1, 3, side, side, dtype=torch.uint8), torch.tensor([[side, side]])
    # A copy without gradients: otherwise the program would record them at every call.
    network = DetectionProgram(copy.deepcopy(detector.model)).eval().requires_grad_(False)
    with torch.no_grad(), exporting():
        program = torch.export.export(network, (pixels, sizes))
    ours = sorted({str(node.target) for node in program.graph.nodes if str(node.target).startswith("maskfleet.")})
    assert not ours, f"a program must run without maskfleet, but it calls {ours}"
    return program


def save_program(path: Path, detector: Detector) -> None:
    """Write the program of `detector` and what its labels mean to `path`."""
    program = exported(detector)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            torch.export.save(program, file, extra_files={ABOUT_FILE: json.dumps(about(detector), indent=2)})
    except OSError as error:
        raise WeightsError(
            f"{path} cannot be written: {error}", remedy="check the folder, its permissions and the free space"
        ) from error


def about(detector: Detector) -> dict[str, Any]:
    """What who runs the program must know, beside its tensors."""
    side = canvas_side(detector)
    known: dict[str, Any] = json.loads(labels_of(detector.run, detector.categories).as_json(detector.run.model))
    return known | {
        "resize": {"short_edge_px": detector.run.data.test_short_edge_px, "max_px": detector.run.model.canvas_max_px},
        "inputs": {
            "pixels": f"[1, 3, {side}, {side}] uint8, RGB: the resized image in the top left corner, 0 elsewhere",
            "sizes": "[1, 2] int64: height and width of the resized image",
        },
        "outputs": {
            "boxes": "[1, D, 4] float32: x1, y1, x2, y2 in pixels of the resized image; divide by "
            "sqrt(resized height * width / (original height * width)) for the original one",
            "scores": "[1, D] float32, best first",
            "labels": "[1, D] int64: 1 is the first of categories and category_ids",
            "valid": "[1, D] bool: False is padding",
            "masks": "[1, D, M, M] float32: probability inside of the box; absent without a mask head",
        },
    }


def canvas_side(detector: Detector) -> int:
    """Side of the square canvas that holds an image of either orientation, divisible as the network needs it."""
    divisor = detector.run.model.size_divisor
    return -(-detector.run.model.canvas_max_px // divisor) * divisor
