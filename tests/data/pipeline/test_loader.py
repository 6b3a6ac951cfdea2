"""Loaders over sets on disk: what they show, in which order, and what they do when something breaks."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from maskfleet.batch import Batch
from maskfleet.config.run import RunConfig
from maskfleet.data.pipeline.build import build_eval_loader, build_train_loader, chosen_workers
from maskfleet.data.pipeline.collate import EvalBatch
from maskfleet.data.pipeline.loader import MAX_INLINE_BYTES, TrainLoader
from maskfleet.data.store.annotations import AnnotationStore
from maskfleet.data.store.dataset import open_stores
from maskfleet.data.synthetic.dataset import make_shapes
from maskfleet.errors import DataError

NUM_TRAIN, NUM_VAL = 22, 9


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small set of landscape, portrait and square pictures."""
    root = tmp_path_factory.mktemp("loader") / "shapes"
    make_shapes(root, num_train=NUM_TRAIN, num_val=NUM_VAL, height=(48, 96), width=(48, 96), crowd_fraction=0.3)
    return root


def run_config(root: Path, *, train: dict[str, Any] | None = None, **data: Any) -> RunConfig:
    sizes = {"train_short_edge_px": (64, 80), "test_short_edge_px": 80, "num_workers": 0}
    return RunConfig.model_validate(
        {
            "model": {"max_size_px": 128, "rpn": {"crowd_overlap": 0.7}},
            "data": {"root": str(root), "train": ["train"], "val": ["val"]} | sizes | data,
            "train": {"images_per_gpu": 2, "seed": 11} | (train or {}),
            "eval": {"images_per_gpu": 2},
        }
    )


def train_stores(config: RunConfig) -> list[AnnotationStore]:
    return open_stores(config.data, config.data.train)


def train_loader(config: RunConfig, **arguments: Any) -> TrainLoader:
    return build_train_loader(config, train_stores(config), **arguments)


def tensors(record: Any) -> Iterator[Tensor]:
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Tensor):
            yield value
        elif dataclasses.is_dataclass(value):
            yield from tensors(value)


def assert_same_bits(first: Batch | EvalBatch, second: Batch | EvalBatch) -> None:
    pairs = list(zip(tensors(first), tensors(second), strict=True))
    assert len(pairs) > 3
    for one, other in pairs:
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert torch.equal(one, other)


def ids_of(batches: list[Batch]) -> list[int]:
    return [image_id for batch in batches for image_id in batch.image_ids.tolist()]


