"""How a model detects: eagerly on the CPU; on a GPU in bf16, recorded as a CUDA graph and compiled where that pays.

Shapes: B images on an H x W canvas, D detections.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from maskfleet.batch import Detections, Images, map_tensors
from maskfleet.config.run import RunConfig
from maskfleet.data.pipeline.buckets import Canvas
from maskfleet.data.pipeline.build import MEMORY_PER_IMAGE_BYTES
from maskfleet.data.pipeline.loader import ExpectedImages
from maskfleet.errors import MaskfleetError
from maskfleet.inference.recorded import Capture, GraphCapture, RecordedDetector, detected
from maskfleet.model.mask_rcnn import MaskRCNN
from maskfleet.ops.triton import TRITON_IS_INSTALLED

logger = logging.getLogger(__name__)

Mode = Literal["eager", "recorded", "compiled"]

MAX_RECORDINGS = 8  # each keeps its buffers on the GPU
MIN_BATCHES_TO_RECORD = 6  # recording takes two passes to warm up and one to capture
# On an H200, benchmarks/results/eval_run.json: 456 images/s recorded, 736 compiled, of 800 x 1344 pixels.
SAVED_S_PER_MEGAPIXEL = 0.0008  # by compiling what is recorded
COMPILE_S = 25.0  # of one canvas, with an empty cache; about 50 s for two


class DetectionRunner:
    """Detects objects in batches; commands, validation in a run and the Python API all use it.

    The detections of a call may be overwritten by the next. The weights may change between calls.
    """

    def __init__(
        self,
        model: MaskRCNN,
        device: torch.device,
        *,
        dtype: torch.dtype | None = None,
        compile: Literal["auto"] | bool = "auto",
        capture: Capture | None = None,
    ) -> None:
        """`capture` None captures CUDA graphs on a GPU and nothing on the CPU; tests pass a stand-in."""
        self.model = model
        self.device = device
        self._dtype = dtype
        self._compile = compile
        if capture is None and device.type == "cuda":
            capture = GraphCapture()
        self._recorded = RecordedDetector(model, dtype=dtype, capture=capture) if capture is not None else None
        self._calls: Counter[torch.Size] = Counter()
        self._failed: set[Mode] = set()
        # Alive as long as the recordings: cuDNN's plans end with their thread, and with them maybe kernels of a graph.
        self._threads: list[ThreadPoolExecutor] = []

    def __call__(self, images: Images, *, expected_images: int = 0) -> Detections:
        """Objects in `images`, which are on the device.

        `expected_images` is how many images of this canvas are to come, these included, if the caller knows.
        """
        with self._current_device():
            if self._recorded is None or self._compile is False:
                return self._eager(images)
            self._calls[images.pixels.shape] += 1
            batch_size = self._recorded_batch_size(images, expected_images)
            if batch_size is None:
                return self._eager(images)
            return _first(self._recorded(_padded(images, batch_size)), len(images.sizes))

    def prepare(self, expected: Mapping[Canvas, ExpectedImages]) -> None:
        """Record detection in batches of 8-bit images now, where as many as `expected` make it pay.

        Otherwise the first batch of each canvas has to wait for it. Canvases are recorded side by side, because most of
        the time goes into cuDNN's plans, which one thread makes one after the other, and each thread for itself.
        """
        if self._recorded is None or self._compile is False:
            return
        shapes = {torch.Size([images.batch_size, 3, *canvas]): images.count for canvas, images in expected.items()}
        new = {
            shape: count
            for shape, count in shapes.items()
            if not self._fitting(shape) and self.mode(shape, count) != "eager"
        }
        num_threads = self._recording_threads(new)
        if num_threads == 1:
            for shape, count in new.items():
                self._prepare_one(shape, count)
        else:
            self._threads.append(ThreadPoolExecutor(num_threads, "recording"))
            # Reading the results raises what a thread raised.
            list(self._threads[-1].map(self._prepare_one, new.keys(), new.values()))

    def _prepare_one(self, shape: torch.Size, expected_images: int) -> None:
        batch_size, channels, *canvas = shape
        with self._current_device():
            blank = torch.zeros(batch_size, *canvas, channels, dtype=torch.uint8, device=self.device)
            sizes = torch.tensor([canvas] * batch_size, device=self.device)
            self._recorded_batch_size(Images(blank.permute(0, 3, 1, 2), sizes), expected_images)

    def _recording_threads(self, expected: Mapping[torch.Size, int]) -> int:
        """How many shapes to record at a time: as many as the GPU has memory for, or one if some are compiled."""
        modes = {self.mode(shape, count) for shape, count in expected.items()}
        # torch.compile is not made for several threads.
        if self.device.type != "cuda" or len(expected) < 2 or "compiled" in modes:
            return 1
        largest = max(shape[0] for shape in expected) * MEMORY_PER_IMAGE_BYTES
        return max(1, min(len(expected), MAX_RECORDINGS, torch.cuda.mem_get_info(self.device)[0] // largest))

    def mode(self, shape: torch.Size, expected_images: int) -> Mode:
        """The fastest way to detect in `expected_images` images that come in batches of `shape` [B, 3, H, W]."""
        batch_size, _, height, width = shape
        batches = max(expected_images / batch_size, self._calls[shape])
        saved_s = expected_images * height * width / 1e6 * SAVED_S_PER_MEGAPIXEL
        choice: Mode = "recorded" if batches >= MIN_BATCHES_TO_RECORD else "eager"
        if self._compile is True or (choice == "recorded" and saved_s > COMPILE_S and TRITON_IS_INSTALLED):
            choice = "compiled"
        if choice == "compiled" and "compiled" in self._failed:
            choice = "recorded"
        return "eager" if choice in self._failed else choice

    def _eager(self, images: Images) -> Detections:
        """Detections without a recording; in two halves if the GPU, perhaps full of training, has too little memory."""
        try:
            return detected(self.model.detect, images, self._dtype)
        except torch.OutOfMemoryError:
            count = len(images.sizes)  # continue below: the traceback refers to tensors, which stay in memory here
        height, width = images.pixels.shape[2:]
        if count == 1:
            raise MaskfleetError(
                f"the GPU has too little memory to detect objects in an image of {height} x {width} pixels",
                remedy="set data.test_short_edge_px lower, or use a GPU with more memory",
            )
        logger.warning("%d images in one forward pass need too much memory: set eval.images_per_gpu lower", count)
        torch.cuda.empty_cache()
        halves = [
            self._eager(map_tensors(images, lambda tensor, part=part: tensor[part]))  # type: ignore[misc]
            for part in (slice(count // 2), slice(count // 2, count))
        ]
        return _joined(*halves)

    def _recorded_batch_size(self, images: Images, expected_images: int) -> int | None:
        """Batch size of the recording to use for `images`, which may be larger; None to detect eagerly."""
        assert self._recorded is not None
        shape = images.pixels.shape
        larger = self._fitting(shape)
        # A caller of many small batches should not pay for padding forever; the last batch of a set is padded.
        is_often_small = expected_images == 0 and self._calls[shape] >= MIN_BATCHES_TO_RECORD
        is_new = not larger or (shape[0] not in larger and is_often_small)
        if is_new and len(self._recorded.shapes) < MAX_RECORDINGS:
            chosen = self.mode(shape, expected_images)
            if chosen != "eager":
                self._record(images, chosen)
        return min(self._fitting(shape), default=None)

    def _fitting(self, shape: torch.Size) -> list[int]:
        """Batch sizes of the recordings for this canvas that hold a batch of `shape`."""
        assert self._recorded is not None
        return [known[0] for known in self._recorded.shapes if known[1:] == shape[1:] and known[0] >= shape[0]]

    def _record(self, images: Images, mode: Mode) -> None:
        assert self._recorded is not None
        batch_size, _, height, width = images.pixels.shape
        started_at = time.monotonic()
        try:
            self._recorded.record(images, compiled=mode == "compiled")
        except Exception as error:
            # Compilers fail in too many ways to list, and slow detection is better than none.
            logger.warning("detection cannot be %s and runs slower: %s", mode, _first_line(error))
            self._failed.add(mode)
            if mode == "compiled":
                self._record(images, "recorded")
            return
        elapsed_s = time.monotonic() - started_at
        logger.info("detection for %d images of %d x %d: %s in %.1f s", batch_size, height, width, mode, elapsed_s)

    def _current_device(self) -> AbstractContextManager[object]:
        """Triton launches kernels on the current GPU, whichever one the tensors are on."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Detections on their way to the host; one synchronization with the GPU for all their tensors."""

    detections: Detections
    is_copied: torch.cuda.Event | None

    def wait(self) -> Detections:
        """The detections, once they have arrived."""
        if self.is_copied is not None:
            self.is_copied.synchronize()
        return self.detections


