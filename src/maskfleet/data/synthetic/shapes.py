"""Draws images of overlapping shapes, and records which pixels of each are visible.

Shapes: an image of H x W pixels has an owner map of 4H x 4W cells (FINE = 4), for outlines with a precision of a
quarter pixel; cell value 0 is background, n the n-th object drawn. Colours are BGR, 0..1, while drawing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import cv2
import numpy as np
import numpy.typing as npt

FINE = 4
KINDS = ("circle", "square", "triangle", "star", "ring", "cross", "heart", "ellipse", "hexagon", "crescent")
MIN_VISIBLE = 0.4  # share of an object's cells; with less, its class cannot be recognised
MIN_RADIUS_PX = 5.0
CROWD_MEMBERS = (9, 18)

Floats = npt.NDArray[np.float64]
Pixels = npt.NDArray[np.float32]
Cells = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class SceneObject:
    """An object, or a crowd, of the owner map."""

    kind: str
    is_crowd: bool


@dataclass(slots=True)
class Scene:
    """An image while it is drawn: its pixels, and the visible object of each fine cell."""

    pixels: Pixels  # [H, W, 3]
    owner: npt.NDArray[np.int16]  # [4H, 4W]
    objects: list[SceneObject] = field(default_factory=list)
    num_cells: list[int] = field(default_factory=list)  # of each object, when it was drawn


@dataclass(frozen=True, slots=True)
class Sprite:
    """A shape at its position: the cells that it covers in a window of whole pixels."""

    kind: str
    cells: Cells  # [4h, 4w], 0 or 1
    top: int  # of the window, in pixels
    left: int
    radius_px: float


def draw_scene(
    rng: np.random.Generator, size: tuple[int, int], kinds: tuple[str, ...], *, max_objects: int, crowd_fraction: float
) -> Scene:
    """Draw 1..max_objects shapes on a canvas of `size` (height, width), mostly from large to small."""
    height, width = size
    owner = np.zeros((height * FINE, width * FINE), np.int16)
    scene = Scene(_background(rng, height, width), owner)
    if rng.random() < crowd_fraction:
        _add_crowd(scene, rng, str(rng.choice(kinds)))
    largest = max(min(height, width) * 0.34, MIN_RADIUS_PX + 1)
    radii = np.exp(rng.uniform(np.log(MIN_RADIUS_PX), np.log(largest), int(rng.integers(1, max_objects + 1))))
    for radius in sorted(radii * rng.uniform(0.9, 1.0, len(radii)), reverse=True):
        for _ in range(6):
            centre = rng.uniform(0.4 * radius, np.array([width, height]) - 0.4 * radius)
            sprite = _sprite(rng, str(rng.choice(kinds)), centre, float(radius), size)
            if _leaves_all_visible(scene, sprite):
                _draw(scene, rng, [sprite], is_crowd=False)
                break
    if not any(not drawn.is_crowd for drawn in scene.objects):
        sprite = _sprite(rng, str(rng.choice(kinds)), np.array([width, height]) / 2, largest / 2, size)
        _draw(scene, rng, [sprite], is_crowd=False)
    return scene


def visible_cells(scene: Scene, number: int) -> Cells:
    """Fine cells [4H, 4W], 0 or 1, where object `number` (from 1) is visible."""
    return np.asarray(scene.owner == number, np.uint8)


def visible_pixels(scene: Scene, number: int) -> npt.NDArray[np.bool_]:
    """Pixels [H, W] of which at least half shows object `number`."""
    height, width = scene.pixels.shape[:2]
    cells = visible_cells(scene, number).reshape(height, FINE, width, FINE)
    return np.asarray(cells.sum(axis=(1, 3), dtype=np.int32) * 2 >= FINE * FINE)


def outline(kind: str, rng: np.random.Generator) -> list[Floats]:
    """Closed curves [n, 2] of a shape of radius 1 around (0, 0), rotated at random; a second curve is a hole."""
    turn = rng.uniform(-0.45, 0.45) if kind == "heart" else rng.uniform(0, 2 * np.pi)
    match kind:
        case "circle" | "square" | "triangle" | "hexagon":
            curves = [_arc(1.0, {"circle": 64, "square": 4, "triangle": 3, "hexagon": 6}[kind])]
        case "ellipse":
            curves = [_arc(1.0) * [1.0, rng.uniform(0.4, 0.6)]]
        case "ring":
            curves = [_arc(1.0), _arc(rng.uniform(0.5, 0.6))]
        case "star":
            curves = [_arc(1.0, 10) * np.where(np.arange(10) % 2, 0.45, 1.0)[:, None]]
        case "cross":
            arm = rng.uniform(0.28, 0.34)
            quarter = np.array([[arm, -1.0], [arm, -arm], [1.0, -arm]]) / np.hypot(1.0, arm)
            curves = [np.concatenate([quarter @ _rotation(n * np.pi / 2).T for n in range(4)])]
        case "heart":
            angle = np.linspace(0, 2 * np.pi, 64, endpoint=False)
            dip = 13 * np.cos(angle) - 5 * np.cos(2 * angle) - 2 * np.cos(3 * angle) - np.cos(4 * angle)
            curves = [np.stack([16 * np.sin(angle) ** 3, -dip - 2.5], axis=1) / 18.2]
        case "crescent":
            curves = [_crescent()]
        case _:
            raise AssertionError(f"no outline for {kind}")
    return [curve @ _rotation(turn).T for curve in curves]


def _crescent() -> Floats:
    """The unit disc without a smaller disc that overlaps it from the right."""
    outer, inner = _arc(1.0), _arc(0.82) + np.array([0.5, 0.0])
    bitten = np.hypot(outer[:, 0] - 0.5, outer[:, 1]) < 0.82
    inside = np.hypot(inner[:, 0], inner[:, 1]) < 1
    start = int(np.flatnonzero(bitten & ~np.roll(bitten, -1))[0]) + 1
    back = int(np.flatnonzero(inside & ~np.roll(inside, -1))[0]) + 1
    rim = np.roll(outer, -start, axis=0)[: int((~bitten).sum())]
    bite = np.roll(inner, -back, axis=0)[-int(inside.sum()) :]
    return np.concatenate([rim, bite[::-1]])


def _arc(radius: float, points: int = 64) -> Floats:
    angle = np.linspace(0, 2 * np.pi, points, endpoint=False)
    return radius * np.stack([np.cos(angle), np.sin(angle)], axis=1)


def _rotation(angle: float) -> Floats:
    return np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])


def _sprite(rng: np.random.Generator, kind: str, centre: Floats, radius: float, size: tuple[int, int]) -> Sprite:
    """A shape of `radius` pixels around `centre` (x, y), clipped to the image."""
    left, top = np.maximum(np.floor(centre - radius - 1), 0).astype(int)
    right, bottom = np.minimum(np.ceil(centre + radius + 1), [size[1], size[0]]).astype(int)
    cells = np.zeros(((bottom - top) * FINE, (right - left) * FINE), np.uint8)
    # the centre of cell (0, 0) is at half a cell; fillPoly counts from centres, in 1/256 cells
    curves = [((curve * radius + centre - [left, top]) * FINE - 0.5) * 256 for curve in outline(kind, rng)]
    cv2.fillPoly(cells, [np.round(curve).astype(np.int32) for curve in curves], 1, shift=8)
    return Sprite(kind, cells, int(top), int(left), radius)


def _window(scene: Scene, sprite: Sprite) -> npt.NDArray[np.int16]:
    rows, columns = sprite.cells.shape
    top, left = sprite.top * FINE, sprite.left * FINE
    return scene.owner[top : top + rows, left : left + columns]


def _leaves_all_visible(scene: Scene, sprite: Sprite) -> bool:
    """Whether every object drawn so far would stay visible enough."""
    hidden = np.bincount(_window(scene, sprite)[sprite.cells == 1], minlength=len(scene.objects) + 1)
    for number in np.flatnonzero(hidden[1:]) + 1:
        seen = np.count_nonzero(scene.owner == number) - int(hidden[number])
        if seen < MIN_VISIBLE * scene.num_cells[number - 1]:
            return False
    return True


def _add_crowd(scene: Scene, rng: np.random.Generator, kind: str) -> None:
    """A group of small shapes of one kind, which is one crowd region."""
    height, width = scene.pixels.shape[:2]
    spread = min(height, width) * rng.uniform(0.15, 0.25)
    centre = rng.uniform(spread, np.array([width, height]) - spread)
    sprites = []
    for _ in range(int(rng.integers(*CROWD_MEMBERS))):
        position = np.clip(centre + rng.normal(0, spread / 2, 2), 1, [width - 1, height - 1])
        sprites.append(_sprite(rng, kind, position, rng.uniform(0.8, 1.4) * max(spread / 7, 3.0), (height, width)))
    _draw(scene, rng, sprites, is_crowd=True)


def _draw(scene: Scene, rng: np.random.Generator, sprites: list[Sprite], *, is_crowd: bool) -> None:
    """Draw one object made of `sprites` on top of the others."""
    number = len(scene.objects) + 1
    for sprite in sprites:
        _window(scene, sprite)[sprite.cells == 1] = number
        _draw_sprite(scene.pixels, rng, sprite)
    scene.objects.append(SceneObject(sprites[0].kind, is_crowd))
    scene.num_cells.append(int(np.count_nonzero(scene.owner == number)))


def _draw_sprite(pixels: Pixels, rng: np.random.Generator, sprite: Sprite) -> None:
    height, width = sprite.cells.shape[0] // FINE, sprite.cells.shape[1] // FINE
    target = pixels[sprite.top : sprite.top + height, sprite.left : sprite.left + width]
    coverage = _shrunk(sprite.cells, (width, height))
    rim_cells = max(3, round(FINE * min(2.0, 0.12 * sprite.radius_px))) | 1
    brush = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (rim_cells, rim_cells))
    inside = _shrunk(np.asarray(cv2.erode(sprite.cells, brush, borderValue=1), np.uint8), (width, height))
    _cast_shadow(pixels, sprite, coverage)
    body = _texture(rng, sprite, height, width)
    colour = body * (0.55 + 0.45 * inside)
    target[:] = target * (1 - coverage) + np.clip(colour, 0, 1) * coverage


def _shrunk(cells: Cells, size: tuple[int, int]) -> Pixels:
    """Share of each pixel that is covered -> [h, w, 1]."""
    shrunk = cv2.resize(cells.astype(np.float32), size, interpolation=cv2.INTER_AREA)
    return np.asarray(shrunk, np.float32)[:, :, None]


def _cast_shadow(pixels: Pixels, sprite: Sprite, coverage: Pixels) -> None:
    """Darken the pixels below and to the right of the sprite."""
    offset = max(1, round(0.08 * sprite.radius_px))
    top, left = sprite.top + offset, sprite.left + offset
    target = pixels[top : top + coverage.shape[0], left : left + coverage.shape[1]]
    soft = cv2.GaussianBlur(coverage, (0, 0), 0.6 + offset / 2)[: target.shape[0], : target.shape[1], None]
    target *= 1 - 0.35 * soft


def _texture(rng: np.random.Generator, sprite: Sprite, height: int, width: int) -> Pixels:
    """Colours of a sprite [h, w, 3]: a hue typical of its kind, lit from one side, sometimes with a pattern."""
    hue = KINDS.index(sprite.kind) * 360 / len(KINDS) + rng.normal(0, 14)
    if rng.random() < 0.12:
        hue = rng.uniform(0, 360)
    base = _bgr(hue, rng.uniform(0.65, 0.95), rng.uniform(0.75, 1.0))
    x, y = np.meshgrid(np.linspace(-1, 1, width), np.linspace(-1, 1, height))
    light = 1 - 0.22 * (x * 0.6 + y * 0.8)
    pattern = _pattern(rng, height, width, period=max(5.0, sprite.radius_px / 2.2))
    texture = base * (light * pattern)[:, :, None]
    return np.asarray(texture, np.float32)


def _pattern(rng: np.random.Generator, height: int, width: int, *, period: float) -> Floats:
    """Brightness [h, w] around 1: plain, stripes, checks or dots."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    angle = rng.uniform(0, np.pi)
    along = np.sin(2 * np.pi * (x * np.cos(angle) + y * np.sin(angle)) / period)
    across = np.sin(2 * np.pi * (y * np.cos(angle) - x * np.sin(angle)) / period)
    choice = rng.integers(4)
    waves = (np.zeros_like(along), along, along * across * 1.5, np.maximum(along + across, 0))[choice]
    return np.asarray(1 + 0.16 * np.tanh(3 * waves))


