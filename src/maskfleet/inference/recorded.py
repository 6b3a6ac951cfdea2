"""Detection compiled and captured as a CUDA graph, one per shape of the images."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from maskfleet.batch import Detections, Images
from maskfleet.model.mask_rcnn import MaskRCNN

WARM_UPS = 2  # calls before the capture: the first compiles, the second runs with all kernels loaded


@dataclass(frozen=True, slots=True)
class _Recording:
    images: Images  # static buffers that the graph reads
    graph: torch.cuda.CUDAGraph
    detections: Detections  # static buffers that the graph writes


class RecordedDetector:
    """`model.detect` for CUDA images; each call overwrites the detections that the previous one returned.

    The graph reads the model's own parameters, so training may continue between calls.
    """

    def __init__(self, model: MaskRCNN, *, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._compiled = torch.compile(model.detect, fullgraph=True, dynamic=False)
        self._recordings: dict[tuple[int, ...], _Recording] = {}

    def __call__(self, images: Images) -> Detections:
        key = tuple(images.pixels.shape)
        if key not in self._recordings:
            self._recordings[key] = self._record(images)
        recording = self._recordings[key]
        recording.images.pixels.copy_(images.pixels, non_blocking=True)
        recording.images.sizes.copy_(images.sizes, non_blocking=True)
        recording.graph.replay()
        return recording.detections

    def _record(self, images: Images) -> _Recording:
        buffers = Images(images.pixels.clone(), images.sizes.clone())
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._detect(buffers)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            detections = self._detect(buffers)
        return _Recording(buffers, graph, detections)

    def _detect(self, images: Images) -> Detections:
        with torch.no_grad(), torch.autocast("cuda", dtype=self._dtype, enabled=self._dtype is not None):
            return self._compiled(images)