def host_copy(detections: Detections) -> HostCopy:
    """Starts the copy, which the GPU makes before a later batch overwrites the detections."""
    if detections.valid.device.type != "cuda":
        return HostCopy(detections, None)

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    copy = map_tensors(detections, copied)
    is_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    is_copied.record(torch.cuda.current_stream(detections.valid.device))
    return HostCopy(copy, is_copied)


def detection_runner(model: MaskRCNN, config: RunConfig, device: torch.device) -> DetectionRunner:
    """The runner that the `eval` section of a run asks for."""
    return DetectionRunner(model, device, dtype=detection_dtype(config, device), compile=config.eval.compile)


def detection_dtype(config: RunConfig, device: torch.device) -> torch.dtype | None:
    """What `eval.precision` means on `device`; None is fp32. auto is bf16 on a GPU that supports it, else fp32."""
    if config.eval.precision != "auto":
        return torch.bfloat16 if config.eval.precision == "bf16" else None
    return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else None


def _padded(images: Images, batch_size: int) -> Images:
    """`images` with copies of the last one up to `batch_size`."""
    missing = batch_size - len(images.sizes)
    if not missing:
        return images
    return map_tensors(images, lambda tensor: torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])]))


def _first(detections: Detections, count: int) -> Detections:
    """The detections of the first `count` images."""
    return map_tensors(detections, lambda tensor: tensor[:count])


def _joined(first: Detections, second: Detections) -> Detections:
    """The detections of two batches as those of one."""
    masks = None if first.masks is None or second.masks is None else torch.cat([first.masks, second.masks])
    return Detections(
        boxes=torch.cat([first.boxes, second.boxes]),
        scores=torch.cat([first.scores, second.scores]),
        labels=torch.cat([first.labels, second.labels]),
        valid=torch.cat([first.valid, second.valid]),
        masks=masks,
    )


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n", maxsplit=1)[0]
