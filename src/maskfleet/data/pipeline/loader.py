"""Batches on time: worker processes that decode, place and pad, and the two loaders that hand their work out.

A worker is given a plan (which images, which canvas) and needs nothing else: it maps the annotation store and draws
every random number from (run seed, pass, image), so that the same plan gives the same bits in any process.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

import cv2
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from maskfleet.batch import Batch, Images
from maskfleet.data.pipeline import collate
from maskfleet.data.pipeline.buckets import Buckets
from maskfleet.data.pipeline.collate import EvalBatch
from maskfleet.data.pipeline.device_resize import Moves, resize_on_device
from maskfleet.data.pipeline.sampler import PlannedBatch, RankStream, image_seed
from maskfleet.data.pipeline.samples import Preparation, Sample, evaluation_sample, train_sample
from maskfleet.data.store.dataset import ImageSet
from maskfleet.errors import DataError

log = logging.getLogger("maskfleet.data")

AnyBatch = TypeVar("AnyBatch", Batch, EvalBatch)
ResizeOn = Literal["worker", "device"]

PREFETCH_BATCHES = 2  # that each worker prepares ahead
MAX_SUBSTITUTES = 16  # tried for one unreadable image; if so many fail, the folder is gone rather than a file

# How torch says that a worker is gone: in words, or by failing to fetch the shared memory that it had announced.
LOST_WORKER_SIGNS = ("DataLoader worker", "Pin memory thread")
LOST_WORKER_ERRORS = (EOFError, ConnectionError, FileNotFoundError)


@dataclass(frozen=True, slots=True)
class Delivery(Generic[AnyBatch]):
    """What a worker sends: a batch, its resize if the device is to do that, and warnings for the log."""

    batch: AnyBatch | None  # None where an evaluation batch lost all its images
    moves: Moves | None
    warnings: tuple[str, ...]

    def pin_memory(self) -> Delivery[AnyBatch]:
        batch = self.batch.pin_memory() if self.batch is not None else None
        return Delivery(batch, self.moves.pin_memory() if self.moves is not None else None, self.warnings)


@dataclass(frozen=True, slots=True)
class Failure:
    """A DataError on its way from a worker; as an exception it would arrive without its remedy."""

    what: str
    remedy: str


class TrainBatches(Dataset[Any]):
    """Makes the training batch of a plan; lives in the workers."""

    def __init__(
        self,
        images: ImageSet,
        buckets: Buckets,
        preparation: Preparation,
        *,
        seed: int,
        resize_on: ResizeOn = "worker",
        skip_bad: bool = False,
    ) -> None:
        self.images = images
        self.buckets = buckets
        self.preparation = preparation
        self.seed = seed
        self.resize_on = resize_on
        self.skip_bad = skip_bad

    def __getitem__(self, planned: PlannedBatch) -> Delivery[Batch] | Failure:
        warnings: list[str] = []
        try:
            samples = [
                self._sample(planned, image, copy, warnings)
                for image, copy in zip(planned.images, planned.copies, strict=True)
            ]
        except DataError as error:
            return Failure(error.what, error.remedy)
        images, moves = _placed(samples, planned, self.buckets, self.resize_on)
        wanted = self.preparation
        batch = collate.training_batch(samples, images, masks=wanted.masks, crowds=wanted.crowds)
        return Delivery(batch, moves, tuple(warnings))

    def _sample(self, planned: PlannedBatch, image: int, copy: int, warnings: list[str]) -> Sample:
        """The sample of `image`; with `skip_bad`, of another image of the bucket if that one cannot be read."""
        for attempt in range(MAX_SUBSTITUTES):
            set_index, index = self.images.place(image)
            store = self.images.stores[set_index]
            seed = image_seed(self.seed, planned.pass_index, set_index, int(store.image_ids[index]), copy)
            try:
                return train_sample(
                    store,
                    index,
                    preparation=self.preparation,
                    canvas=self.buckets.canvases[planned.bucket],
                    seed=seed,
                )
            except DataError as error:
                if not self.skip_bad or attempt == MAX_SUBSTITUTES - 1:
                    raise
                warnings.append(f"{error.what}; another image takes its place")
                image = self.images.substitute(image, seed)
        raise AssertionError("unreachable")


class EvaluationBatches(Dataset[Any]):
    """Makes the evaluation batch of a plan; lives in the workers."""

    def __init__(
        self, images: ImageSet, buckets: Buckets, *, resize_on: ResizeOn = "worker", skip_bad: bool = False
    ) -> None:
        self.images = images
        self.buckets = buckets
        self.resize_on = resize_on
        self.skip_bad = skip_bad

    def __getitem__(self, planned: PlannedBatch) -> Delivery[EvalBatch] | Failure:
        samples: list[Sample] = []
        warnings: list[str] = []
        for image in planned.images:
            set_index, index = self.images.place(image)
            store, buckets = self.images.stores[set_index], self.buckets
            try:
                sample = evaluation_sample(store, index, short_edge_px=buckets.short_edge_px, max_px=buckets.max_px)
            except DataError as error:
                if not self.skip_bad:
                    return Failure(error.what, error.remedy)
                warnings.append(f"{error.what}; evaluation goes on without it")
                continue
            samples.append(sample)
        if not samples:
            return Delivery(None, None, tuple(warnings))
        images, moves = _placed(samples, planned, self.buckets, self.resize_on)
        return Delivery(collate.evaluation_batch(samples, images), moves, tuple(warnings))


class WorkerPool(Generic[AnyBatch]):
    """Worker processes that stay alive between uses; 0 of them means that this process does the work."""

    def __init__(self, dataset: Dataset[Any], *, num_workers: int, device: torch.device) -> None:
        self.dataset = dataset
        self.num_workers = num_workers
        self.device = device
        self._plans = _Plans()
        self._pool: DataLoader[Any] | None = None

    def batches(self, plan: Callable[[int], PlannedBatch], numbers: range) -> Iterator[AnyBatch]:
        """The batches of `plan(number)`, in order; a second call ends an unfinished first one."""
        if not numbers:
            return
        if self._pool is None:
            self._pool = self._started()
        self._plans.plan, self._plans.numbers = plan, numbers
        with _main_hidden():
            deliveries = iter(self._pool)  # starts the workers at its first call
        for _ in numbers:
            delivery = self._next(deliveries)
            for warning in delivery.warnings:
                log.warning(warning)
            if delivery.batch is not None:
                yield self._on_device(delivery)

    def close(self) -> None:
        """End the workers; the next use starts new ones."""
        # Asked outright: left to the garbage collector, torch waits five seconds for workers that nobody told to end.
        shutdown = getattr(getattr(self._pool, "_iterator", None), "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()
        self._pool = None

    def _started(self) -> DataLoader[Any]:
        context = None
        if self.num_workers:
            # Not forked from this process: its CUDA context and threads would not survive that. A fork server that
            # has imported torch once gives workers that share those pages and start at once.
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["maskfleet.data.pipeline.loader"])
        return DataLoader(
            self.dataset,
            sampler=self._plans,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=self.num_workers,
            worker_init_fn=_settle_worker if self.num_workers else None,
            prefetch_factor=PREFETCH_BATCHES if self.num_workers else None,
            persistent_workers=self.num_workers > 0,
            multiprocessing_context=context,
            pin_memory=self.device.type == "cuda",
        )

    def _next(self, deliveries: Iterator[Any]) -> Delivery[AnyBatch]:
        try:
            delivery = next(deliveries)
        except (RuntimeError, *LOST_WORKER_ERRORS) as error:
            if isinstance(error, RuntimeError) and not any(sign in str(error) for sign in LOST_WORKER_SIGNS):
                raise
            self.close()
            raise DataError(
                f"a loader process died: {error or type(error).__name__}",
                remedy="most often memory ran out (see dmesg): set data.num_workers lower, or give the job more memory "
                "and, in a container, more /dev/shm",
            ) from error
        if isinstance(delivery, Failure):
            raise DataError(delivery.what, remedy=delivery.remedy)
        assert isinstance(delivery, Delivery)
        return delivery

    def _on_device(self, delivery: Delivery[AnyBatch]) -> AnyBatch:
        """The batch; if its images are still to be resized, on the device with them resized."""
        batch = delivery.batch
        assert batch is not None
        if delivery.moves is None:
            return batch
        batch = batch.to(self.device)
        pixels = resize_on_device(batch.images.pixels, batch.images.sizes, delivery.moves.to(self.device))
        return replace(batch, images=Images(pixels, batch.images.sizes))


class TrainLoader:
    """The endless training batches of one rank, by step."""

    def __init__(self, pool: WorkerPool[Batch], stream: RankStream, buckets: Buckets) -> None:
        self.pool = pool
        self.stream = stream
        self.buckets = buckets

    @property
    def num_images(self) -> int:
        """Images of the training set that are used."""
        return self.stream.order.num_images

    @property
    def images_per_step(self) -> int:
        """Images of one step on all ranks."""
        return self.stream.order.images_per_batch * self.stream.world_size

    @property
    def steps_per_pass(self) -> int:
        """Steps after which every image has been seen once more."""
        return self.stream.steps_per_pass

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """This rank's batches of steps `start` to `stop` - 1; the same whatever was asked for before."""
        return self.pool.batches(self.stream.planned, range(start, stop))

    def state(self, step: int) -> dict[str, int]:
        """What a checkpoint before `step` keeps, for `build_train_loader(resume=...)`."""
        return self.stream.cursor(step).as_dict()

    def close(self) -> None:
        """End the workers."""
        self.pool.close()


