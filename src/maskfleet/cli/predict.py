"""`maskfleet predict`: what a trained model detects in images and videos."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Protocol

import typer

from maskfleet.cli.console import err, out, print_error
from maskfleet.cli.options import BestOption, DeviceOption, LastOption, StepOption, chosen_checkpoint
from maskfleet.cli.outputs import expect_writable
from maskfleet.errors import DataError, LaunchError, MaskfleetError

if TYPE_CHECKING:
    from maskfleet.inference.detections import ImageDetections
    from maskfleet.inference.detector import Detector
    from maskfleet.inference.sources import MediaFile, Picture

RESULTS = "detections.json"
IMAGES_AT_A_TIME = 64  # decoded images and their detections are in memory together


def predict(
    weights: Annotated[Path, typer.Argument(help="Run directory or weights file.", show_default=False)],
    images: Annotated[
        list[str],
        typer.Argument(
            help="Images or videos: files, folders, patterns such as 'photos/*.jpg', addresses.", show_default=False
        ),
    ],
    out_dir: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for the drawn images and detections.json.")
    ] = Path("predictions"),
    score: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Draw detections above this score. Default: the run's own.", show_default=False
        ),
    ] = None,
    best: BestOption = False,
    last: LastOption = False,
    step: StepOption = None,
    device: DeviceOption = None,
) -> None:
    """Draw boxes and masks on IMAGES, upright as their EXIF data say, and write all detections as COCO results.

    An image that cannot be read is reported, and the others are still done; the exit code is then 2.
    """
    from maskfleet.inference.load import load
    from maskfleet.inference.sources import find_sources

    sources = find_sources(images)
    expect_outputs(sources, out_dir)
    detector = load(weights, device, checkpoint=chosen_checkpoint(best=best, last=last, step=step))
    threshold = detector.run.eval.show_score_threshold if score is None else score
    draw_all(LocalModel(detector), sources, out_dir, threshold)


def expect_outputs(sources: Sequence[MediaFile], out_dir: Path) -> None:
    """Raise before the work if results cannot be written to `out_dir`, or would replace one of `sources`."""
    expect_writable(out_dir / RESULTS, option="--out")
    inputs = {source.path.resolve() for source in sources if source.url is None}
    for source in sources:
        target = drawn_path(source, out_dir)
        if target.resolve() in inputs:
            raise DataError(
                f"what is drawn on {source.name} would replace the file {target}, which is one of the inputs",
                remedy="choose another folder with --out",
            )


def drawn_path(source: MediaFile, out_dir: Path) -> Path:
    """The file for what is drawn on `source`."""
    return out_dir / f"{source.output}{'.mp4' if source.is_video else '.png'}"


def draw_all(model: DrawingModel, sources: Sequence[MediaFile], out_dir: Path, threshold: float) -> None:
    """Draw what `model` detects in `sources` and write all detections; raise at the end if files could not be used."""
    out_dir.mkdir(parents=True, exist_ok=True)
    with DrawnResults(model, out_dir, threshold) as prediction:
        prediction.run(sources)
    out.print(f"all detections are in {out_dir / RESULTS}", markup=False)
    if prediction.failed:
        raise DataError(
            f"{len(prediction.failed)} of {len(sources)} files could not be used, see above; the others are done",
            remedy="replace them, or leave them out",
        )


class DrawingModel(Protocol):
    """A model on this machine or elsewhere; what `read` and `frame` return is its own affair."""

    @property
    def group(self) -> int:
        """How many images to detect together."""

    @property
    def max_mpx(self) -> float:
        """Million pixels of the largest frame of a video."""

    def read(self, path: Path) -> Any:
        """The image file at `path`."""

    def frame(self, picture: Picture) -> Any:
        """An RGB frame of a video."""

    def start(self, images: Sequence[Any]) -> Sequence[Future[Any]]:
        """Detect the objects in `images`; a result raises what is wrong with its image."""

    def draw(self, image: Any, found: Any) -> Picture:
        """`image` with the detections `found` drawn on it, in RGB."""


@dataclass
class LocalModel:
    """A detector of this machine."""

    detector: Detector

    @property
    def group(self) -> int:
        return IMAGES_AT_A_TIME if self.detector.device.type == "cuda" else 1

    @property
    def max_mpx(self) -> float:
        return self.detector.run.data.max_image_mpx

    def read(self, path: Path) -> Picture:
        return self.detector.pixels(path)

    def frame(self, picture: Picture) -> Picture:
        return picture

    def start(self, images: Sequence[Picture]) -> Sequence[Future[ImageDetections]]:
        found: list[Future[ImageDetections]] = [Future() for _ in images]
        for one, detections in zip(found, self.detector.detect(list(images)), strict=True):
            one.set_result(detections)
        return found

    def draw(self, image: Picture, found: ImageDetections) -> Picture:
        return self.detector.draw(image, found)


@dataclass
class DrawnResults:
    """Detects, draws and writes; detections.json is complete when the `with` block has ended."""

    model: DrawingModel
    out_dir: Path
    threshold: float
    failed: list[str] = field(default_factory=list)
    _open: ExitStack = field(default_factory=ExitStack)
    _num_images: int = 0
    _separator: str = "["

    def __enter__(self) -> DrawnResults:
        from maskfleet.system.files import replacing

        self._downloads = Path(self._open.enter_context(tempfile.TemporaryDirectory()))
        self._json: BinaryIO = self._open.enter_context(replacing(self.out_dir / RESULTS))
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            self._json.write(b"[]\n" if self._separator == "[" else b"\n]\n")
        self._open.__exit__(*error)

    def run(self, sources: Sequence[MediaFile]) -> None:
        """Do all of `sources`, as many images at a time as the model does together."""
        from rich.progress import Progress

        group = self.model.group
        pictures = [source for source in sources if not source.is_video]
        with Progress(console=err, transient=True) as progress:
            task = progress.add_task("detecting", total=len(sources))
            for start in range(0, len(pictures), group):
                self._draw_images(pictures[start : start + group])
                progress.advance(task, len(pictures[start : start + group]))
            for source in sources:
                if source.is_video:
                    with self._reported(source):
                        self._draw_video(source)
                    progress.advance(task)

    @contextmanager
    def _reported(self, source: MediaFile) -> Iterator[None]:
        """An error of one source does not end the others; that of a place where all are sent does."""
        try:
            yield
        except LaunchError:
            raise
        except MaskfleetError as error:
            self.failed.append(source.name)
            print_error(error)

    def _draw_images(self, sources: Sequence[MediaFile]) -> None:
        from maskfleet.inference.detector import save_picture

        read: list[tuple[MediaFile, Any]] = []
        for source in sources:
            with self._reported(source):
                read.append((source, self.model.read(source.fetched(self._downloads))))
        started = self.model.start([picture for _, picture in read])
        for (source, picture), result in zip(read, started, strict=True):
            with self._reported(source):
                detections = result.result()
                target = self._target(source)
                shown = detections[detections.scores > self.threshold]
                save_picture(target, self.model.draw(picture, shown))
                self._write(detections, {"file_name": source.name})
                counts = f"{len(shown)} above {self.threshold:g}, {len(detections)} in all"
                out.print(f"{source.name} → {target}: {counts}", markup=False)

    def _draw_video(self, source: MediaFile) -> None:
        from maskfleet.inference.sources import VideoOutput, frames

        target, path = self._target(source), source.fetched(self._downloads)
        with VideoOutput(target) as video:
            for number, (frame, fps) in enumerate(frames(path, max_mpx=self.model.max_mpx)):
                picture = self.model.frame(frame)
                detections = self.model.start([picture])[0].result()
                video.add(self.model.draw(picture, detections[detections.scores > self.threshold]), fps)
                self._write(detections, {"file_name": source.name, "frame": number})
        out.print(f"{source.name} → {target}: {number + 1} frames", markup=False)

    def _target(self, source: MediaFile) -> Path:
        target = drawn_path(source, self.out_dir)
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def _write(self, detections: Any, about: dict[str, Any]) -> None:
        self._num_images += 1
        for name, result in zip(detections.class_names, detections.to_coco(self._num_images), strict=True):
            line = json.dumps({**about, "category": name, **result})
            self._json.write(f"{self._separator}\n{line}".encode())
            self._separator = ","
