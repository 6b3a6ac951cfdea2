"""Compares an ONNX model with the network it came from, by running it in onnxruntime on the CPU.

Shapes: D detections of one image, M x M mask pixels.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import numpy_helper

from maskfleet.batch import Images
from maskfleet.config.base import replaced
from maskfleet.errors import WeightsError
from maskfleet.inference.detector import Detector
from maskfleet.inference.export.onnx.network import INPUT
from maskfleet.inference.export.onnx.regions import SCORE_THRESHOLD

logger = logging.getLogger(__name__)

TOLERANCE = 1e-3  # of scores and probabilities, and of boxes as a share of the image's longer side
MAX_SHORT_EDGE_PX = 400  # enough to compare, and a fraction of the time of a full image
MIN_SHARE_FOUND = 0.95  # the rest may be near ties, which rounding decides

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class OnnxComparison:
    """How the detections of a file differ from the network's."""

    runtime: str
    images: int
    detections: int  # of the network
    found: int  # of those, how many the file finds too
    differences: dict[str, float]  # largest one of boxes (pixels), scores and masks

    def __str__(self) -> str:
        listed = ", ".join(f"{name} {value:.1e}" for name, value in self.differences.items())
        return (
            f"{self.found} of {self.detections} detections in {self.images} images are the same in {self.runtime}; "
            f"largest difference: {listed}"
        )


def runtime_is_installed() -> bool:
    return importlib.util.find_spec("onnxruntime") is not None


def compared(model: onnx.ModelProto, detector: Detector) -> OnnxComparison:
    """Compare `model` with `detector`, from which it was made, on images of three sizes.

    Both detect with a score threshold of 0: a trained network sees nothing in images without objects.
    """
    import onnxruntime

    logger.info("comparing the ONNX model with the network in onnxruntime")
    session = onnxruntime.InferenceSession(
        _without_threshold(model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    # A copy that shares the weights.
    network = copy.copy(detector.model)
    network.config = replaced(network.config, {"inference.score_threshold": 0.0})
    total, found = 0, 0
    differences: dict[str, float] = {}
    sizes = _sizes(detector)
    for seed, (height, width) in enumerate(sizes):
        image = _image(height, width, seed)
        pixels = torch.from_numpy(image[..., ::-1].copy()).permute(2, 0, 1)[None]
        detections = network.detect(Images(pixels, torch.tensor([[height, width]])))
        valid = detections.valid[0]
        names = [output.name for output in session.get_outputs()]
        expected = {name: getattr(detections, name)[0][valid].numpy() for name in names}
        actual: Arrays = dict(zip(names, session.run(names, {INPUT: image}), strict=True))
        pairs = matched(expected, actual, box_tolerance_px=TOLERANCE * max(height, width))
        total, found = total + len(expected["scores"]), found + len(pairs)
        for name in names:
            if name != "labels":
                here = max((float(np.abs(expected[name][a] - actual[name][b]).max()) for a, b in pairs), default=0.0)
                differences[name] = max(differences.get(name, 0.0), here)
    result = OnnxComparison(f"onnxruntime {onnxruntime.__version__}", len(sizes), total, found, differences)
    if found < MIN_SHARE_FOUND * total or differences.get("masks", 0.0) > TOLERANCE:
        raise WeightsError(
            f"the ONNX model detects something else than the network: {result}",
            remedy="update onnx and onnxruntime, or export with --to torch; nothing was written",
        )
    return result


def matched(expected: Arrays, actual: Arrays, *, box_tolerance_px: float) -> list[tuple[int, int]]:
    """Pairs of equal detections: same label, and boxes and scores within their tolerance; the nearest first."""
    pairs, free = [], np.ones(len(actual["scores"]), dtype=bool)
    for index, (box, score, label) in enumerate(
        zip(expected["boxes"], expected["scores"], expected["labels"], strict=True)
    ):
        distance = np.abs(actual["boxes"] - box).max(axis=1)
        equal = free & (actual["labels"] == label) & (np.abs(actual["scores"] - score) <= TOLERANCE)
        equal &= distance <= box_tolerance_px
        if equal.any():
            nearest = int(np.where(equal, distance, np.inf).argmin())
            free[nearest] = False
            pairs.append((index, nearest))
    return pairs


def _without_threshold(model: onnx.ModelProto) -> onnx.ModelProto:
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    [threshold] = [tensor for tensor in changed.graph.initializer if tensor.name == SCORE_THRESHOLD]
    threshold.CopyFrom(numpy_helper.from_array(np.zeros((), np.float32), SCORE_THRESHOLD))
    return changed


def _sizes(detector: Detector) -> list[tuple[int, int]]:
    """Sizes (height, width) to compare: a usual one, an upright one with odd sides, and a small one."""
    longest = detector.run.model.canvas_max_px
    short = min(detector.run.data.test_short_edge_px, longest, MAX_SHORT_EDGE_PX)
    return [(short, min(short * 4 // 3, longest)), (short // 2 * 4 // 3 | 1, short // 2 | 1), (33, 50)]


def _image(height: int, width: int, seed: int) -> NDArray[np.uint8]:
    """Smooth blots of color with some noise -> [height, width, 3]."""
    random = np.random.default_rng(seed)
    blots = cv2.resize(random.uniform(0, 255, (8, 8, 3)).astype(np.float32), (width, height))
    image: NDArray[np.uint8] = np.clip(blots + random.normal(0, 8, blots.shape), 0, 255).astype(np.uint8)
    return image
