"""A detector as an ONNX file: image in, boxes, scores, labels and mask probabilities out.

The graph is written layer by layer (`network.py`), not traced: a trace would fix what depends on the size of the
image, and spell out suppression and crops, for which ONNX has operators. `check.py` compares a file with its network.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
from onnx import helper

from maskfleet.errors import WeightsError
from maskfleet.inference.detector import Detector
from maskfleet.inference.export.onnx.check import OnnxComparison, compared, runtime_is_installed
from maskfleet.inference.export.onnx.graph import FLOAT, INT64, IR_VERSION, OPSET, UINT8
from maskfleet.inference.export.onnx.network import INPUT, NetworkGraph
from maskfleet.model.weights import labels_of
from maskfleet.system.files import replacing

MAX_BYTES = 2**31 - 1  # of a protocol buffer


def save_onnx(path: Path, detector: Detector) -> OnnxComparison | None:
    """Write `detector`, which is on the CPU, with the meaning of its inputs and outputs to `path`.

    Returns how it compares with the network; None without onnxruntime.
    """
    model = onnx_model(detector)
    comparison = compared(model, detector) if runtime_is_installed() else None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(model.SerializeToString())
    except OSError as error:
        raise WeightsError(
            f"{path} cannot be written: {error}", remedy="check the folder, its permissions and the free space"
        ) from error
    return comparison


def onnx_model(detector: Detector) -> onnx.ModelProto:
    """The whole detector as one graph, checked by ONNX's own checker."""
    network = NetworkGraph(detector.model)
    outputs: dict[str, tuple[int, list[str | int]]] = {
        "boxes": (FLOAT, ["detections", 4]),
        "scores": (FLOAT, ["detections"]),
        "labels": (INT64, ["detections"]),
    }
    if detector.model.mask_head is not None:
        side = detector.model.mask_head.resolution
        outputs["masks"] = (FLOAT, ["detections", side, side])
    nodes = [
        helper.make_node("Identity", [value], [name], name=name)
        for name, value in zip(outputs, network.detections(), strict=True)
    ]
    graph = network.graph
    model = helper.make_model(
        helper.make_graph(
            [*graph.nodes, *nodes],
            "maskfleet",
            [helper.make_tensor_value_info(INPUT, UINT8, ["height", "width", 3])],
            [helper.make_tensor_value_info(name, *kind) for name, kind in outputs.items()],
            list(graph.initializers.values()),
        ),
        producer_name="maskfleet",
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
    )
    known = about(detector).items()
    helper.set_model_props(model, {key: text if isinstance(text, str) else json.dumps(text) for key, text in known})
    if model.ByteSize() > MAX_BYTES:
        raise WeightsError(
            f"the model has {model.ByteSize() / 2**30:.1f} GiB, and an ONNX file holds less than 2",
            remedy="export it with --to safetensors or --to torch",
        )
    onnx.checker.check_model(model, full_check=True)
    return model


def about(detector: Detector) -> dict[str, Any]:
    """What who runs the file must know; every entry becomes one of its metadata, as JSON unless it is text."""
    config = detector.run.model
    known: dict[str, Any] = json.loads(labels_of(detector.run, detector.categories).as_json(config))
    return known | {
        "resize": {"short_edge_px": detector.run.data.test_short_edge_px, "max_px": config.canvas_max_px},
        "color_order": "RGB",
        "pixel_mean": list(config.pixel_mean_rgb),
        "pixel_std": list(config.pixel_std_rgb),
        "normalized_by": "the graph: give it pixels 0..255",
        "inputs": {INPUT: "[height, width, 3] uint8, RGB: the resized image"},
        "outputs": {
            "boxes": "[D, 4] float32: x1, y1, x2, y2 in pixels of the resized image; divide by "
            "sqrt(resized height * width / (original height * width)) for the original one",
            "scores": "[D] float32, best first",
            "labels": "[D] int64: 1 is the first of categories and category_ids",
        }
        | ({"masks": "[D, M, M] float32: probability inside of the box"} if config.mask else {}),
    }
