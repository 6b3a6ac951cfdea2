"""What `maskfleet predict` is given, file by file: images, folders, patterns and videos; and the video it draws."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import cv2
import numpy as np
from numpy.typing import NDArray

from maskfleet.config.load import RUN_FILE
from maskfleet.errors import DataError
from maskfleet.system.files import move_into_place
from maskfleet.system.web.ranges import read_whole, shown

IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff"}
MAX_DOWNLOAD_BYTES = 200_000_000
WEIGHTS_SUFFIXES = {".safetensors", ".npz", ".pth", ".pt", ".pkl"}
VIDEO_SUFFIXES = {".mp4", ".mov", ".avi", ".mkv", ".webm", ".m4v"}
Picture = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class MediaFile:
    """An image or a video file, or the address of one."""

    path: Path
    url: str | None
    name: str  # for the user: the path as given, or relative to the folder that was given
    output: str  # relative path of what is drawn from it, without suffix; no two sources have the same

    @property
    def is_video(self) -> bool:
        return self.path.suffix.lower() in VIDEO_SUFFIXES

    def fetched(self, folder: Path) -> Path:
        """The file; one that has an address is downloaded to `folder`."""
        if self.url is None:
            return self.path
        path = folder / f"download{self.path.suffix.lower()}"
        path.write_bytes(read_whole(self.url, limit_bytes=MAX_DOWNLOAD_BYTES))
        return path


def find_sources(inputs: Sequence[str]) -> list[MediaFile]:
    """The images and videos that `inputs` name: paths, folders, patterns and addresses, in this order.

    A file that is named twice is used once. One that does not exist is an error, which lists all of them.
    """
    found: dict[Path | str, str] = {}
    missing: list[str] = []
    is_model = False
    for text in inputs:
        if text.startswith(("https://", "http://")):
            found.setdefault(text, shown(text))
            continue
        members = list(_members(text))
        if not members:
            missing.append(text)
            is_model |= (Path(text).expanduser() / RUN_FILE).is_file() or Path(text).suffix in WEIGHTS_SUFFIXES
        for path, name in members:
            found.setdefault(path, name)
    if missing:
        raise DataError(
            f"there is no image or video in: {', '.join(missing)}",
            remedy="the run or the weights file comes first, then the images"
            if is_model
            else "check the paths; a folder or pattern must hold files that end in "
            + ", ".join(sorted(IMAGE_SUFFIXES | VIDEO_SUFFIXES)),
        )
    outputs: set[str] = set()
    return [_media_file(one, name, outputs) for one, name in found.items()]


def frames(path: Path, *, max_mpx: float) -> Iterator[tuple[Picture, float]]:
    """The frames of a video as RGB pixels, each with the frames per second of the video."""
    video = cv2.VideoCapture(str(path))
    try:
        count, fps = 0, video.get(cv2.CAP_PROP_FPS) or 25.0
        size = video.get(cv2.CAP_PROP_FRAME_WIDTH) * video.get(cv2.CAP_PROP_FRAME_HEIGHT)
        if size > max_mpx * 1e6:
            raise DataError(
                f"the frames of {path} have {size / 1e6:.0f} million pixels", remedy="scale the video down first"
            )
        while True:
            is_read, frame = video.read()
            if not is_read:
                break
            count += 1
            yield np.asarray(cv2.cvtColor(frame, cv2.COLOR_BGR2RGB), np.uint8), fps
    finally:
        video.release()
    if count == 0:
        raise DataError(f"{path} is not a video that can be read", remedy="convert it to MP4 with H.264")


class VideoOutput:
    """An MP4 file of the frames that are added; it gets its name when the `with` block ends without an error."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: cv2.VideoWriter | None = None
        self._size = (0, 0)

    def __enter__(self) -> Self:
        # The suffix decides about the format, so that a temporary name must have it, too.
        self._temporary = self._path.with_name(f".{self._path.stem}.tmp{self._path.suffix}")
        return self

    def add(self, picture: Picture, fps: float) -> None:
        """Add an RGB frame."""
        if self._writer is None:
            self._size = (picture.shape[1], picture.shape[0])
            self._writer = cv2.VideoWriter(str(self._temporary), cv2.VideoWriter.fourcc(*"mp4v"), fps, self._size)
            if not self._writer.isOpened():
                raise DataError(
                    f"no video can be written to {self._path}", remedy="check that the folder exists and can be written"
                )
        self._writer.write(cv2.cvtColor(picture, cv2.COLOR_RGB2BGR))

    def __exit__(self, *error: object) -> None:
        if self._writer is not None:
            self._writer.release()
        if error[0] is None and self._temporary.exists():
            move_into_place(self._temporary, self._path)
        else:
            self._temporary.unlink(missing_ok=True)


def _members(text: str) -> Iterator[tuple[Path, str]]:
    path = Path(text).expanduser()
    if path.is_dir():
        for member in sorted(path.rglob("*")):
            if _is_media(member):
                yield member, member.relative_to(path).as_posix()
    elif path.is_file():
        yield path, text
    elif glob.has_magic(text):
        for match in sorted(glob.glob(str(path), recursive=True)):  # noqa: PTH207 - may be absolute
            if _is_media(Path(match)):
                yield Path(match), match


def _media_file(one: Path | str, name: str, taken: set[str]) -> MediaFile:
    if isinstance(one, Path):
        return MediaFile(one, None, name, _free(Path(name), taken))
    last = Path(urlsplit(one).path).name or "image"  # of the path alone: a query may hold a signature
    return MediaFile(Path(last), one, name, _free(Path(last), taken))


def _is_media(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES | VIDEO_SUFFIXES and path.is_file() and not path.name.startswith(".")


def _free(name: Path, taken: set[str]) -> str:
    """A relative path like `name` without its suffix that is not in `taken`, to which it is added.

    The folders of an absolute path, or of one that leads upwards, are left out: the output stays in its folder.
    """
    inside = name.with_suffix("") if not name.is_absolute() and ".." not in name.parts else Path(name.stem)
    wanted, number = inside.as_posix(), 1
    while wanted.lower() in taken:  # file systems may ignore case
        number += 1
        wanted = f"{inside.as_posix()}-{number}"
    taken.add(wanted.lower())
    return wanted
