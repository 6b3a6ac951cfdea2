"""The augmentations of a training image; `build.augmentations` lists those of a run.

To add one: a class here, a field in `config.run.DataConfig`, a line at the end of that list, and a test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import cv2
import numpy as np
import numpy.typing as npt

from maskfleet.data.pipeline.geometry import Geometry, Pixels, resize_geometry

Draws = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class AugmentedImage:
    """A source image with its colours changed, and the geometry that will move its pixels and its ground truth.

    Geometric augmentations only change `geometry`: the pixels are resampled once, by `place_image` or on the GPU.
    """

    pixels: Pixels  # [h, w, 3] of the source, not yet resized; a large one is decoded smaller (see decode.reduction)
    geometry: Geometry
    canvas: tuple[int, int] | None  # None where each batch has a canvas of its own size


class Augmentation(Protocol):
    """One random change of a training image; its fields are its settings.

    Every image draws the numbers of every augmentation in the list, even of those switched off: no setting changes
    what the other augmentations draw.
    """

    def draw(self, rng: np.random.Generator) -> Draws:
        """Random numbers for one image; always the same number of them."""

    def apply(self, image: AugmentedImage, draws: Draws) -> AugmentedImage:
        """`image`, changed as `draws` decide."""


def augmented(
    pixels: Pixels,
    augmentations: Sequence[Augmentation],
    *,
    canvas: tuple[int, int] | None,
    seed: int,
    size: tuple[int, int] | None = None,
) -> AugmentedImage:
    """The source `pixels` after all `augmentations`, in order, with random numbers drawn from `seed`.

    `size` is that of the source, if the pixels were decoded smaller.
    """
    rng = np.random.default_rng(seed)
    size = size or (pixels.shape[0], pixels.shape[1])
    image = AugmentedImage(pixels, Geometry(size, size, (0, 0), size, flip=False), canvas)
    for augmentation in augmentations:
        image = augmentation.apply(image, augmentation.draw(rng))
    return image


@dataclass(frozen=True, slots=True)
class ResizeShortEdge:
    """Resize to a short edge drawn from the inclusive range `short_edge_px`, by TensorPack's rule."""

    short_edge_px: tuple[int, int]
    max_px: int

    def draw(self, rng: np.random.Generator) -> Draws:
        return rng.random(1)

    def apply(self, image: AugmentedImage, draws: Draws) -> AugmentedImage:
        low, high = self.short_edge_px
        short = low + int(draws[0] * (high - low + 1))
        before = image.geometry
        geometry = resize_geometry(before.source, short_edge_px=short, max_px=self.max_px, flip=before.flip)
        return replace(image, geometry=geometry)


@dataclass(frozen=True, slots=True)
class Flip:
    """Mirror the image left to right."""

    probability: float

    def draw(self, rng: np.random.Generator) -> Draws:
        return rng.random(1)

    def apply(self, image: AugmentedImage, draws: Draws) -> AugmentedImage:
        return replace(image, geometry=replace(image.geometry, flip=bool(draws[0] < self.probability)))


@dataclass(frozen=True, slots=True)
class ScaleJitter:
    """Large-scale jitter: fit the image to the canvas, times a factor, then crop a random canvas-sized window.

    It replaces the resize before it. An image smaller than the canvas stays whole in its top left corner (Ghiasi et
    al., Simple Copy-Paste, section 3).
    """

    factors: tuple[float, float] | None  # smallest and largest; None for off

    def draw(self, rng: np.random.Generator) -> Draws:
        return rng.random(3)

    def apply(self, image: AugmentedImage, draws: Draws) -> AugmentedImage:
        if self.factors is None:
            return image
        source, canvas = image.geometry.source, image.canvas
        assert canvas is not None, "large-scale jitter crops to a fixed canvas"
        low, high = self.factors
        ratio = (low + draws[0] * (high - low)) * min(canvas[0] / source[0], canvas[1] / source[1])
        height, width = (max(1, int(side * ratio + 0.5)) for side in source)
        size = (min(height, canvas[0]), min(width, canvas[1]))
        offset = (int(draws[1] * (height - size[0] + 1)), int(draws[2] * (width - size[1] + 1)))
        return replace(image, geometry=Geometry(source, (height, width), offset, size, image.geometry.flip))


@dataclass(frozen=True, slots=True)
class ColorJitter:
    """Change brightness, contrast and saturation, in this order, each by a factor in 1 - strength .. 1 + strength."""

    strength: float  # 0 for off

    def draw(self, rng: np.random.Generator) -> Draws:
        return rng.random(3)

    def apply(self, image: AugmentedImage, draws: Draws) -> AugmentedImage:
        if self.strength == 0:
            return image
        brightness, contrast, saturation = 1 + self.strength * (2 * draws - 1)
        pixels = image.pixels
        mean = cv2.mean(cv2.cvtColor(pixels, cv2.COLOR_BGR2GRAY))[0] * brightness
        levels = (np.arange(256) * brightness - mean) * contrast + mean
        changed = cv2.LUT(pixels, np.clip(np.rint(levels), 0, 255).astype(np.uint8))
        gray = cv2.cvtColor(cv2.cvtColor(changed, cv2.COLOR_BGR2GRAY), cv2.COLOR_GRAY2BGR)
        blended = cv2.addWeighted(changed, saturation, gray, 1 - saturation, 0)
        return replace(image, pixels=np.asarray(blended, np.uint8))
