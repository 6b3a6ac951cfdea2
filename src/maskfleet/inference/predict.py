"""From a model and batches of images to COCO results.

Three things happen at the same time: loader processes decode the next images, the GPU detects, and other processes
encode the masks of the batches before.
"""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from types import MappingProxyType

import torch

from maskfleet.batch import Detections
from maskfleet.config.run import RunConfig
from maskfleet.data.pipeline.buckets import Canvas
from maskfleet.data.pipeline.build import chosen_workers
from maskfleet.data.pipeline.collate import EvalBatch
from maskfleet.data.pipeline.loader import ExpectedImages
from maskfleet.inference.detections import Categories, ImageDetections, Result, ResultColumns, image_detections
from maskfleet.inference.runner import DetectionRunner, HostCopy, host_copy
from maskfleet.system.workers.arrays import ArrayWorkers, Call
from maskfleet.system.workers.fork_server import fork_server_context

PRELOAD = "maskfleet.inference.predict"  # what loader and encoding processes need
BATCHES_ON_GPU = 3  # the GPU works on one and has the next one, while the host reads the one before


def predict_batches(
    runner: DetectionRunner,
    batches: Iterable[EvalBatch],
    *,
    categories: Categories,
    accurate_paste: bool,
    expected: Mapping[Canvas, ExpectedImages] = MappingProxyType({}),
    num_workers: int = 0,
    on_image: Callable[[int], None] | None = None,
) -> dict[int, list[Result]]:
    """Results by image id, in the order of `batches`, calling `on_image` with each id.

    `expected` is how many images of each canvas are to come, in this call and in later ones, 8 bits per channel.
    `num_workers` processes encode the masks; with 0 this one does. The model stays in the mode it was in.
    """
    model = runner.model
    was_training = model.training
    model.eval()
    columns: dict[int, ResultColumns] = {}  # few objects for the garbage collector, until all images are done
    pending: deque[tuple[int, Call[ResultColumns]]] = deque()

    def take_first() -> None:
        image_id, call = pending.popleft()
        columns[image_id] = call.result()
        if on_image is not None:
            on_image(image_id)

    try:
        # Before any process starts: that waits until the fork server has imported torch, which takes as long.
        runner.prepare(expected)
        with closing(ArrayWorkers(num_workers, preload=[PRELOAD])) as workers:
            for batch, detections in _detected_batches(runner, batches, expected):
                for image_id, found in _by_image(batch, detections, categories, accurate_paste):
                    # Waits while all workers have enough work, which limits the masks in memory.
                    pending.append((image_id, workers.submit(ImageDetections.columns, found, image_id)))
                    while pending and pending[0][1].is_done:
                        take_first()
            while pending:
                take_first()
    finally:
        model.train(was_training)
    with garbage_collection_paused():
        return {image_id: found.results() for image_id, found in columns.items()}


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Look for no reference cycles inside the block. Objects without references are still freed at once.

    The results of 5,000 images are two million dictionaries and lists without cycles. While they are created, the
    collector visits all of them again and again, which takes five times as long as creating them.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            # Moves the new objects to the oldest generation; as young ones, the next allocation would visit them all.
            gc.freeze()
            gc.unfreeze()
        gc.enable()


def prepare_workers() -> None:
    """Let the fork server import torch in the background, before the first worker is started."""
    if torch.cuda.is_available():
        fork_server_context([PRELOAD])


def encoding_workers(config: RunConfig, world_size: int, device: torch.device) -> int:
    """Processes that encode the masks of one rank: none on the CPU, where detection itself takes the cores."""
    if device.type != "cuda":
        return 0
    return chosen_workers(config.data.num_workers, world_size, device, share=0.5)


def _detected_batches(
    runner: DetectionRunner, batches: Iterable[EvalBatch], expected: Mapping[Canvas, ExpectedImages]
) -> Iterator[tuple[EvalBatch, Detections]]:
    """Each batch and its detections on the host; on a GPU the next batch has been started by then."""
    started: deque[tuple[EvalBatch, HostCopy]] = deque()
    in_flight = BATCHES_ON_GPU if runner.device.type == "cuda" else 1
    left = Counter({canvas: images.count for canvas, images in expected.items()})
    for batch in batches:
        height, width = batch.images.pixels.shape[2:]
        detections = runner(batch.images.to(runner.device), expected_images=max(0, left[height, width]))
        left[height, width] -= len(batch.image_ids)
        started.append((batch, host_copy(detections)))
        if len(started) == in_flight:
            first, copy = started.popleft()
            yield first, copy.wait()
    for first, copy in started:
        yield first, copy.wait()


def _by_image(
    batch: EvalBatch, detections: Detections, categories: Categories, accurate_paste: bool
) -> Iterator[tuple[int, ImageDetections]]:
    resized, original = batch.resized_sizes.tolist(), batch.original_sizes.tolist()
    for index, image_id in enumerate(batch.image_ids.tolist()):
        found = image_detections(
            detections,
            index,
            resized_hw=(resized[index][0], resized[index][1]),
            original_hw=(original[index][0], original[index][1]),
            categories=categories,
            accurate_paste=accurate_paste,
        )
        yield image_id, found
