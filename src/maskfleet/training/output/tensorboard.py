"""Scalars and pictures for TensorBoard, written by a background thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from maskfleet.training.output.measurement import Measurement


class TensorBoard:
    """Event files in one folder, opened by the first write; events of earlier files after `after_step` are hidden."""

    def __init__(self, folder: Path, *, after_step: int = 0) -> None:
        self._folder = folder
        self._purge_step = after_step + 1 if folder.exists() else None
        self._writer: Any = None
        self._summary: Any = None

    def write(self, measurement: Measurement) -> None:
        self._open()
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in measurement.values.items()]
        values += [self._summary.Value(tag=tag, image=self._png(image)) for tag, image in measurement.pictures.items()]
        # One event for all values; add_scalar would send an event through the queue for each.
        events = self._writer._get_file_writer()
        events.add_summary(self._summary(value=values), measurement.step, measurement.time)
        self._writer.flush()

    def close(self) -> None:
        """Write pending events and close the file."""
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> None:
        if self._writer is not None:
            return
        # Imported here: it takes half a second, which processes that write nothing save.
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from torch.utils.tensorboard import SummaryWriter

        self._summary = Summary
        self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step)

    def _png(self, image: NDArray[np.uint8]) -> Any:
        """`image` [H, W, 3] BGR as TensorBoard stores it."""
        encoded, png = cv2.imencode(".png", image)
        assert encoded
        height, width = image.shape[:2]
        return self._summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png.tobytes())