class EvalLoader:
    """One rank's share of an evaluation set; can be gone through again and again."""

    def __init__(self, pool: WorkerPool[EvalBatch], planned: Sequence[PlannedBatch], buckets: Buckets) -> None:
        self.pool = pool
        self.planned = planned
        self.buckets = buckets

    def __len__(self) -> int:
        return len(self.planned)

    def __iter__(self) -> Iterator[EvalBatch]:
        return self.pool.batches(self.planned.__getitem__, range(len(self.planned)))

    @property
    def num_images(self) -> int:
        """Images of this rank."""
        return sum(len(planned.images) for planned in self.planned)

    def close(self) -> None:
        """End the workers."""
        self.pool.close()


@contextlib.contextmanager
def _main_hidden() -> Iterator[None]:
    """Start processes that do not run the user's script again, as multiprocessing would to recreate `__main__`.

    Scripts that call `maskfleet.train` then need no `if __name__ == "__main__"`; workers need nothing of theirs.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class _Plans(Sampler[PlannedBatch]):
    """The plans of the numbers asked for; stays in the training process."""

    def __init__(self) -> None:
        self.plan: Callable[[int], PlannedBatch] | None = None
        self.numbers = range(0)

    def __iter__(self) -> Iterator[PlannedBatch]:
        assert self.plan is not None
        return map(self.plan, self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)


def _placed(
    samples: Sequence[Sample], planned: PlannedBatch, buckets: Buckets, resize_on: ResizeOn
) -> tuple[Images, Moves | None]:
    canvas = buckets.canvas(planned.bucket, [sample.geometry.size for sample in samples])
    if resize_on == "device":
        return collate.images_as_decoded(samples, canvas)
    return collate.images_on_canvas(samples, canvas), None


def _settle_worker(number: int) -> None:
    """One thread a worker, and Ctrl-C left to the training process, which ends the workers itself."""
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _as_it_is(delivery: Any) -> Any:
    return delivery
