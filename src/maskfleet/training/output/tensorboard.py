"""Scalars and images for TensorBoard, written by a background thread."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray


class TensorBoard:
    """Event files in one folder; `purge_step` is the first step that earlier files wrote in vain, if any."""

    def __init__(self, folder: Path, *, purge_step: int | None) -> None:
        # Imported here: half a second that a run without TensorBoard need not spend.
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=purge_step)
        self._summary: Any = Summary

    def scalars(self, step: int, values: Mapping[str, float], *, at: float) -> None:
        """Show `values` at `step`, measured at the moment `at`, as one event."""
        self._send([self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()], step, at)

    def image(self, step: int, tag: str, image: NDArray[np.uint8], *, at: float) -> None:
        """Show `image` [H, W, 3] BGR at `step`."""
        encoded, png = cv2.imencode(".png", image)
        assert encoded
        height, width = image.shape[:2]
        picture = self._summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png.tobytes())
        self._send([self._summary.Value(tag=tag, image=picture)], step, at)

    def close(self) -> None:
        """Write what is still waiting and close the file."""
        self._writer.close()

    def _send(self, values: list[Any], step: int, at: float) -> None:
        # One event for all values; add_scalar would send an event through the queue for each.
        events = self._writer._get_file_writer()  # type: ignore[no-untyped-call]
        events.add_summary(self._summary(value=values), step, at)
        self._writer.flush()
