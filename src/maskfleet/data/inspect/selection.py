"""Chooses the images that the inspection page shows: extremes, every class, each kind of problem.

Shapes: I images, N objects of the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from maskfleet.data.checks.problems import Problem, bad_images
from maskfleet.data.inspect.statistics import SMALL_AREA
from maskfleet.data.store.annotations import AnnotationStore, Bools, InstanceArrays, Ints
from maskfleet.log import count_text

CLASS_SHARE = 0.6  # at most this share of the images is chosen for a class
SEED = 0


@dataclass(frozen=True, slots=True)
class SelectedImage:
    """An image to show, and the reason."""

    index: int  # in the store
    image_id: int
    why: str


def choose_samples(
    store: AnnotationStore, table: InstanceArrays, problems: Sequence[Problem], *, count: int
) -> list[SelectedImage]:
    """At most `count` images without errors: extremes first, then rare classes, then some at random."""
    free = ~np.isin(store.image_ids, list(bad_images(problems)))  # [I] without errors and not yet chosen
    chosen: list[SelectedImage] = []

    def take(index: int, why: str) -> None:
        free[index] = False
        chosen.append(SelectedImage(index, int(store.image_ids[index]), why))

    objects = table.objects
    for values, why in _extremes(store, table):
        if len(chosen) < count and (values[free] > 0).any():
            index = int(np.where(free, values, -1).argmax())
            take(index, why.format(values[index]))
    num_classes = min(count - len(chosen), round(count * CLASS_SHARE))
    for index, why in _rare_classes(store, objects, free, [sample.index for sample in chosen], num_classes):
        take(index, why)
    left = np.flatnonzero(free)
    rng = np.random.default_rng(SEED)
    for index in np.sort(rng.permutation(left)[: max(count - len(chosen), 0)]).tolist():
        take(index, "random image")
    return chosen


def choose_problem_samples(store: AnnotationStore, problems: Sequence[Problem], *, count: int) -> list[SelectedImage]:
    """At most `count` images with problems: one of each kind, errors first, then a second of each, and so on."""
    kinds: dict[tuple[str, str], list[int]] = {}
    known = set(store.image_ids.tolist())
    for problem in problems:
        if problem.image_id is not None and problem.image_id in known:
            kinds.setdefault((problem.severity, problem.kind), []).append(problem.image_id)
    queues = [list(dict.fromkeys(kinds[key])) for key in sorted(kinds)]
    names = [kind for _, kind in sorted(kinds)]
    chosen: dict[int, SelectedImage] = {}
    while any(queues) and len(chosen) < count:
        for queue, kind in zip(queues, names, strict=True):
            while queue and queue[0] in chosen:
                queue.pop(0)
            if queue and len(chosen) < count:
                image_id = queue.pop(0)
                chosen[image_id] = SelectedImage(store.index_of(image_id), image_id, kind)
    return list(chosen.values())


def _extremes(store: AnnotationStore, table: InstanceArrays) -> Iterator[tuple[Ints, str]]:
    """Values [I] whose largest, if above zero, makes an image worth showing, and the reason."""

    def per_image(owner: Ints) -> Ints:
        return np.bincount(owner, minlength=len(store))

    objects, bins = table.objects, len(store.categories) + 1
    yield per_image(objects.owner), "most objects: {}"
    yield per_image(np.unique(objects.owner * bins + objects.labels) // bins), "most classes: {}"
    yield per_image(objects.owner[objects.area < SMALL_AREA]), "most small objects: {}"
    share = np.zeros(len(store))
    np.maximum.at(share, objects.owner, objects.area / np.maximum(store.widths * store.heights, 1)[objects.owner])
    yield np.rint(np.minimum(share, 1) * 100).astype(np.int64), "largest object: {} % of the image"
    yield per_image(table.owner[table.crowd]), "crowd regions: {}"
    yield (per_image(table.owner) == 0).astype(np.int64), "no objects"


def _rare_classes(
    store: AnnotationStore, objects: InstanceArrays, free: Bools, shown: Sequence[int], count: int
) -> Iterator[tuple[int, str]]:
    """For each class not yet shown, rarest first, the free image with its largest object."""
    bins = len(store.categories) + 1
    numbers = np.bincount(objects.labels, minlength=bins)
    covered = set(objects.labels[np.isin(objects.owner, np.array(shown, np.int64))].tolist())
    for category in sorted(store.categories, key=lambda category: (numbers[category.label], category.label)):
        if count <= 0:
            return
        of_class = np.flatnonzero((objects.labels == category.label) & free[objects.owner])
        if category.label in covered or not len(of_class):
            continue
        index = int(objects.owner[of_class[objects.area[of_class].argmax()]])
        covered |= set(objects.labels[objects.owner == index].tolist())
        count -= 1
        number = int(numbers[category.label])
        yield index, f"{category.name}: {count_text(number, 'object')} in the split"
