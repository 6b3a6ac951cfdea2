"""Problems of image files, found in their headers and, optionally, by decoding them."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from maskfleet.data.checks.problems import KINDS, Problem, problem_of
from maskfleet.data.checks.similar import thumbnail_of
from maskfleet.data.files.stored import StoredFile, StoredFolder
from maskfleet.data.image_formats import ImageEmptyError, ImageFileError, ImageHeader, ImageTooLargeError
from maskfleet.data.image_header import expect_decodable, read_image_header
from maskfleet.data.pipeline.decode import decoded_file
from maskfleet.data.store.annotations import AnnotationStore, ImageRecord

Progress = Callable[[int, int], None]
CHUNK = 64
DECODER_MESSAGES = (b"Premature end of JPEG", b"Corrupt JPEG", b"libpng error", b"libpng warning: IDAT")

Fault = tuple[str, str]  # kind, what


@dataclass(frozen=True, slots=True)
class ImageCheck:
    """What reading one image found."""

    faults: list[Fault]
    thumbnail: bytes | None = None  # of an image that was decoded


def check_images(
    store: AnnotationStore,
    *,
    decode: bool,
    workers: int,
    progress: Progress | None = None,
    listed: bool = False,
    thumbnails: list[bytes | None] | None = None,
) -> list[Problem]:
    """Problems of the image files, in the order of the store; with `workers` threads, or processes if `decode`.

    With `listed`, images of a remote data set are only looked up in its listing. The thumbnail of each decoded image is
    appended to `thumbnails`, None for others.
    """
    problems: list[Problem] = []
    if listed and isinstance(store.split.images, StoredFolder) and store.split.images.root.is_remote:
        checks: Iterator[ImageCheck] = map(_check_of_listing, map(store.image, range(len(store))))
    else:
        checks = _checked(store, decode, workers)
    for index, found in enumerate(checks):
        record = store.image(index)
        problems += [problem_of(kind, what, record.path, record.id) for kind, what in found.faults]
        if thumbnails is not None:
            thumbnails.append(found.thumbnail)
        if progress is not None:
            progress(index + 1, len(store))
    return problems


def faults_of_image(record: ImageRecord) -> list[Fault]:
    """Problems visible in the file's path and header."""
    path = record.path
    if record.is_outside:
        return [("image-outside", f"{path} is outside of the image folder; it is not read")]
    try:
        header = read_image_header(path)
        expect_decodable(header, record.max_mpx)
    except FileNotFoundError:
        return [("image-missing", f"there is no file {path}")]
    except OSError as error:
        return [("image-missing", f"{path} cannot be opened: {error.strerror}")]
    except ImageTooLargeError as error:
        return [("image-too-large", f"{path.name} is not decoded: {error}")]
    except ImageFileError as error:
        kind = "image-empty" if isinstance(error, ImageEmptyError) else "image-corrupt"
        return [(kind, f"{path.name} cannot be read: {error}")]
    return _header_faults(record, header)


def faults_of_listed_image(record: ImageRecord) -> list[Fault]:
    """Problems visible in the listing of a remote data set: reading each image would take as long as a first pass."""
    path = record.path
    assert isinstance(path, StoredFile), "files of a folder are read"
    if record.is_outside:
        return [("image-outside", f"{path} is outside of the image folder; it is not read")]
    try:
        return [("image-empty", f"{path.name} is empty")] if path.size == 0 else []
    except FileNotFoundError:
        return [("image-missing", f"there is no file {path}")]


def check_of_decoded_image(record: ImageRecord) -> ImageCheck:
    """Problems visible in the header and, if it has no errors, those found by decoding.

    Damage inside a JPEG that keeps its number of blocks decodes without a message and is not found.
    """
    faults = faults_of_image(record)
    if any(KINDS[kind][0] == "error" for kind, _ in faults):
        return ImageCheck(faults)
    with captured_stderr() as messages:
        try:
            pixels = decoded_file(record.path, max_mpx=record.max_mpx)
        except (ImageFileError, OSError) as error:
            return ImageCheck([*faults, ("image-corrupt", f"{record.path.name} cannot be decoded: {error}")])
        output = messages()
    if any(message in output for message in DECODER_MESSAGES):
        line = output.decode("utf-8", "replace").strip().splitlines()[0]
        return ImageCheck([*faults, ("image-corrupt", f"{record.path.name} is damaged; the decoder says: {line}")])
    if pixels.shape[:2] != (record.height, record.width):
        faults = [*faults, ("image-size", _size_fault(record, pixels.shape[1], pixels.shape[0]))]
    return ImageCheck(faults, thumbnail_of(pixels))


def _check_of_listing(record: ImageRecord) -> ImageCheck:
    return ImageCheck(faults_of_listed_image(record))


def _check_of_header(record: ImageRecord) -> ImageCheck:
    return ImageCheck(faults_of_image(record))


def _header_faults(record: ImageRecord, header: ImageHeader) -> list[Fault]:
    name = record.path.name
    faults: list[Fault] = []
    if not header.is_whole:
        faults.append(("image-truncated", f"{name} has no end marker: it is truncated"))
    if (header.width, header.height) != (record.width, record.height):
        what = _size_fault(record, header.width, header.height)
        if header.orientation >= 5 and (header.height, header.width) == (record.width, record.height):
            what += "; EXIF rotates it by 90 degrees, and the annotations seem to be for the rotated image"
        faults.append(("image-size", what))
    found = {
        "image-grey": (header.colour == "grey", "is grayscale"),
        "image-cmyk": (header.colour == "cmyk", "has CMYK channels"),
        "image-alpha": (header.has_alpha, "has an alpha channel"),
        "image-16bit": (header.bits > 8, f"has {header.bits} bits per channel"),
        "image-rotated": (header.orientation != 1, f"has EXIF orientation {header.orientation}"),
    }
    return faults + [(kind, f"{name} {what}") for kind, (applies, what) in found.items() if applies]


def _size_fault(record: ImageRecord, width: int, height: int) -> str:
    return f"{record.path.name} is {width} x {height}, but the annotation file says {record.width} x {record.height}"


def _checked(store: AnnotationStore, decode: bool, workers: int) -> Iterator[ImageCheck]:
    find = check_of_decoded_image if decode else _check_of_header
    records = map(store.image, range(len(store)))
    if workers <= 0:
        yield from map(find, records)
        return
    pool: Executor
    if decode:
        # processes, because a decoder writes its messages to the process's stderr
        pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    else:
        pool = ThreadPoolExecutor(workers)
    with pool:
        yield from pool.map(find, records, chunksize=CHUNK)


@contextmanager
def captured_stderr() -> Iterator[Callable[[], bytes]]:
    """Redirect stderr, which C libraries write to, into a file; yields a function that reads it."""
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)

        def read() -> bytes:
            file.seek(0)
            return file.read()

        try:
            yield read
        finally:
            os.dup2(kept, 2)
            os.close(kept)
