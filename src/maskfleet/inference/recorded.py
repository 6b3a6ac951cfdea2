"""Detection, compiled and recorded as a CUDA graph for each shape of images."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from maskfleet.batch import Detections, Images
from maskfleet.model.mask_rcnn import MaskRCNN

WARM_UPS = 2  # calls before recording: the first compiles, the second finds everything loaded


@dataclass(frozen=True, slots=True)
class _Recording:
    images: Images  # where the graph reads
    graph: torch.cuda.CUDAGraph
    detections: Detections  # where the graph writes


class RecordedDetector:
    """`model.detect` for CUDA images; what it returns is overwritten by the next call.

    Weights are read where they lie, so training may go on between calls.
    """

    def __init__(self, model: MaskRCNN, *, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._compiled = torch.compile(model.detect, fullgraph=True, dynamic=False)
        self._recordings: dict[tuple[int, ...], _Recording] = {}

    def __call__(self, images: Images) -> Detections:
        key = tuple(images.pixels.shape)
        if key not in self._recordings:
            self._recordings[key] = self._recorded(images)
        recording = self._recordings[key]
        recording.images.pixels.copy_(images.pixels, non_blocking=True)
        recording.images.sizes.copy_(images.sizes, non_blocking=True)
        recording.graph.replay()
        return recording.detections

    def _recorded(self, images: Images) -> _Recording:
        places = Images(images.pixels.clone(), images.sizes.clone())
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._detected(places)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            detections = self._detected(places)
        return _Recording(places, graph, detections)

    def _detected(self, images: Images) -> Detections:
        with torch.no_grad(), torch.autocast("cuda", dtype=self._dtype, enabled=self._dtype is not None):
            return self._compiled(images)
