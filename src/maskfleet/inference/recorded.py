"""Detection captured as a CUDA graph, one per shape of the images, with or without compiling it first."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from maskfleet.batch import Detections, Images
from maskfleet.inference.device import keep_compiled_code
from maskfleet.model.mask_rcnn import MaskRCNN
from maskfleet.ops.recorder import CudaGraphRecorder

WARM_UPS = 2  # calls before the capture: the first compiles, the second runs with all kernels loaded

Work = Callable[[], Detections]
Capture = Callable[[Work], Work]
"""Turns work on static buffers into a function that repeats it; a call overwrites the detections of the one before."""


class GraphCapture:
    """Captures CUDA graphs that share one pool of memory, separate from that of the training step.

    Several threads may warm up at the same time; they capture one after the other.
    """

    def __init__(self) -> None:
        self._recorder = CudaGraphRecorder()
        self._lock = threading.Lock()

    def __call__(self, work: Work) -> Work:
        for _ in range(WARM_UPS):
            self._recorder.warm_up(work)
        with self._lock:
            return self._recorder.record(work).replay


@dataclass(frozen=True, slots=True)
class _Recording:
    images: Images  # static buffers that the graph reads
    replay: Work


class RecordedDetector:
    """`model.detect` for images of a few shapes; each call overwrites the detections that the previous one returned.

    The graph reads the model's own parameters, so training may continue between calls.
    """

    def __init__(self, model: MaskRCNN, *, dtype: torch.dtype | None, capture: Capture | None = None) -> None:
        self._model = model
        self._dtype = dtype
        self._capture = capture or GraphCapture()
        self._compiled: Callable[[Images], Detections] | None = None
        self._recordings: dict[torch.Size, _Recording] = {}

    @property
    def shapes(self) -> list[torch.Size]:
        """Shapes [B, 3, H, W] that are recorded."""
        return list(self._recordings)

    def __call__(self, images: Images) -> Detections:
        """Detections in `images`, recorded first, and compiled, if their shape is new."""
        if images.pixels.shape not in self._recordings:
            self.record(images, compiled=True)
        recording = self._recordings[images.pixels.shape]
        assert images.pixels.dtype == recording.images.pixels.dtype  # a copy would round
        recording.images.pixels.copy_(images.pixels, non_blocking=True)
        recording.images.sizes.copy_(images.sizes, non_blocking=True)
        return recording.replay()

    def record(self, images: Images, *, compiled: bool) -> None:
        """Record detection in images of the shape of `images`."""
        buffers = Images(images.pixels.clone(), images.sizes.clone())
        detect = self._compiled_detect() if compiled else self._model.detect

        def work() -> Detections:
            return detected(detect, buffers, self._dtype)

        self._recordings[images.pixels.shape] = _Recording(buffers, self._capture(work))

    def _compiled_detect(self) -> Callable[[Images], Detections]:
        if self._compiled is None:
            keep_compiled_code(os.environ)
            self._compiled = torch.compile(self._model.detect, fullgraph=True, dynamic=False)
        return self._compiled


def detected(detect: Callable[[Images], Detections], images: Images, dtype: torch.dtype | None) -> Detections:
    """What `detect` finds in `images` with the matrix products in `dtype`; None for fp32."""
    # Inside a capture, autocast must begin and end there: the graph then casts the current weights at every replay.
    # Without its cache, which all threads share: a graph would read what another thread has cast, and frees later.
    autocast = torch.autocast(images.pixels.device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False)
    with torch.no_grad(), autocast:
        return detect(images)
