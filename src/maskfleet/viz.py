"""Draws boxes, masks and labels on images.

Shapes: H x W the image (uint8 BGR), D instances, h x w the window of a mask. Boxes are xyxy pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]  # [H, W, 3] BGR
Color = tuple[int, int, int]  # BGR
Mask = NDArray[np.bool_] | tuple[int, int, NDArray[np.bool_]]  # [H, W], or (y0, x0, [h, w])
Area = tuple[int, int, int, int]  # x1, y1, x2, y2 in whole pixels, x2 and y2 exclusive

# Okabe and Ito's colours, distinguishable with any colour vision, then Paul Tol's light ones; BGR.
PALETTE: tuple[Color, ...] = (
    (0, 159, 230),  # orange
    (233, 180, 86),  # sky blue
    (115, 158, 0),  # bluish green
    (66, 228, 240),  # yellow
    (178, 114, 0),  # blue
    (0, 94, 213),  # vermilion
    (167, 121, 204),  # reddish purple
    (136, 221, 119),  # mint
    (255, 221, 153),  # pale cyan
    (102, 136, 238),  # salmon
    (187, 68, 170),  # violet
    (51, 187, 187),  # olive
)
SHADES = (0.0, 0.45, -0.3, 0.7, -0.5, 0.25, -0.15)  # when the palette repeats: towards white (+) or black (-)
FILL = 0.45  # opacity of a mask
FONT = cv2.FONT_HERSHEY_SIMPLEX
BACKGROUND = 32  # grey level between the images of a grid


@dataclass(frozen=True, slots=True)
class _Pen:
    """Line and font sizes that suit the size of an image."""

    line: int
    font_scale: float
    font_line: int
    pad: int


def draw(
    image: Image,
    boxes: NDArray[np.floating],
    labels: Sequence[int] | NDArray[np.integer],
    scores: Sequence[float] | NDArray[np.floating] | None = None,
    *,
    masks: Sequence[Mask] | None = None,
    names: Sequence[str] = (),
) -> Image:
    """A copy of `image` [H, W, 3] with D instances: boxes [D, 4], labels [D] 1, 2, ..., scores [D] and D masks.

    The label determines the colour, and `names[label - 1]` is its name. Small masks are drawn over large ones, high
    scores over low ones.
    """
    canvas = image.copy()
    found = np.asarray(boxes, dtype=np.float64).reshape(-1, 4)
    pen = _pen_for(image, len(found))
    order = range(len(found)) if scores is None else np.argsort(scores, kind="stable").tolist()
    if masks is not None:
        areas = (found[:, 2] - found[:, 0]) * (found[:, 3] - found[:, 1])
        for index in np.argsort(-areas, kind="stable").tolist():
            _draw_mask(canvas, masks[index], color_of(int(labels[index])), pen)
    for index in order:
        x1, y1, x2, y2 = _whole_box(canvas, found[index])
        color = color_of(int(labels[index]))
        cv2.rectangle(canvas, (x1, y1), (x2 - 1, y2 - 1), color, max(1, pen.line // 2), cv2.LINE_8)
    taken: list[Area] = []
    tags = []
    for index in reversed(order):  # the highest scores choose their positions first
        text = _tag_text(int(labels[index]), None if scores is None else float(scores[index]), names)
        text = _cut_to(text, pen, canvas.shape[1])
        tags.append((index, text, _tag_area(canvas, found[index], text, pen, taken)))
    for index, text, area in reversed(tags):
        _draw_tag(canvas, text, area, color_of(int(labels[index])), pen)
    return canvas


def color_of(label: int) -> Color:
    """The colour of a label 1, 2, ...; after its last colour the palette repeats in other shades."""
    turn, index = divmod(max(label - 1, 0), len(PALETTE))
    shade = SHADES[turn % len(SHADES)]
    target = 255 if shade > 0 else 0
    base = PALETTE[(index + 5 * turn) % len(PALETTE)]  # so that labels one palette length apart differ
    blue, green, red = (round(channel + (target - channel) * abs(shade)) for channel in base)
    return blue, green, red


def grid(images: Sequence[Image], *, columns: int, tile: tuple[int, int]) -> Image:
    """All images in rows of `columns`, each scaled to fit a tile of (height, width)."""
    assert images
    assert columns >= 1
    height, width = tile
    gap = max(2, min(tile) // 60)
    rows = -(-len(images) // columns)
    columns = min(columns, len(images))
    sheet = np.full((rows * (height + gap) + gap, columns * (width + gap) + gap, 3), BACKGROUND, np.uint8)
    for index, image in enumerate(images):
        row, column = divmod(index, columns)
        fitted = _fitted(image, height, width)
        y = gap + row * (height + gap) + (height - fitted.shape[0]) // 2
        x = gap + column * (width + gap) + (width - fitted.shape[1]) // 2
        sheet[y : y + fitted.shape[0], x : x + fitted.shape[1]] = fitted
    return sheet


def _pen_for(image: Image, num_instances: int) -> _Pen:
    side = float(np.sqrt(image.shape[0] * image.shape[1]))
    crowding = float(np.clip((10 / max(num_instances, 1)) ** 0.25, 0.65, 1.0))  # many large tags would hide the image
    font_scale = float(np.clip(side / 1300 * crowding, 0.3, 3.0))
    return _Pen(
        line=max(1, round(side / 450)),
        font_scale=font_scale,
        font_line=max(1, round(font_scale * 1.6)),
        pad=max(2, round(side / 220 * crowding)),
    )


def _draw_mask(canvas: Image, mask: Mask, color: Color, pen: _Pen) -> None:
    """Tint the mask's pixels and outline it, in place."""
    y0, x0, window = mask if isinstance(mask, tuple) else (0, 0, mask)
    window = window[max(-y0, 0) : max(canvas.shape[0] - y0, 0), max(-x0, 0) : max(canvas.shape[1] - x0, 0)]
    y0, x0 = max(y0, 0), max(x0, 0)
    if not window.any():
        return
    part = canvas[y0 : y0 + window.shape[0], x0 : x0 + window.shape[1]]
    inside = window.astype(np.bool_)
    part[inside] = np.rint(part[inside] * (1 - FILL) + np.array(color) * FILL).astype(np.uint8)
    contours, _ = cv2.findContours(inside.astype(np.uint8), cv2.RETR_CCOMP, cv2.CHAIN_APPROX_NONE, offset=(x0, y0))
    cv2.drawContours(canvas, contours, -1, color, pen.line, cv2.LINE_AA)


