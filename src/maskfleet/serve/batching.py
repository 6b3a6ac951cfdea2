"""One model for many requests: images of requests that arrive together are detected together."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from maskfleet.inference.detections import ImageDetections
from maskfleet.log import logger

Pixels = NDArray[np.uint8]


class Detects(Protocol):
    """The part of a Detector that is used here."""

    def detect(
        self, images: list[Pixels], *, score: float | None = None, batch_size: int | None = None
    ) -> list[ImageDetections]:
        """The objects in each image."""


@dataclass(frozen=True, slots=True)
class _Job:
    image: Pixels
    answer: Future[ImageDetections] = field(default_factory=Future)


class DetectionQueue:
    """Runs the model in one thread, on up to `batch_size` images at a time, whoever sent them."""

    def __init__(self, detector: Detects, *, batch_size: int) -> None:
        self._detector = detector
        self._batch_size = batch_size
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="detection", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether images are still detected."""
        return self._thread.is_alive()

    def detect(self, images: Sequence[Pixels]) -> list[ImageDetections]:
        """The objects in each RGB image; blocks until all are done."""
        jobs = [_Job(image) for image in images]
        for job in jobs:
            self._jobs.put(job)
        return [job.answer.result() for job in jobs]

    def close(self) -> None:
        """Finish what is queued, and stop."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            batch = [job]
            while len(batch) < self._batch_size and not self._jobs.empty():
                following = self._jobs.get()
                if following is None:
                    self._jobs.put(None)
                    break
                batch.append(following)
            self._run(batch)

    def _run(self, batch: list[_Job]) -> None:
        try:
            found = self._detector.detect([job.image for job in batch], batch_size=len(batch))
        except Exception as error:
            if len(batch) == 1:
                batch[0].answer.set_exception(error)
                return
            logger.warning("a batch of %d images failed (%s): detecting them one by one", len(batch), error)
            for job in batch:
                self._run([job])
            return
        for job, detections in zip(batch, found, strict=True):
            job.answer.set_result(detections)
