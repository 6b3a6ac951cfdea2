"""Pictures for a report: the images a model does best and worst on, annotated and detected."""

from __future__ import annotations

from collections.abc import Sequence

from maskfleet import viz
from maskfleet.data.pipeline.decode import read_image
from maskfleet.data.store.annotations import AnnotationStore
from maskfleet.errors import DataError
from maskfleet.evaluation.analysis.analyze import SHOWN_SCORE, Analysis
from maskfleet.evaluation.analysis.examples import Example, best_and_worst, counted_images
from maskfleet.evaluation.detections_file import StoredDetections
from maskfleet.evaluation.report.record import Picture
from maskfleet.inference.draw import drawn_detections, drawn_truth
from maskfleet.log import count_text

TILE_PX = 420  # side of an image in a picture


def example_pictures(
    store: AnnotationStore, stored: StoredDetections, analysis: Analysis, *, best: int, worst: int
) -> tuple[list[Picture], list[Picture], list[str]]:
    """The best and the worst images, objects on the left, detections on the right; and why some are missing."""
    examples = counted_images(analysis.main.matches, min_score=SHOWN_SCORE)
    chosen = best_and_worst(examples, best=best, worst=worst)
    problems: list[str] = []
    drawn = [[picture for one in group if (picture := _drawn(store, stored, one, problems))] for group in chosen]
    notes = []
    if problems:
        notes.append(f"{count_text(len(problems), 'picture')} could not be drawn: {problems[0]}")
    return drawn[0], drawn[1], notes


def _drawn(store: AnnotationStore, stored: StoredDetections, example: Example, problems: list[str]) -> Picture | None:
    try:
        index = store.index_of(example.image_id)
        record = store.image(index)
        picture = read_image(record.path, image_id=record.id, max_mpx=record.max_mpx)
        categories = [(category.id, category.name) for category in store.categories]
        found = _shown(stored, example.image_id)
        pair = [drawn_truth(store, index), drawn_detections(picture, found, categories)]
    except DataError as error:
        problems.append(error.what)
        return None
    caption = (
        f"{record.path.name}: annotated, detected. {example.right} right, {example.wrong} wrong, "
        f"{example.missed} missed (F1 {example.f1:.2f})"
    )
    return caption, viz.grid(pair, columns=2, tile=(TILE_PX, TILE_PX))


def _shown(stored: StoredDetections, image_id: int) -> Sequence[dict[str, object]]:
    return [one for one in stored.results if one["image_id"] == image_id and one["score"] >= SHOWN_SCORE]