def _whole_box(canvas: Image, box: NDArray[np.float64]) -> Area:
    """`box` [4] in whole pixels of the image, at least one wide and high."""
    height, width = canvas.shape[:2]
    x1, y1 = min(max(round(box[0]), 0), width - 1), min(max(round(box[1]), 0), height - 1)
    return x1, y1, min(max(round(box[2]), x1 + 1), width), min(max(round(box[3]), y1 + 1), height)


def _tag_text(label: int, score: float | None, names: Sequence[str]) -> str:
    name = names[label - 1] if 1 <= label <= len(names) else str(label)
    plain = name.encode("ascii", "replace").decode("ascii")  # the font has no other characters
    return plain if score is None else f"{plain} {score:.2f}"


def _cut_to(text: str, pen: _Pen, width: int) -> str:
    """As many characters of `text` as fit a tag of `width` pixels."""
    while len(text) > 1 and cv2.getTextSize(text, FONT, pen.font_scale, pen.font_line)[0][0] + 2 * pen.pad > width:
        text = text[:-1]
    return text


def _tag_area(canvas: Image, box: NDArray[np.float64], text: str, pen: _Pen, taken: list[Area]) -> Area:
    """The area of a tag in the image: above, inside, below or beside its box, with the least overlap with `taken`.

    Adds the area to `taken`.
    """
    height, width = canvas.shape[:2]
    x1, y1, x2, y2 = _whole_box(canvas, box)
    (text_width, text_height), descent = cv2.getTextSize(text, FONT, pen.font_scale, pen.font_line)
    tag_width, tag_height = min(text_width + 2 * pen.pad, width), min(text_height + descent + pen.pad, height)
    corners = (
        *((x1, y1 - tag_height), (x1, y1), (x2 - tag_width, y1 - tag_height)),
        *((x1, y2), (x1, y2 - tag_height), (x2 - tag_width, y2 - tag_height), (x2, y1)),
    )
    areas = []
    for x, y in corners:
        x, y = min(max(x, 0), width - tag_width), min(max(y, 0), height - tag_height)
        areas.append((x, y, x + tag_width, y + tag_height))
    area = min(areas, key=lambda area: sum(_overlap(area, other) for other in taken))
    taken.append(area)
    return area


def _overlap(a: Area, b: Area) -> int:
    return max(0, min(a[2], b[2]) - max(a[0], b[0])) * max(0, min(a[3], b[3]) - max(a[1], b[1]))


def _draw_tag(canvas: Image, text: str, area: Area, color: Color, pen: _Pen) -> None:
    x1, y1, x2, y2 = area
    tag = np.full((y2 - y1, x2 - x1, 3), color, np.uint8)
    _, descent = cv2.getTextSize(text, FONT, pen.font_scale, pen.font_line)
    origin = (pen.pad, tag.shape[0] - descent - pen.pad // 2 + pen.pad // 4)
    cv2.putText(tag, text, origin, FONT, pen.font_scale, _ink(color), pen.font_line, cv2.LINE_AA)
    canvas[y1:y2, x1:x2] = tag


def _ink(color: Color) -> Color:
    """Black or white, whichever is more legible on `color` (by its luma, ITU-R BT.601)."""
    blue, green, red = color
    return (0, 0, 0) if 0.114 * blue + 0.587 * green + 0.299 * red > 110 else (255, 255, 255)


def _fitted(image: Image, height: int, width: int) -> Image:
    scale = min(height / image.shape[0], width / image.shape[1])
    size = (max(1, min(width, round(image.shape[1] * scale))), max(1, min(height, round(image.shape[0] * scale))))
    method = cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
    return np.asarray(cv2.resize(image, size, interpolation=method), dtype=np.uint8)
