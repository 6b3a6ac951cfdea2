"""Images that look the same: a perceptual hash finds candidates, and small thumbnails decide.

Shapes: N images, S = SIDE, F = FREQUENCIES.
"""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np
import numpy.typing as npt

SIDE = 16  # pixels of a thumbnail's sides
FREQUENCIES = 8  # of the cosine transform along each side: 64 bits of hash
MIN_CONTRAST = 4.0  # standard deviation, of 255: plain images all look alike
MIN_CORRELATION = 0.998  # of two thumbnails; COCO's images have at most 0.8, JPEGs of quality 30 more than 0.998
BAND_BITS = 16  # hashes that differ in at most three bits have one of four bands in common
MAX_NEIGHBOURS = 64  # images of the same band that each is compared with; a very common band says little

Thumbnails = npt.NDArray[np.float32]  # [N, S * S]
Ints = npt.NDArray[np.int64]


def thumbnail_of(pixels: npt.NDArray[np.uint8]) -> bytes:
    """The image [h, w, 3] as SIDE x SIDE gray pixels."""
    small = cv2.resize(pixels, (SIDE, SIDE), interpolation=cv2.INTER_AREA)
    return cv2.cvtColor(small, cv2.COLOR_BGR2GRAY).tobytes()


def similar_images(thumbnails: Sequence[bytes | None]) -> dict[int, int]:
    """{image: an earlier one that looks the same}, ascending; plain images and those without thumbnail never do.

    The time grows with the number of images, not with its square: 100,000 take ten seconds.
    """
    known = np.array([index for index, one in enumerate(thumbnails) if one is not None], np.int64)
    pixels = np.frombuffer(b"".join(one for one in thumbnails if one is not None), np.uint8)
    values = pixels.reshape(-1, SIDE * SIDE).astype(np.float32)
    values -= values.mean(axis=1, keepdims=True)
    deviation = values.std(axis=1)
    has_contrast = deviation >= MIN_CONTRAST
    known, values = known[has_contrast], values[has_contrast] / deviation[has_contrast, None]
    hashes = _hashes(values)
    earlier = np.arange(len(known))  # the first image that looks like this one; itself if there is none
    for shift in range(0, 64, BAND_BITS):
        rotated = (hashes << np.uint64(shift)) | (hashes >> np.uint64((64 - shift) % 64))
        order = np.argsort(rotated, kind="stable")
        _compare_neighbours(order, rotated[order] >> np.uint64(64 - BAND_BITS), values, earlier)
    for image in range(len(known)):  # ascending, so that all of a group name the same one
        earlier[image] = earlier[earlier[image]]
    return {int(known[image]): int(known[first]) for image, first in enumerate(earlier) if image != first}


def _compare_neighbours(order: Ints, bands: npt.NDArray[np.uint64], values: Thumbnails, earlier: Ints) -> None:
    """Lower `earlier` [N] of images that look like one of the same band; `order` and `bands` are sorted by band."""
    for offset in range(1, MAX_NEIGHBOURS + 1):
        same_band = np.flatnonzero(bands[offset:] == bands[:-offset])
        if not len(same_band):
            return
        one, other = order[same_band], order[same_band + offset]
        correlation = np.einsum("np,np->n", values[one], values[other]) / (SIDE * SIDE)
        is_same = correlation >= MIN_CORRELATION
        low, high = np.minimum(one, other)[is_same], np.maximum(one, other)[is_same]
        np.minimum.at(earlier, high, low)


def _hashes(values: Thumbnails) -> npt.NDArray[np.uint64]:
    """One bit for each low frequency of a thumbnail: whether its coefficient is above the median -> [N]."""
    frequency, position = np.arange(FREQUENCIES)[:, None], np.arange(SIDE)[None]
    cosines = np.cos(np.pi / SIDE * (position + 0.5) * frequency).astype(np.float32)  # [F, S]
    transform = np.einsum("fy,nyx,gx->nfg", cosines, values.reshape(-1, SIDE, SIDE), cosines, optimize=True)
    coefficients = transform.reshape(-1, FREQUENCIES * FREQUENCIES)
    bits = coefficients > np.median(coefficients, axis=1, keepdims=True)
    return np.packbits(bits, axis=1).view(np.uint64).ravel()
