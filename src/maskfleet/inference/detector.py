"""A trained model that detects objects in images: what `maskfleet.load` returns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from maskfleet.batch import Images
from maskfleet.config.run import RunConfig
from maskfleet.data.pipeline.geometry import resized_sizes
from maskfleet.errors import DataError
from maskfleet.inference.detections import Categories, ImageDetections, image_detections
from maskfleet.inference.draw import drawn_detections
from maskfleet.inference.images import ImageInput, bgr_pixels
from maskfleet.model.mask_rcnn import MaskRCNN


@dataclass(frozen=True, slots=True, repr=False)
class Detector:
    """A model in evaluation mode on its device, with its configuration and the categories of its labels.

        detector = maskfleet.load("runs/mine")
        found = detector.detect("photo.jpg", score=0.5)
        detector.draw("photo.jpg", found, path="drawn.png")

    An image is a path, an array [height, width, 3] of uint8 in **RGB** order, or a PIL image. OpenCV reads BGR: pass
    `image[..., ::-1]`.
    """

    model: MaskRCNN
    run: RunConfig  # of its run; for a weights file, the defaults with the model's own configuration
    categories: Categories
    source: str  # which checkpoint or file it was loaded from
    device: torch.device

    def __repr__(self) -> str:
        return f"<Detector of {len(self.categories)} classes on {self.device}: {self.source}>"

    @property
    def class_names(self) -> list[str]:
        """Names of the classes by label, without background; numbers if the weights have no names."""
        return [name for _, name in self.categories]

    @overload
    def detect(
        self, images: list[Any] | tuple[Any, ...], *, score: float | None = None, batch_size: int = 1
    ) -> list[ImageDetections]: ...

    @overload
    def detect(self, images: ImageInput, *, score: float | None = None, batch_size: int = 1) -> ImageDetections: ...

    def detect(
        self, images: ImageInput | list[Any] | tuple[Any, ...], *, score: float | None = None, batch_size: int = 1
    ) -> ImageDetections | list[ImageDetections]:
        """The objects in one image or, for a list, in each of several: those that score above `score`.

        None returns every detection above `model.inference.score_threshold`, as `maskfleet eval` does. Up to
        `batch_size` images share a forward pass if they have the same size after the resize.
        """
        if batch_size < 1:
            raise DataError(f"batch_size is {batch_size}", remedy="give 1 or more")
        if not isinstance(images, (list, tuple)):
            return self.detect([images], score=score)[0]
        found: list[ImageDetections] = []
        for start in range(0, len(images), batch_size):
            found += self._detections([bgr_pixels(image) for image in images[start : start + batch_size]])
        return found if score is None else [one[one.scores > score] for one in found]

    def draw(
        self, image: ImageInput, detections: ImageDetections | None = None, *, path: str | Path | None = None
    ) -> NDArray[np.uint8]:
        """A copy of `image` with `detections` drawn on it, as an RGB array; also saved to `path` if given.

        None draws what scores above the run's `eval.show_score_threshold`. An image whose longer side is below 320
        pixels is enlarged, so that its labels can be read.
        """
        picture = bgr_pixels(image)
        if detections is None:
            every = self._detections([picture])[0]
            detections = every[every.scores > self.run.eval.show_score_threshold]
        if detections.image_size != picture.shape[:2]:
            height, width = detections.image_size
            raise DataError(
                f"the detections are of an image of {height} x {width} pixels, but this one has "
                f"{picture.shape[0]} x {picture.shape[1]}",
                remedy="draw detections on the image they were found in",
            )
        drawn = drawn_detections(picture, detections.to_coco(image_id=0), detections.categories)
        if path is not None:
            _save(Path(path).expanduser(), drawn)
        return np.ascontiguousarray(drawn[..., ::-1])

    def _detections(self, pictures: Sequence[NDArray[np.uint8]]) -> list[ImageDetections]:
        """Detections of BGR images, those of one size after the resize in one forward pass."""
        limits = {"short_edge_px": self.run.data.test_short_edge_px, "max_px": self.run.model.canvas_max_px}
        heights, widths = [picture.shape[0] for picture in pictures], [picture.shape[1] for picture in pictures]
        sizes = [(height, width) for height, width in resized_sizes(heights, widths, **limits).tolist()]
        found: dict[int, ImageDetections] = {}
        for size in dict.fromkeys(sizes):
            members = [index for index, other in enumerate(sizes) if other == size]
            resized = [cv2.resize(pictures[index], size[::-1], interpolation=cv2.INTER_LINEAR) for index in members]
            pixels = torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2)
            batch = Images(pixels.to(self.device), torch.tensor([size] * len(members), device=self.device))
            with self._current_device():
                detections = self.model.detect(batch).to("cpu")
            for row, index in enumerate(members):
                found[index] = image_detections(
                    detections,
                    row,
                    resized_hw=size,
                    original_hw=(heights[index], widths[index]),
                    categories=self.categories,
                    accurate_paste=self.run.eval.accurate_paste,
                )
        return [found[index] for index in range(len(pictures))]

    def _current_device(self) -> AbstractContextManager[object]:
        """Triton launches kernels on the current GPU, whichever one the tensors are on."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


def _save(path: Path, picture: NDArray[np.uint8]) -> None:
    try:
        written = cv2.imwrite(str(path), picture)
    except cv2.error:  # no encoder for this suffix
        written = False
    if not written:
        raise DataError(
            f"the drawn image could not be saved to {path}",
            remedy="check that the folder exists and can be written, and that the name ends in .png or .jpg",
        )
