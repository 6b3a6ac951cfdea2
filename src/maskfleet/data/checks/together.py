"""The checks of all splits of a run, as training and `maskfleet data inspect` make them.

Beside the problems of each split these are classes that differ, and images that occur more than once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain

from maskfleet.data.checks.annotations import check_split
from maskfleet.data.checks.problems import Problem, problem_of
from maskfleet.data.checks.similar import similar_images
from maskfleet.data.store.annotations import AnnotationStore

MAX_LISTED = 5  # differences in a message

Progress = Callable[[str, int, int], None]  # split, images done, images in total


def check_data(
    stores: Sequence[AnnotationStore],
    *,
    decode: bool = False,
    workers: Callable[[AnnotationStore], int] = lambda _: 0,
    progress: Progress | None = None,
    listed: bool = False,
) -> list[list[Problem]]:
    """All problems of the splits of a run, by store; never raises.

    With `decode`, every image is decoded, and images that look the same are found. `workers` gives the number of files
    of a split to read in parallel. With `listed`, images in S3 are not read.
    """
    problems: list[list[Problem]] = []
    thumbnails: list[list[bytes | None]] = []
    for store in stores:
        thumbnails.append([])
        report_progress = partial(progress, store.split.name) if progress is not None else None
        of_store = check_split(
            store,
            decode=decode,
            workers=workers(store),
            progress=report_progress,
            listed=listed,
            thumbnails=thumbnails[-1],
        )
        problems.append([*category_problems(store, stores[0]), *of_store])
    repeated = repeated_files(stores)
    similar = repeated_pictures(stores, thumbnails, repeated)
    return [list(chain(*of_store)) for of_store in zip(problems, repeated, similar, strict=True)]


def category_problems(store: AnnotationStore, first: AnnotationStore) -> Iterator[Problem]:
    """One problem if the classes of `store` are not those of `first`.

    Labels are given by the order of ids: other ids, or other names under the same ids, give a wrong AP.
    """
    ours, theirs = ({category.id: category.name for category in one.categories} for one in (first, store))
    if ours == theirs:
        return
    differences = []
    for identity in sorted(ours.keys() | theirs.keys()):
        here, there = (repr(names[identity]) if identity in names else "missing" for names in (theirs, ours))
        if here != there:
            differences.append(f"category {identity} is {here} here and {there} there")
    more = f"; and {len(differences) - MAX_LISTED} more" if len(differences) > MAX_LISTED else ""
    what = f"{store.split.annotations} and {first.split.annotations} have different classes: "
    yield problem_of("category-mismatch", what + "; ".join(differences[:MAX_LISTED]) + more, store.split.annotations)


def repeated_files(stores: Sequence[AnnotationStore]) -> list[list[Problem]]:
    """Image files that are listed under more than one id, by store; a split that is given twice is compared once."""
    seen: dict[str, tuple[int, int]] = {}  # path: (number of the store, image id)
    problems: list[list[Problem]] = []
    for number, store in enumerate(stores):
        problems.append([])
        if is_repeated(store, stores[:number]):
            continue
        for record in map(store.image, range(len(store))):
            other, image_id = seen.setdefault(str(record.path), (number, record.id))
            if (other, image_id) != (number, record.id):
                what = f"{record.path.name} is also image {image_id} of {stores[other].split.name}"
                problems[-1].append(problem_of("file-repeated", what, record.path, record.id))
    return problems


def repeated_pictures(
    stores: Sequence[AnnotationStore], thumbnails: Sequence[Sequence[bytes | None]], files: Sequence[Sequence[Problem]]
) -> list[list[Problem]]:
    """Images that look like an earlier one, by store, except those whose file is the same: `files` names them."""
    named = [{problem.image_id for problem in of_store} for of_store in files]
    places: list[tuple[int, int]] = []  # (number of the store, index of the image)
    looks: list[bytes | None] = []
    for number, of_store in enumerate(thumbnails):
        if not is_repeated(stores[number], stores[:number]):
            places += [(number, index) for index in range(len(of_store))]
            looks += of_store
    problems: list[list[Problem]] = [[] for _ in stores]
    for image, earlier in similar_images(looks).items():
        (number, index), (other, other_index) = places[image], places[earlier]
        record, first = stores[number].image(index), stores[other].image(other_index)
        if record.id not in named[number]:
            what = f"{record.path.name} looks like {first.path.name}, image {first.id} of {stores[other].split.name}"
            problems[number].append(problem_of("image-repeated", what, record.path, record.id))
    return problems


def is_repeated(store: AnnotationStore, earlier: Sequence[AnnotationStore]) -> bool:
    """Whether a split is given a second time, such as a training set that also serves for validation."""
    return any(store.split.images == one.split.images and store.source_sha256 == one.source_sha256 for one in earlier)
