"""Worker processes that decode, augment and collate, and the loaders for training and evaluation built on them.

A worker gets a plan (which images, which canvas) and needs nothing else: it memory-maps the annotation store and draws
every random number from (run seed, pass, image), so the same plan gives the same bits in any process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any, Generic, Literal, TypeVar

import cv2
import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from maskfleet.batch import Batch, Images
from maskfleet.data.pipeline import collate
from maskfleet.data.pipeline.buckets import Buckets, Canvas
from maskfleet.data.pipeline.collate import EvalBatch
from maskfleet.data.pipeline.device_resize import BatchGeometry, resize_on_device
from maskfleet.data.pipeline.preload import loader_context
from maskfleet.data.pipeline.sampler import PlannedBatch, RankStream, image_seed
from maskfleet.data.pipeline.samples import Preparation, Sample, evaluation_sample, train_sample
from maskfleet.data.store.dataset import ImageSet
from maskfleet.errors import DataError, DataSourceError
from maskfleet.system.workers.fork_server import main_hidden, protect_worker

log = logging.getLogger("maskfleet.data")

AnyBatch = TypeVar("AnyBatch", Batch, EvalBatch)
ResizeOn = Literal["worker", "device"]
Plan = Callable[[int], PlannedBatch]

PREFETCH_BATCHES = 2  # per worker
MAX_INLINE_BYTES = 1 << 14  # of a tensor that is sent inside the message
MAX_SUBSTITUTES = 16  # tried for one unreadable image; if all fail, the whole folder is missing rather than a file

# How torch reports a lost worker: by these messages, or by failing to open the shared memory the worker sent.
LOST_WORKER_SIGNS = ("DataLoader worker", "Pin memory thread")
LOST_WORKER_ERRORS = (EOFError, ConnectionError, FileNotFoundError)


@dataclass(frozen=True, slots=True)
class Delivery(Generic[AnyBatch]):
    """What a worker sends: a batch, its geometry if the GPU does the resize, and warnings for the log."""

    batch: AnyBatch | None  # None if no image of an evaluation batch could be read
    geometry: BatchGeometry | None
    warnings: tuple[str, ...]

    def pin_memory(self) -> Delivery[AnyBatch]:
        batch = self.batch.pin_memory() if self.batch is not None else None
        return Delivery(batch, self.geometry.pin_memory() if self.geometry is not None else None, self.warnings)


@dataclass(frozen=True, slots=True)
class Failure:
    """A DataError sent by a worker; pickled as an exception it would lose its remedy."""

    what: str
    remedy: str


@dataclass(eq=False)
class TrainBatches(Dataset[Any]):
    """Makes the training batch of a plan, in a worker."""

    images: ImageSet
    buckets: Buckets
    preparation: Preparation
    seed: int
    resize_on: ResizeOn = "worker"
    skip_bad: bool = False

    def __getitem__(self, planned: PlannedBatch) -> Delivery[Batch] | Failure:
        warnings: list[str] = []
        self.images.read_ahead((*planned.images, *planned.ahead))
        try:
            samples = [
                self._sample(planned, image, copy, warnings)
                for image, copy in zip(planned.images, planned.copies, strict=True)
            ]
        except DataError as error:
            return Failure(error.what, error.remedy)
        images, geometry = _collated_images(samples, planned, self.buckets, self.resize_on)
        preparation = self.preparation
        batch = collate.training_batch(samples, images, masks=preparation.masks, crowds=preparation.crowds)
        return Delivery(batch, geometry, tuple(warnings))

    def _sample(self, planned: PlannedBatch, image: int, copy: int, warnings: list[str]) -> Sample:
        """The sample of `image`; with `skip_bad`, of another image of the same bucket if this one cannot be read."""
        for attempt in range(MAX_SUBSTITUTES):
            set_index, index = self.images.place(image)
            store = self.images.stores[set_index]
            seed = image_seed(self.seed, planned.pass_index, set_index, int(store.image_ids[index]), copy)
            try:
                canvas = self.buckets.canvases[planned.bucket]
                return train_sample(store, index, preparation=self.preparation, canvas=canvas, seed=seed)
            except DataError as error:
                if not self.skip_bad or attempt == MAX_SUBSTITUTES - 1 or isinstance(error, DataSourceError):
                    raise
                warnings.append(f"{error.what}; using another image instead")
                image = self.images.substitute(image, seed)
        raise AssertionError("unreachable")


@dataclass(eq=False)
class EvaluationBatches(Dataset[Any]):
    """Makes the evaluation batch of a plan, in a worker."""

    images: ImageSet
    buckets: Buckets
    resize_on: ResizeOn = "worker"
    skip_bad: bool = False

    def __getitem__(self, planned: PlannedBatch) -> Delivery[EvalBatch] | Failure:
        samples: list[Sample] = []
        warnings: list[str] = []
        self.images.read_ahead((*planned.images, *planned.ahead))
        for image in planned.images:
            set_index, index = self.images.place(image)
            store, size = self.images.stores[set_index], (self.buckets.short_edge_px, self.buckets.max_px)
            try:
                samples.append(evaluation_sample(store, index, short_edge_px=size[0], max_px=size[1]))
            except DataError as error:
                if not self.skip_bad or isinstance(error, DataSourceError):
                    return Failure(error.what, error.remedy)
                warnings.append(f"{error.what}; evaluation continues without it")
        if not samples:
            return Delivery(None, None, tuple(warnings))
        images, geometry = _collated_images(samples, planned, self.buckets, self.resize_on)
        return Delivery(collate.evaluation_batch(samples, images), geometry, tuple(warnings))


class WorkerPool(Generic[AnyBatch]):
    """Worker processes that stay alive between uses; with 0 workers this process does the work."""

    def __init__(self, dataset: TrainBatches | EvaluationBatches, *, num_workers: int, device: torch.device) -> None:
        self.dataset = dataset
        self.num_workers = num_workers
        self.device = device
        self._plans = _Plans()
        self._pool: DataLoader[Any] | None = None
        self._ahead: Iterator[Any] | None = None  # what `start` asked the workers for

    def start(self, plan: Plan, numbers: range) -> None:
        """Let the workers begin with what the next call of `batches` will ask for; without workers, do nothing."""
        if self.num_workers and numbers:
            self._ahead = self._deliveries(plan, numbers)

    def batches(self, plan: Plan, numbers: range) -> Iterator[AnyBatch]:
        """The batches of `plan(number)`, in order; a second call ends an unfinished first one."""
        if not numbers:
            return
        deliveries, self._ahead = self._ahead, None
        if deliveries is None or (self._plans.plan, self._plans.numbers) != (plan, numbers):
            deliveries = self._deliveries(plan, numbers)
        for _ in numbers:
            delivery = self._next(deliveries)
            for warning in delivery.warnings:
                log.warning(warning)
            if delivery.batch is not None:
                yield self._on_device(delivery)

    def close(self) -> None:
        """Stop the workers; the next use starts new ones."""
        # Explicit: when the garbage collector does it, torch waits five seconds for workers that got no stop request.
        iterator = getattr(self._pool, "_iterator", None)
        if isinstance(iterator, _MultiProcessingDataLoaderIter):
            iterator._shutdown_workers()
            for worker in iterator._workers:
                if worker.is_alive():
                    worker.kill()  # it did not exit when asked to, and ignores the SIGTERM that torch sends then
        self._pool = self._ahead = None

    def _deliveries(self, plan: Plan, numbers: range) -> Iterator[Any]:
        """What the workers send for these batches, on which they begin at once."""
        if self._pool is None:
            self._pool = self._new_pool()
        self._plans.plan, self._plans.numbers = plan, numbers
        self._plans.stride = max(self.num_workers, 1) if self.dataset.images.reads_ahead else 0
        with main_hidden():
            return iter(self._pool)  # starts the workers at its first call

    def _new_pool(self) -> DataLoader[Any]:
        context = None
        if self.num_workers:
            # Not forked from this process: its CUDA context and threads would not survive a fork. Workers of a fork
            # server that has imported torch start at once and share its memory pages.
            context = loader_context()
        return DataLoader(
            self.dataset,
            sampler=self._plans,
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=self.num_workers,
            worker_init_fn=_init_worker if self.num_workers else None,
            prefetch_factor=PREFETCH_BATCHES if self.num_workers else None,
            persistent_workers=self.num_workers > 0,
            multiprocessing_context=context,
            pin_memory=self.device.type == "cuda",
            # Its own, so that starting workers draws no number that initial weights would have got.
            generator=torch.Generator(),
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
                remedy="usually memory ran out (see dmesg): set data.num_workers lower, or give the job more memory "
                "and, in a container, more /dev/shm",
            ) from error
        if isinstance(delivery, Failure):
            raise DataError(delivery.what, remedy=delivery.remedy)
        assert isinstance(delivery, Delivery)
        return delivery

    def _on_device(self, delivery: Delivery[AnyBatch]) -> AnyBatch:
        """The batch; if the workers did not resize its images, on the device and resized there."""
        batch = delivery.batch
        assert batch is not None
        if delivery.geometry is None:
            return batch
        batch = batch.to(self.device)
        pixels = resize_on_device(batch.images.pixels, batch.images.sizes, delivery.geometry.to(self.device))
        return replace(batch, images=Images(pixels, batch.images.sizes))


@dataclass(frozen=True, slots=True, eq=False)
class TrainLoader:
    """The endless stream of training batches of one rank, by step."""

    pool: WorkerPool[Batch]
    stream: RankStream
    buckets: Buckets

    @property
    def num_images(self) -> int:
        """Images of the training set, without those left out."""
        return self.stream.order.num_images

    @property
    def canvases(self) -> tuple[tuple[int, int], ...]:
        """The canvases, (height, width), that images of the set have; empty if each batch has one of its own size."""
        used = [self.buckets.canvases[bucket] for bucket in self.stream.order.used_buckets]
        return tuple(canvas for canvas in used if canvas is not None)

    @property
    def images_per_step(self) -> int:
        """Images of one step on all ranks."""
        return self.stream.order.images_per_batch * self.stream.world_size

    @property
    def steps_per_pass(self) -> int:
        """Steps after which every image has been seen once more."""
        return self.stream.steps_per_pass

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """This rank's batches of steps `start` to `stop` - 1; they do not depend on earlier calls."""
        return self.pool.batches(self.stream.planned, range(start, stop))

    def start(self, start: int, stop: int) -> None:
        """Let the workers begin with `batches(start, stop)`, so that the first ones are there when they are needed."""
        self.pool.start(self.stream.planned, range(start, stop))

    def state(self, step: int) -> dict[str, int]:
        """What a checkpoint before `step` keeps, for `build_train_loader(resume=...)`."""
        return self.stream.cursor(step).as_dict()

    def close(self) -> None:
        """Stop the workers."""
        self.pool.close()


