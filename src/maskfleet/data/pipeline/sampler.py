"""Which images make up which batch: a pure function of the seed, so that a run can resume at any step.

Training is one endless stream of batches, pass after pass over the set. Batch k of the stream does not depend on the
number of ranks; with W ranks, rank r takes batches r, r + W, r + 2 W, ... So a run that resumes with another number of
ranks neither loses nor repeats an image. Each pass uses every image once. Only if the images of a bucket do not divide
by the batch size, its last batch is filled with images that repeat: fewer than a batch per bucket and pass. If a pass
does not divide by the number of ranks, its last step also contains the first batches of the next one.

Shapes: N images, M batches per pass, B images per batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from maskfleet.errors import TrainingError

Ints = npt.NDArray[np.int64]

ORDER_DOMAIN, IMAGE_DOMAIN = 1, 2  # separate the random numbers of the order from those of the images


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """What a worker needs to make one batch."""

    pass_index: int
    bucket: int
    images: tuple[int, ...]  # [B] indices into the set
    copies: tuple[int, ...]  # [B] 0; 1, 2, ... for the first, second, ... repeat of an image in this pass
    ahead: tuple[int, ...] = ()  # images of the batch that the same worker makes next, to be read from S3 meanwhile


class TrainOrder:
    """The endless stream of training batches of a set whose images belong to `buckets` [N].

    `group` consecutive batches share a bucket as far as possible, so that none of that many ranks waits for another
    rank's larger canvas.
    """

    def __init__(self, buckets: Ints, *, images_per_batch: int, seed: int, group: int = 1) -> None:
        assert len(buckets), "an order needs images"
        self.images_per_batch = images_per_batch
        self.seed = seed
        self.group = group
        self.num_images = len(buckets)
        self._members = [np.flatnonzero(buckets == bucket) for bucket in range(int(buckets.max()) + 1)]
        counts = [-(-len(members) // images_per_batch) for members in self._members]
        self._bucket_of_batch = np.repeat(np.arange(len(counts)), counts)  # [M], before the shuffle
        self._cached: tuple[int, Ints, Ints, Ints] | None = None

    @property
    def batches_per_pass(self) -> int:
        return len(self._bucket_of_batch)

    @property
    def used_buckets(self) -> tuple[int, ...]:
        """The buckets that have images."""
        return tuple(bucket for bucket, members in enumerate(self._members) if len(members))

    def batch(self, number: int) -> PlannedBatch:
        """Batch `number` of the stream; random access."""
        pass_index, index = divmod(number, self.batches_per_pass)
        images, copies, buckets = self.batches(pass_index)
        return PlannedBatch(
            pass_index, int(buckets[index]), tuple(images[index].tolist()), tuple(copies[index].tolist())
        )

    def batches(self, pass_index: int) -> tuple[Ints, Ints, Ints]:
        """All batches of a pass -> (images [M, B], copies [M, B], bucket [M])."""
        if self._cached is None or self._cached[0] != pass_index:
            rng = np.random.default_rng([ORDER_DOMAIN, self.seed, pass_index])
            filled = [self._filled(members, rng) for members in self._members]
            images = np.concatenate([images for images, _ in filled])
            copies = np.concatenate([copies for _, copies in filled])
            order = self._arranged(pass_index, rng)
            self._cached = (pass_index, images[order], copies[order], self._bucket_of_batch[order])
        return self._cached[1:]

    def _filled(self, members: Ints, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """The members of a bucket shuffled into whole batches -> (images [m, B], copies [m, B])."""
        shuffled = rng.permutation(members)
        slots = np.arange(-(-len(members) // self.images_per_batch) * self.images_per_batch)
        shape = (-1, self.images_per_batch)
        if not len(members):
            return slots.reshape(shape), slots.reshape(shape)
        return shuffled[slots % len(members)].reshape(shape), (slots // len(members)).reshape(shape)

    def _arranged(self, pass_index: int, rng: np.random.Generator) -> Ints:
        """The order [M] of a pass's batches: groups of one bucket, aligned to multiples of `group` in the stream."""
        if self.group == 1:
            return rng.permutation(self.batches_per_pass)
        groups: list[Ints] = []
        singles: list[int] = []
        for bucket in range(len(self._members)):
            batches = rng.permutation(np.flatnonzero(self._bucket_of_batch == bucket))
            grouped = len(batches) // self.group * self.group
            groups.extend(batches[:grouped].reshape(-1, self.group))
            singles.extend(batches[grouped:].tolist())
        before_boundary = -pass_index * self.batches_per_pass % self.group
        groups = [groups[index] for index in rng.permutation(len(groups))]
        if len(singles) < before_boundary and groups:
            singles.extend(groups.pop().tolist())
        ungrouped = rng.permutation(np.array(singles, np.int64))
        return np.concatenate([ungrouped[:before_boundary], *groups, ungrouped[before_boundary:]])


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position of a run in the stream: before step `step`, `batch` batches have been used.

    `images_per_batch`, `group` and `batches_per_pass` say how the stream was made; a checkpoint stores all five.
    """

    step: int
    batch: int
    images_per_batch: int
    group: int
    batches_per_pass: int

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def cursor_from(saved: Mapping[str, Any]) -> Cursor:
    """The cursor that `as_dict` wrote; TrainingError if it is not one."""
    lowest = {"step": 0, "batch": 0, "images_per_batch": 1, "group": 1, "batches_per_pass": 1}
    if saved.keys() != lowest.keys() or not all(
        isinstance(saved[name], int) and saved[name] >= low for name, low in lowest.items()
    ):
        raise TrainingError(
            f"the checkpoint's data position {dict(saved)} is not valid",
            remedy="resume from an older checkpoint, or start a new run from its weights with train.weights",
        )
    return Cursor(**saved)


class RankStream:
    """The batches of one rank, by step."""

    def __init__(self, order: TrainOrder, *, rank: int, world_size: int, start: Cursor | None = None) -> None:
        assert 0 <= rank < world_size
        self.order = order
        self.rank = rank
        self.world_size = world_size
        self.start = self._converted(start) if start is not None else self._cursor(0, 0)

    @property
    def steps_per_pass(self) -> int:
        """Steps after which every image has been seen once more."""
        return -(-self.order.batches_per_pass // self.world_size)

    def planned(self, step: int) -> PlannedBatch:
        """The batch of this rank at `step`."""
        return self.order.batch(self.cursor(step).batch + self.rank)

    def cursor(self, step: int) -> Cursor:
        """Position of the run before `step`, as a checkpoint stores it."""
        if step < self.start.step:
            raise TrainingError(
                f"step {step} is before step {self.start.step}, from which this run was resumed",
                remedy="resume from a checkpoint at or before that step",
            )
        return self._cursor(step, self.start.batch + (step - self.start.step) * self.world_size)

    def _cursor(self, step: int, batch: int) -> Cursor:
        order = self.order
        return Cursor(step, batch, order.images_per_batch, order.group, order.batches_per_pass)

    def _converted(self, saved: Cursor) -> Cursor:
        """`saved` in batches of this stream: the same pass, after the same number of its images."""
        order = self.order
        if (saved.images_per_batch, saved.batches_per_pass) == (order.images_per_batch, order.batches_per_pass):
            return self._cursor(saved.step, saved.batch)
        pass_index, batch = divmod(saved.batch, saved.batches_per_pass)
        batch = min(batch * saved.images_per_batch // order.images_per_batch, order.batches_per_pass)
        return self._cursor(saved.step, pass_index * order.batches_per_pass + batch)


def order_group(areas: set[int], world_size: int, saved: Cursor | None, images_per_batch: int) -> int:
    """How many consecutive batches should share a bucket: one per rank if the canvases differ in area.

    A resumed run keeps its saved value, also with another number of ranks, so that the order of its pass stays.
    """
    if saved is not None and saved.images_per_batch == images_per_batch:
        return saved.group
    return world_size if len(areas) > 1 else 1


def evaluation_batches(
    buckets: Ints, *, images_per_batch: int, rank: int = 0, world_size: int = 1
) -> list[PlannedBatch]:
    """This rank's share of all images: bucket by bucket; the last batch of each may be smaller."""
    planned = []
    for bucket in range(int(buckets.max(initial=-1)) + 1):
        members = np.flatnonzero(buckets == bucket).tolist()
        for start in range(0, len(members), images_per_batch):
            images = tuple(members[start : start + images_per_batch])
            planned.append(PlannedBatch(0, bucket, images, (0,) * len(images)))
    return planned[rank::world_size]


def image_seed(run_seed: int, pass_index: int, set_index: int, image_id: int, copy: int) -> int:
    """The seed, 0 .. 2**63 - 1, of everything random about one use of one image."""
    words = [IMAGE_DOMAIN, run_seed, pass_index, set_index, image_id % 2**64, copy]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> np.uint64(1))
