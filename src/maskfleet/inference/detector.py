"""A trained model that detects objects in images: what `maskfleet.load` returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from maskfleet.batch import Images
from maskfleet.config.run import RunConfig
from maskfleet.data.pipeline.buckets import Canvas, choose_buckets, with_fallback
from maskfleet.data.pipeline.build import eval_batch_size
from maskfleet.data.pipeline.geometry import resized_sizes
from maskfleet.errors import DataError
from maskfleet.inference.detections import Categories, ImageDetections, image_detections
from maskfleet.inference.draw import drawn_detections
from maskfleet.inference.images import ImageInput, bgr_pixels
from maskfleet.inference.runner import DetectionRunner, detection_runner, host_copy
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
    step: int | None = None  # of the checkpoint; None for a weights file
    runner: DetectionRunner = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "runner", detection_runner(self.model, self.run, self.device))

    def __repr__(self) -> str:
        return f"<Detector of {len(self.categories)} classes on {self.device}: {self.source}>"

    @property
    def class_names(self) -> list[str]:
        """Names of the classes by label, without background; numbers if the weights have no names."""
        return [name for _, name in self.categories]

    @overload
    def detect(
        self, images: list[Any] | tuple[Any, ...], *, score: float | None = None, batch_size: int | None = None
    ) -> list[ImageDetections]: ...

    @overload
    def detect(
        self, images: ImageInput, *, score: float | None = None, batch_size: int | None = None
    ) -> ImageDetections: ...

    def detect(
        self,
        images: ImageInput | list[Any] | tuple[Any, ...],
        *,
        score: float | None = None,
        batch_size: int | None = None,
    ) -> ImageDetections | list[ImageDetections]:
        """The objects in one image or, for a list, in each of several: those that score above `score`.

        None returns every detection above `model.inference.score_threshold`, as `maskfleet eval` does. Up to
        `batch_size` images share a forward pass if they have the same canvas: on a GPU that of their orientation, on
        the CPU their size after the resize. None is one image on the CPU, on a GPU up to 16.
        """
        if batch_size is not None and batch_size < 1:
            raise DataError(f"batch_size is {batch_size}", remedy="give 1 or more")
        if not isinstance(images, (list, tuple)):
            return self.detect([images], score=score)[0]
        batch_size = eval_batch_size(batch_size or "auto", self.device)
        # Twice as many at a time on a GPU: then most batches are full although there are two orientations.
        group = 2 * batch_size if self.device.type == "cuda" else batch_size
        found: list[ImageDetections] = []
        for start in range(0, len(images), group):
            pictures = [self._pixels(image) for image in images[start : start + group]]
            found += self._detections(pictures, batch_size, images_left=len(images) - start)
        return found if score is None else [one[one.scores > score] for one in found]

    def draw(
        self, image: ImageInput, detections: ImageDetections | None = None, *, path: str | Path | None = None
    ) -> NDArray[np.uint8]:
        """A copy of `image` with `detections` drawn on it, as an RGB array; also saved to `path` if given.

        None draws what scores above the run's `eval.show_score_threshold`. An image whose longer side is below 320
        pixels is enlarged, so that its labels can be read.
        """
        picture = self._pixels(image)
        if detections is None:
            every = self._detections([picture], 1)[0]
            detections = every[every.scores > self.run.eval.show_score_threshold]
        if detections.image_size != picture.shape[:2]:
            height, width = detections.image_size
            raise DataError(
                f"the detections are of an image of {height} x {width} pixels, but this one has "
                f"{picture.shape[0]} x {picture.shape[1]}",
                remedy="draw detections on the image they were found in",
            )
        drawn = drawn_detections(picture, detections.to_coco(image_id=0), detections.categories)
        drawn = np.ascontiguousarray(drawn[..., ::-1])
        if path is not None:
            save_picture(Path(path).expanduser(), drawn)
        return drawn

    def pixels(self, path: str | Path) -> NDArray[np.uint8]:
        """An image file as an RGB array, upright as its EXIF data say: what `detect` and `draw` make of a path."""
        return np.ascontiguousarray(self._pixels(path)[..., ::-1])

    def _pixels(self, image: ImageInput) -> NDArray[np.uint8]:
        return bgr_pixels(image, max_mpx=self.run.data.max_image_mpx)

    def _detections(
        self, pictures: Sequence[NDArray[np.uint8]], batch_size: int, images_left: int = 0
    ) -> list[ImageDetections]:
        """Detections of BGR images, those of one canvas together; `images_left` is how many the caller still has."""
        limits = {"short_edge_px": self.run.data.test_short_edge_px, "max_px": self.run.model.canvas_max_px}
        heights, widths = [picture.shape[0] for picture in pictures], [picture.shape[1] for picture in pictures]
        sizes = [(height, width) for height, width in resized_sizes(heights, widths, **limits).tolist()]
        canvases = self._canvases(heights, widths, sizes)
        found: dict[int, ImageDetections] = {}
        for canvas in dict.fromkeys(canvases):
            members = [index for index, other in enumerate(canvases) if other == canvas]
            expected = images_left * len(members) // len(pictures) if len(pictures) > 1 else 0
            for start in range(0, len(members), batch_size):
                batch = members[start : start + batch_size]
                images = _on_canvas([pictures[index] for index in batch], [sizes[index] for index in batch], canvas)
                detections = host_copy(self.runner(images.to(self.device), expected_images=expected)).wait()
                for row, index in enumerate(batch):
                    found[index] = image_detections(
                        detections,
                        row,
                        resized_hw=sizes[index],
                        original_hw=(heights[index], widths[index]),
                        categories=self.categories,
                        accurate_paste=self.run.eval.accurate_paste,
                    )
        return [found[index] for index in range(len(pictures))]

    def _canvases(
        self, heights: Sequence[int], widths: Sequence[int], sizes: Sequence[tuple[int, int]]
    ) -> Sequence[Canvas]:
        """The canvas of each image: on a GPU one of the few of the run, which can be recorded; else its own size."""
        rule = self.run.data.buckets
        if self.device.type != "cuda" or rule == "none":
            return sizes
        buckets = with_fallback(
            choose_buckets(
                "orientation" if rule == "tight" else rule,  # there is no set of images to fit tightly
                heights,
                widths,
                short_edge_px=self.run.data.test_short_edge_px,
                max_px=self.run.model.canvas_max_px,
                divisor=self.run.model.size_divisor,
            )
        )
        return [buckets.canvas(bucket, sizes) for bucket in buckets.of(heights, widths).tolist()]


def _on_canvas(pictures: Sequence[NDArray[np.uint8]], sizes: Sequence[tuple[int, int]], canvas: Canvas) -> Images:
    """BGR images resized to `sizes`, in the top left corners of canvases."""
    pixels = np.zeros((len(pictures), *canvas, 3), np.uint8)
    for on_canvas, picture, (height, width) in zip(pixels, pictures, sizes, strict=True):
        on_canvas[:height, :width] = cv2.resize(picture, (width, height), interpolation=cv2.INTER_LINEAR)
    return Images(torch.from_numpy(pixels).permute(0, 3, 1, 2), torch.tensor(sizes))


def save_picture(path: Path, picture: NDArray[np.uint8]) -> None:
    """Write the RGB `picture` to `path`, in the format of its suffix."""
    try:
        written = cv2.imwrite(str(path), np.ascontiguousarray(picture[..., ::-1]))
    except cv2.error:  # no encoder for this suffix
        written = False
    if not written:
        raise DataError(
            f"the drawn image could not be saved to {path}",
            remedy="check that the folder exists and can be written, and that the name ends in .png or .jpg",
        )