def _background(rng: np.random.Generator, height: int, width: int) -> Pixels:
    """A low-contrast background [H, W, 3]: a gradient, clouds, a pattern and noise."""
    hue = rng.uniform(0, 360)
    first = _bgr(hue, rng.uniform(0.05, 0.22), rng.uniform(0.3, 0.85))
    second = _bgr(hue + rng.uniform(-60, 60), rng.uniform(0.05, 0.22), rng.uniform(0.3, 0.85))
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    angle = rng.uniform(0, 2 * np.pi)
    mix = np.clip(0.5 + (x - 0.5) * np.cos(angle) + (y - 0.5) * np.sin(angle), 0, 1)[:, :, None]
    clouds = cv2.resize(rng.normal(0, 1, (6, 6)).astype(np.float32), (width, height), interpolation=cv2.INTER_CUBIC)
    canvas = first * mix + second * (1 - mix) + 0.05 * clouds[:, :, None]
    canvas = canvas * (1 + 0.25 * (_pattern(rng, height, width, period=rng.uniform(8, 40))[:, :, None] - 1))
    canvas += rng.normal(0, rng.uniform(0.004, 0.02), (height, width, 1))
    return np.asarray(np.clip(canvas, 0, 1), np.float32)


def _bgr(hue: float, saturation: float, value: float) -> Floats:
    colour = np.array([[[hue % 360, saturation, value]]], np.float32)
    return np.asarray(cv2.cvtColor(colour, cv2.COLOR_HSV2BGR)[0, 0], np.float64)