@dataclass(frozen=True, slots=True)
class ExpectedImages:
    """How many images of one canvas are to come, and how many of them the largest batch has."""

    count: int
    batch_size: int


@dataclass(frozen=True, slots=True, eq=False)
class EvalLoader:
    """One rank's share of an evaluation set; can be iterated again."""

    pool: WorkerPool[EvalBatch]
    planned: Sequence[PlannedBatch]
    buckets: Buckets

    def __len__(self) -> int:
        return len(self.planned)

    def __iter__(self) -> Iterator[EvalBatch]:
        return self.pool.batches(self.planned.__getitem__, range(len(self.planned)))

    @property
    def num_images(self) -> int:
        """Images of this rank."""
        return sum(len(planned.images) for planned in self.planned)

    def expected_images(self) -> dict[Canvas, ExpectedImages]:
        """What this rank will load on each canvas; nothing where each batch has a canvas of its own."""
        sizes: dict[Canvas, list[int]] = {}
        for planned in self.planned:
            canvas = self.buckets.canvases[planned.bucket]
            if canvas is not None:
                sizes.setdefault(canvas, []).append(len(planned.images))
        return {canvas: ExpectedImages(sum(counts), max(counts)) for canvas, counts in sizes.items()}

    def close(self) -> None:
        """Stop the workers."""
        self.pool.close()


