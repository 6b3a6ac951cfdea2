"""Chooses the images that the inspection page shows: extremes, every class, each kind of problem.

Shapes: I images, N objects of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from maskfleet.data.checks.problems import Problem, bad_images
from maskfleet.data.inspect.statistics import SMALL_AREA, Bools, Ints, ObjectTable
from maskfleet.data.store.annotations import AnnotationStore

CLASS_SHARE = 0.6  # at most this share of the images is chosen for a class
SEED = 0


@dataclass(frozen=True, slots=True)
class SelectedImage:
    """An image to show, and the reason."""

    index: int  # in the store
    image_id: int
    why: str


def choose_samples(
    store: AnnotationStore, table: ObjectTable, problems: Sequence[Problem], *, count: int
) -> list[SelectedImage]:
    """At most `count` images without errors: extremes first, then rare classes, then some at random."""
    free = ~np.isin(
        store.image_ids, np.array(sorted(bad_images(problems)), np.int64)
    )  # [I] without errors and not yet chosen
    chosen: list[SelectedImage] = []

    def take(index: int, why: str) -> None:
        free[index] = False
        chosen.append(SelectedImage(index, int(store.image_ids[index]), why))

    objects = table.select(~table.crowd)
    for find in _EXTREMES:
        found = find(store, table, objects, free) if len(chosen) < count and free.any() else None
        if found is not None:
            take(*found)
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


Found = tuple[int, str] | None
Finder = Callable[[AnnotationStore, ObjectTable, ObjectTable, Bools], Found]


def _most_objects(store: AnnotationStore, _: ObjectTable, objects: ObjectTable, free: Bools) -> Found:
    counts = np.bincount(objects.owner, minlength=len(store))
    return _largest(counts, free, "most objects: {}")


def _most_classes(store: AnnotationStore, _: ObjectTable, objects: ObjectTable, free: Bools) -> Found:
    bins = len(store.categories) + 1
    counts = np.bincount(np.unique(objects.owner * bins + objects.labels) // bins, minlength=len(store))
    return _largest(counts, free, "most classes: {}")


def _most_small(store: AnnotationStore, _: ObjectTable, objects: ObjectTable, free: Bools) -> Found:
    counts = np.bincount(objects.owner[objects.area < SMALL_AREA], minlength=len(store))
    return _largest(counts, free, "most small objects: {}")


def _largest_object(store: AnnotationStore, _: ObjectTable, objects: ObjectTable, free: Bools) -> Found:
    pixels = np.maximum(store.widths * store.heights, 1)
    share = np.zeros(len(store))
    np.maximum.at(share, objects.owner, objects.area / pixels[objects.owner])
    return _largest(np.rint(np.minimum(share, 1) * 100).astype(np.int64), free, "largest object: {} % of the image")


def _crowd(store: AnnotationStore, table: ObjectTable, _: ObjectTable, free: Bools) -> Found:
    counts = np.bincount(table.owner[table.crowd], minlength=len(store))
    return _largest(counts, free, "crowd regions: {}")


def _empty(store: AnnotationStore, table: ObjectTable, _: ObjectTable, free: Bools) -> Found:
    without = free & (np.bincount(table.owner, minlength=len(store)) == 0)
    return (int(np.flatnonzero(without)[0]), "no objects") if without.any() else None


_EXTREMES: tuple[Finder, ...] = (_most_objects, _most_classes, _most_small, _largest_object, _crowd, _empty)


def _largest(values: Ints, free: Bools, why: str) -> Found:
    """The free image with the largest value, if that is above zero."""
    index = int(np.where(free, values, -1).argmax())
    return (index, why.format(values[index])) if free[index] and values[index] > 0 else None


def _rare_classes(
    store: AnnotationStore, objects: ObjectTable, free: Bools, shown: Sequence[int], count: int
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
        yield index, f"{category.name}: {number} object{'' if number == 1 else 's'} in the split"