def test_two_ranks_with_two_workers_see_each_image_once_per_epoch(shapes: Path) -> None:
    config = run_config(shapes, num_workers=2, train={"images_per_gpu": 1})
    loaders = [train_loader(config, rank=rank, world_size=2) for rank in range(2)]
    assert loaders[0].steps_per_pass == NUM_TRAIN // 2
    for epoch in range(2):
        start = epoch * NUM_TRAIN // 2
        shares = [list(loader.batches(start, start + NUM_TRAIN // 2)) for loader in loaders]
        seen = ids_of(shares[0]) + ids_of(shares[1])
        assert len(shares[0]) == len(shares[1]) == NUM_TRAIN // 2
        assert sorted(seen) == sorted(train_stores(config)[0].image_ids.tolist())
    for loader in loaders:
        loader.close()


def test_stopped_after_any_batch_the_next_one_is_the_same_to_the_bit(shapes: Path) -> None:
    config = run_config(shapes, color_jitter=0.3, buckets="tight")
    steps = train_loader(config).steps_per_pass * 2 + 3
    whole = list(train_loader(config).batches(0, steps))
    assert len(whole) == steps
    with_workers = run_config(shapes, color_jitter=0.3, buckets="tight", num_workers=2)
    resumed = train_loader(with_workers)
    for cut in (0, 1, 5, steps // 2 - 1, steps // 2, steps // 2 + 1, steps - 1):
        for step, batch in zip(range(cut, min(cut + 3, steps)), resumed.batches(cut, steps), strict=False):
            assert_same_bits(batch, whole[step])  # left in the middle each time: workers have more on the way
    resumed.close()


def test_workers_started_ahead_make_the_batches_that_are_asked_for(shapes: Path) -> None:
    alone = list(train_loader(run_config(shapes)).batches(2, 5))
    before = torch.get_rng_state()
    with closing(train_loader(run_config(shapes, num_workers=1))) as loader:
        loader.start(2, 5)
        after = torch.get_rng_state()
        assert loader.pool._pool is not None
        workers = loader.pool._pool._iterator._workers
        started = list(loader.batches(2, 5))
        loader.start(7, 9)
        others = list(loader.batches(2, 5))  # something else than was announced
        loader.start(2, 5)
    assert torch.equal(after, before)  # initial weights are drawn after it
    assert len(started) == len(others) == 3
    for batch, expected in zip(started + others, alone * 2, strict=True):
        assert_same_bits(batch, expected)
    assert not any(worker.is_alive() for worker in workers)


def test_a_fresh_process_resumes_from_the_saved_state_alone(shapes: Path) -> None:
    config = run_config(shapes)
    whole = list(train_loader(config).batches(0, 20))
    for cut in (3, 11, 12, 17):
        state = json.loads(json.dumps(train_loader(config).state(cut)))
        for batch, wanted in zip(train_loader(config, resume=state).batches(cut, 20), whole[cut:], strict=True):
            assert_same_bits(batch, wanted)


def test_with_another_number_of_ranks_a_run_continues_with_the_unseen_images(shapes: Path) -> None:
    config = run_config(shapes, train={"images_per_gpu": 1})
    before = [train_loader(config, rank=rank, world_size=3) for rank in range(3)]
    seen = [image for loader in before for image in ids_of(list(loader.batches(0, 3)))]
    state = before[0].state(3)
    after = [train_loader(config, rank=rank, world_size=2, resume=state) for rank in range(2)]
    # 9 of 22 are seen; 13 more make the pass: 6 steps of 2 ranks, and the first rank of the seventh
    shares = [list(loader.batches(3, 10)) for loader in after]
    seen += ids_of(shares[0]) + ids_of(shares[1][:6])
    assert sorted(seen) == sorted(train_stores(config)[0].image_ids.tolist())
    assert after[0].state(10)["batch"] == 9 + 14
    single = list(train_loader(config).batches(0, 22))
    assert_same_bits(shares[0][0], single[9])


def test_batches_have_one_canvas_and_hold_the_images_they_name(shapes: Path) -> None:
    config = run_config(shapes)
    store = train_stores(config)[0]
    loader = train_loader(config)
    assert loader.buckets.canvases == ((96, 128), (128, 96))
    for batch in loader.batches(0, loader.steps_per_pass):
        assert tuple(batch.images.pixels.shape[-2:]) in loader.buckets.canvases
        for image_id, (height, width) in zip(batch.image_ids.tolist(), batch.images.sizes.tolist(), strict=True):
            record = store.image(store.index_of(image_id))
            assert (height > width) == (record.height > record.width) or height == width
            assert 64 <= min(height, width) <= 80
        assert (batch.targets.valid.sum(dim=1) > 0).all()
        assert (batch.targets.boxes[..., 2] <= batch.images.sizes[:, None, 1] + 1e-3).all()
        assert (batch.targets.boxes[..., 3] <= batch.images.sizes[:, None, 0] + 1e-3).all()


def test_without_buckets_a_batch_is_padded_to_its_largest_image(shapes: Path) -> None:
    for batch in train_loader(run_config(shapes, buckets="none")).batches(0, 11):
        wanted = -(-batch.images.sizes.max(dim=0).values // 32) * 32
        assert list(batch.images.pixels.shape[-2:]) == wanted.tolist()


def test_each_pass_augments_an_image_with_another_seed(shapes: Path) -> None:
    loader = train_loader(run_config(shapes, train={"images_per_gpu": 1}))
    shown: dict[int, list[Batch]] = {}
    for batch in loader.batches(0, NUM_TRAIN * 2):
        shown.setdefault(int(batch.image_ids[0]), []).append(batch)
    assert all(len(batches) == 2 for batches in shown.values())
    assert all(first.seed != second.seed for first, second in shown.values())
    other_size = sum(not torch.equal(first.images.sizes, second.images.sizes) for first, second in shown.values())
    assert other_size > NUM_TRAIN // 2


def test_large_scale_jitter_fills_its_canvas(shapes: Path) -> None:
    config = run_config(shapes, scale_jitter=(0.5, 2.0), buckets=[[96, 96]])
    batches = list(train_loader(config).batches(0, 11))
    sizes = torch.cat([batch.images.sizes for batch in batches])
    assert all(batch.images.pixels.shape == (2, 3, 96, 96) for batch in batches)
    assert (sizes == 96).all(dim=1).any()
    assert (sizes < 96).any()
    for batch in batches:
        sides = (batch.targets.boxes[..., 2:] - batch.targets.boxes[..., :2])[batch.targets.valid]
        assert (sides >= 1).all()


@pytest.mark.parametrize("changes", [{}, {"scale_jitter": (0.5, 2.0)}])
def test_resized_on_the_device_a_batch_is_the_same_to_one_grey_level(shapes: Path, changes: dict[str, Any]) -> None:
    config = run_config(shapes, **changes)
    pairs = zip(
        train_loader(config, resize_on="worker").batches(0, 11),
        train_loader(config, resize_on="device").batches(0, 11),
        strict=True,
    )
    for ours, theirs in pairs:
        assert theirs.images.pixels.dtype == torch.uint8
        assert (ours.images.pixels.int() - theirs.images.pixels.int()).abs().max() <= 1
        assert_same_bits(dataclasses.replace(ours, images=theirs.images), theirs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_given_the_same_batches(shapes: Path) -> None:
    loader = train_loader(run_config(shapes, num_workers=2), device="cuda")
    for found, wanted in zip(loader.batches(0, 11), train_loader(run_config(shapes)).batches(0, 11), strict=True):
        assert found.images.pixels.device.type == "cuda"
        back = found.to("cpu")
        assert (back.images.pixels.int() - wanted.images.pixels.int()).abs().max() <= 1
        assert_same_bits(dataclasses.replace(wanted, images=back.images), back)
    loader.close()


def test_joined_sets_may_use_the_same_ids(shapes: Path) -> None:
    config = run_config(shapes, train={"images_per_gpu": 1})
    data = config.data.model_dump() | {"train": ["train", "coco_train"]}  # the same set twice: all ids collide
    twice = RunConfig.model_validate(config.model_dump() | {"data": data})
    loader = train_loader(twice)
    assert loader.num_images == NUM_TRAIN * 2
    batches = list(loader.batches(0, NUM_TRAIN * 2))
    assert sorted(ids_of(batches)) == sorted(train_stores(config)[0].image_ids.tolist() * 2)
    assert len({int(batch.seed[0]) for batch in batches}) == NUM_TRAIN * 2


def test_joined_sets_of_other_categories_are_refused(shapes: Path, tmp_path: Path) -> None:
    tree = json.loads((shapes / "annotations" / "instances_val.json").read_text())
    tree["categories"][0]["name"] = "something else"
    (tmp_path / "other.json").write_text(json.dumps(tree))
    other = {"annotations": str(tmp_path / "other.json"), "images": "val"}
    config = run_config(shapes)
    data = config.data.model_dump() | {"train": ["train", other]}
    config = RunConfig.model_validate(config.model_dump() | {"data": data})
    with pytest.raises(DataError, match="have different categories"):
        train_loader(config)


def test_images_to_skip_are_not_shown(shapes: Path) -> None:
    config = run_config(shapes, train={"images_per_gpu": 1})
    store = train_stores(config)[0]
    bad = set(store.image_ids[:3].tolist())
    loader = build_train_loader(config, [store], skip=[bad])
    assert loader.num_images == NUM_TRAIN - 3
    assert not bad & set(ids_of(list(loader.batches(0, NUM_TRAIN))))


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A set of which one training and one validation image are gone after its store was built."""
    root = tmp_path / "damaged"
    make_shapes(root, num_train=8, num_val=5, height=(48, 60), width=(61, 80))
    for split in ("train", "val"):
        store = open_stores(run_config(root).data, [split])[0]
        store.image(2).path.unlink()
    return root


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_file_that_vanished_stops_training_with_its_name(damaged: Path, num_workers: int) -> None:
    config = run_config(damaged, num_workers=num_workers)
    record = train_stores(config)[0].image(2)
    loader = train_loader(config)
    with pytest.raises(DataError) as caught:
        list(loader.batches(0, 4))
    assert f"image {record.id}, {record.path}, cannot be read" in caught.value.what
    assert "on_bad=skip" in caught.value.remedy
    loader.close()


def test_a_file_that_vanished_is_replaced_by_another_of_its_bucket(
    damaged: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = run_config(damaged, on_bad="skip")
    store = train_stores(config)[0]
    gone = int(store.image_ids[2])
    with caplog.at_level(logging.WARNING, logger="maskfleet.data"):
        first = list(train_loader(config).batches(0, 4))
    assert f"image {gone}" in caplog.text
    assert "using another image instead" in caplog.text
    assert set(ids_of(first)) == set(store.image_ids.tolist()) - {gone}
    assert len(ids_of(first)) == 8
    for batch, again in zip(first, train_loader(config).batches(0, 4), strict=True):
        assert_same_bits(batch, again)


def test_a_folder_that_vanished_stops_training_even_when_bad_files_are_skipped(damaged: Path) -> None:
    config = run_config(damaged, on_bad="skip")
    loader = train_loader(config)
    (damaged / "train").rename(damaged / "elsewhere")
    with pytest.raises(DataError, match="cannot be read"):
        list(loader.batches(0, 1))


def test_evaluation_without_a_vanished_file_says_so(damaged: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_stores(run_config(damaged).data, ["val"])[0]
    with pytest.raises(DataError, match="cannot be read"):
        list(build_eval_loader(run_config(damaged), store))
    batches = list(build_eval_loader(run_config(damaged, on_bad="skip"), store))
    assert sum(len(batch.image_ids) for batch in batches) == 4
    assert "evaluation continues without it" in caplog.text


def test_a_killed_worker_is_reported_and_the_loader_can_continue(shapes: Path) -> None:
    loader = train_loader(run_config(shapes, num_workers=1))
    batches = loader.batches(0, 500)
    first = next(batches)
    assert loader.pool._pool is not None
    worker = loader.pool._pool._iterator._workers[0]  # type: ignore[union-attr]
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(DataError, match="a loader process died"):
        list(batches)
    again = next(loader.batches(0, 1))
    assert_same_bits(first, again)
    loader.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_workers_and_their_fork_server_ignore_stop_requests(shapes: Path, number: signal.Signals) -> None:
    loader = train_loader(run_config(shapes, num_workers=1))
    batches = loader.batches(0, 6)
    next(batches)
    assert loader.pool._pool is not None
    worker = loader.pool._pool._iterator._workers[0]  # type: ignore[union-attr]
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    for process_id in (worker.pid, server):
        os.kill(process_id, number)
    assert len(list(batches)) == 5
    loader.close()
    assert len(list(loader.batches(0, 2))) == 2, "the fork server starts new workers"
    loader.close()
    assert forkserver._forkserver._forkserver_pid == server  # type: ignore[attr-defined]


def test_evaluation_shows_every_image_once_and_how_to_map_back(shapes: Path) -> None:
    config = run_config(shapes)
    store = open_stores(config.data, config.data.val)[0]
    batches = [
        batch for rank in range(2) for batch in build_eval_loader(config, store, rank=rank, world_size=2)
    ]  # fmt: skip
    ids = [image_id for batch in batches for image_id in batch.image_ids.tolist()]
    assert sorted(ids) == store.image_ids.tolist()
    for batch in batches:
        for row, image_id in enumerate(batch.image_ids.tolist()):
            record = store.image(store.index_of(image_id))
            assert batch.original_sizes[row].tolist() == [record.height, record.width]
            scale = batch.images.sizes[row] / batch.original_sizes[row]
            assert abs(scale[0] - scale[1]) < 0.02


def test_only_large_tensors_of_a_worker_take_shared_memory(shapes: Path) -> None:
    [batch] = (loader := train_loader(run_config(shapes, num_workers=1))).batches(0, 1)
    loader.close()
    [expected] = train_loader(run_config(shapes)).batches(0, 1)
    assert_same_bits(batch, expected)
    shared = [tensor for tensor in tensors(batch) if tensor.is_shared()]
    assert batch.images.pixels.is_shared()
    assert all(tensor.nbytes > MAX_INLINE_BYTES for tensor in shared)
    assert sum(1 for _ in tensors(batch)) - len(shared) >= 8
    batch.targets.boxes.add_(1)  # what arrives inside the message can be written to as well


def test_a_rank_without_a_share_of_the_evaluation_has_no_batches(shapes: Path) -> None:
    config = run_config(shapes, num_workers=1, buckets="tight")
    store = open_stores(config.data, config.data.val)[0]
    loader = build_eval_loader(config, store, rank=40, world_size=41)
    assert (len(loader), loader.num_images, list(loader)) == (0, 0, [])


def test_evaluation_can_be_repeated_and_cut_short(shapes: Path) -> None:
    config = run_config(shapes, num_workers=1)
    config = RunConfig.model_validate(config.model_dump() | {"eval": {"images_per_gpu": 2, "max_images": 3}})
    store = open_stores(config.data, config.data.val)[0]
    loader = build_eval_loader(config, store)
    first, second = list(loader), list(loader)
    assert loader.num_images == 3
    assert sorted(i for batch in first for i in batch.image_ids.tolist()) == store.image_ids[:3].tolist()
    for batch, again in zip(first, second, strict=True):
        assert_same_bits(batch, again)
    loader.close()


def test_a_set_without_outlines_cannot_train_masks(shapes: Path, tmp_path: Path) -> None:
    tree = json.loads((shapes / "annotations" / "instances_train.json").read_text())
    for record in tree["annotations"]:
        record["segmentation"] = []
    (tmp_path / "boxes.json").write_text(json.dumps(tree))
    config = run_config(shapes)
    data = config.data.model_dump() | {"train": [{"annotations": str(tmp_path / "boxes.json"), "images": "train"}]}
    dump = config.model_dump() | {"data": data}
    with pytest.raises(DataError, match=r"have no segmentation"):
        train_loader(RunConfig.model_validate(dump))
    boxes_only = RunConfig.model_validate(dump | {"model": dump["model"] | {"mask": False}})
    assert next(train_loader(boxes_only).batches(0, 1)).targets.outlines is None


def test_workers_are_chosen_from_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    cpu = torch.device("cpu")
    assert chosen_workers(None, 1, cpu) == 6
    assert chosen_workers(None, 4, cpu) == 1
    assert chosen_workers(3, 4, cpu) == 3
    assert chosen_workers(0, 1, cpu) == 0


COCO = os.environ.get("MASKFLEET_COCO")


@pytest.mark.skipif(COCO is None, reason="needs a COCO folder, named by MASKFLEET_COCO")
def test_real_coco_loads_and_its_masks_lie_in_their_boxes(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"data": {"root": COCO, "num_workers": 2, "cache_dir": str(tmp_path)}})
    stores = train_stores(config)
    loader = build_train_loader(config, stores)
    steps = min(loader.steps_per_pass, 40)
    for batch in loader.batches(0, steps):
        outlines = batch.targets.outlines
        assert outlines is not None
        for number in np.flatnonzero(batch.targets.valid[0].numpy()).tolist():
            start, count = int(outlines.start[0, number]), int(outlines.count[0, number])
            points = outlines.edges[0, start : start + count].reshape(-1, 2)
            box = batch.targets.boxes[0, number]
            assert count >= 3
            assert (points.amin(dim=0) >= box[:2] - 5).all()
            assert (points.amax(dim=0) <= box[2:] + 5).all()
    loader.close()