class _Plans(Sampler[PlannedBatch]):
    """The plans of the requested batch numbers; stays in the training process."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.numbers = range(0)
        self.stride = 0  # after so many batches it is the same worker's turn; 0 to read nothing ahead

    def __iter__(self) -> Iterator[PlannedBatch]:
        assert self.plan is not None
        for number in self.numbers:
            planned, after = self.plan(number), number + self.stride
            has_next = self.stride > 0 and after in self.numbers
            yield replace(planned, ahead=self.plan(after).images) if has_next else planned

    def __len__(self) -> int:
        return len(self.numbers)


def _collated_images(
    samples: Sequence[Sample], planned: PlannedBatch, buckets: Buckets, resize_on: ResizeOn
) -> tuple[Images, BatchGeometry | None]:
    canvas = buckets.canvas(planned.bucket, [sample.geometry.size for sample in samples])
    if resize_on == "device":
        return collate.images_as_decoded(samples, canvas)
    return collate.images_on_canvas(samples, canvas), None


def _init_worker(number: int) -> None:
    """One thread per worker; stop requests are left to the training process, which stops the workers itself."""
    protect_worker()
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    ForkingPickler.register(Tensor, _reduced_tensor)


def _reduced_tensor(tensor: Tensor) -> Any:
    """How a worker sends a tensor: small ones inside the message, others in shared memory.

    Each tensor in shared memory costs the receiver a connection to the worker and a system call for its pages. A batch
    has ten to twenty tensors, of which only the pixels are large.
    """
    if tensor.nbytes <= MAX_INLINE_BYTES:
        return torch.from_numpy, (tensor.numpy(),)
    return reduce_tensor(tensor)  # type: ignore[no-untyped-call]


def _unchanged(delivery: Any) -> Any:
    return delivery
