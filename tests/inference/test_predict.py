"""From weights to AP, held against pycocotools end to end."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from maskfleet.config.base import replaced
from maskfleet.config.recipes import recipe
from maskfleet.config.run import RunConfig
from maskfleet.data.pipeline.build import build_eval_loader
from maskfleet.data.pipeline.collate import EvalBatch
from maskfleet.data.pipeline.loader import ExpectedImages
from maskfleet.data.store.dataset import open_stores
from maskfleet.data.synthetic.dataset import make_shapes
from maskfleet.evaluation.evaluate import evaluate, score_results
from maskfleet.inference.detector import Detector
from maskfleet.inference.draw import drawn_detections, drawn_truth
from maskfleet.inference.predict import garbage_collection_paused, predict_batches
from maskfleet.inference.recorded import Work
from maskfleet.inference.runner import DetectionRunner
from maskfleet.model.build import build_mask_rcnn
from maskfleet.model.mask_rcnn import MaskRCNN
from maskfleet.rle import rle_pixels


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    root = tmp_path_factory.mktemp("predict") / "set"
    make_shapes(
        root, num_train=1, num_val=9, height=(60, 100), width=(60, 100), num_categories=2, max_objects=3, seed=5
    )
    return replaced(
        recipe("demo"),
        {
            "data.root": str(root),
            "data.num_workers": 0,
            "data.test_short_edge_px": 72,
            "model.num_categories": 2,
            "model.inference.score_threshold": 0.0,
            "model.inference.max_detections": 20,
            "eval.images_per_gpu": 4,
        },
    )


@pytest.fixture(scope="module")
def model(config: RunConfig) -> MaskRCNN:
    """Random weights, with scores and boxes far enough from uniform that order and masks matter."""
    torch.manual_seed(2)
    model = build_mask_rcnn(config.model)
    with torch.no_grad():
        for head in (model.rpn.objectness, model.box_heads[0].class_logits, model.mask_head.logits):  # type: ignore[union-attr]
            head.weight.mul_(30)  # type: ignore[union-attr]
    return model.eval()


def results_of(
    model: MaskRCNN,
    config: RunConfig,
    world_size: int = 1,
    *,
    num_workers: int = 0,
    runner: DetectionRunner | None = None,
) -> dict[int, list[dict[str, object]]]:
    [store] = open_stores(config.data, config.data.val)
    merged: dict[int, list[dict[str, object]]] = {}
    for rank in range(world_size):
        loader = build_eval_loader(config, store, rank=rank, world_size=world_size)
        part = predict_batches(
            runner or DetectionRunner(model, torch.device("cpu")),
            loader,
            categories=[(c.id, c.name) for c in store.categories],
            accurate_paste=True,
            num_workers=num_workers,
        )
        assert not merged.keys() & part.keys()
        merged |= part
    return merged


def test_scores_are_pycocotools(model: MaskRCNN, config: RunConfig, tmp_path: Path) -> None:
    [store] = open_stores(config.data, config.data.val)
    results = results_of(model, config)
    scores = score_results(store, results, masks=True)
    (tmp_path / "results.json").write_text(json.dumps([item for found in results.values() for item in found]))
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(store.split.annotations))
        found = truth.loadRes(str(tmp_path / "results.json"))
        for kind, ours in scores.items():
            oracle = COCOeval(truth, found, kind)
            oracle.evaluate()
            oracle.accumulate()
            oracle.summarize()
            values = [ours.ap, ours.ap50, ours.ap75, ours.ap_small, ours.ap_medium, ours.ap_large]
            assert values == pytest.approx(oracle.stats[:6].tolist(), abs=1e-9)
            assert ours.ar100 == pytest.approx(oracle.stats[8], abs=1e-9)
    assert len(results) == 9


def test_more_than_a_hundred_detections_give_the_ap_of_pycocotools(config: RunConfig, tmp_path: Path) -> None:
    [store] = open_stores(config.data, config.data.val)
    (image, other), results = (int(store.image_ids[0]), int(store.image_ids[1])), {}
    for image_id, num_wrong in ((image, 120), (other, 30)):
        found = store.instances(store.index_of(image_id))
        categories = {one.label: one.id for one in store.categories}
        wrong = [([0, 0, 1, 1], categories[int(found.labels[0])], 0.9)] * num_wrong
        right = [
            ([float(x), float(y), float(right - x), float(bottom - y)], categories[int(label)], 0.5)
            for (x, y, right, bottom), label in zip(found.boxes, found.labels, strict=True)
        ]
        results[image_id] = [
            {"image_id": image_id, "category_id": category, "bbox": box, "score": score}
            for box, category, score in wrong + right
        ]
    ours = score_results(store, results, masks=False)["bbox"]
    (tmp_path / "results.json").write_text(json.dumps([item for found in results.values() for item in found]))
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(store.split.annotations))
        oracle = COCOeval(truth, truth.loadRes(str(tmp_path / "results.json")), "bbox")
        oracle.params.imgIds = [image, other]
        oracle.evaluate()
        oracle.accumulate()
        oracle.summarize()
    assert [ours.ap, ours.ap50, ours.ar100] == pytest.approx(
        [oracle.stats[0], oracle.stats[1], oracle.stats[8]], abs=1e-9
    )
    assert 0 < ours.ar100 < 1  # the object behind 120 wrong ones is not counted


def test_two_ranks_find_what_one_finds(model: MaskRCNN, config: RunConfig) -> None:
    one, two = results_of(model, config), results_of(model, config, world_size=2)
    assert one.keys() == two.keys()
    for image_id, found in one.items():
        assert [item["category_id"] for item in found] == [item["category_id"] for item in two[image_id]]
        np.testing.assert_allclose(
            [item["score"] for item in found], [item["score"] for item in two[image_id]], atol=2e-4
        )  # type: ignore[arg-type]


def test_only_the_images_looked_at_count(model: MaskRCNN, config: RunConfig) -> None:
    few = replaced(config, {"eval.max_images": 3})
    [store] = open_stores(few.data, few.data.val)
    results = results_of(model, few)
    assert len(results) == 3
    scores = score_results(store, results, masks=False)
    assert set(scores) == {"bbox"}
    objects = sum(int((~store.instances(index).crowd).sum()) for index in range(3))
    assert sum(row.num_objects for row in scores["bbox"].per_class) == objects


def test_one_image_in_memory_gives_the_same_detections(model: MaskRCNN, config: RunConfig) -> None:
    [store] = open_stores(config.data, config.data.val)
    alone = replaced(config, {"eval.images_per_gpu": 1})
    for image_id, expected in list(results_of(model, alone).items())[:3]:
        record = store.image(store.index_of(image_id))
        categories = tuple((c.id, c.name) for c in store.categories)
        detector = Detector(model, config, categories, "random", torch.device("cpu"))
        picture = cv2.imread(str(record.path))[..., ::-1]
        found = detector.detect(picture).to_coco(image_id)
        assert [item["category_id"] for item in found] == [item["category_id"] for item in expected]
        for key, tolerance in (("bbox", 2e-3), ("score", 2e-4)):  # a canvas of another size rounds differently
            np.testing.assert_allclose([item[key] for item in found], [item[key] for item in expected], atol=tolerance)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools under numpy 2
def test_masks_unpack_to_the_pixels_they_were(model: MaskRCNN, config: RunConfig) -> None:
    from pycocotools import mask as oracle

    for found in results_of(model, config).values():
        for item in found[:5]:
            rle: dict[str, object] = item["segmentation"]  # type: ignore[assignment]
            assert np.array_equal(rle_pixels(rle), oracle.decode(rle).astype(bool))


def test_small_pictures_are_drawn_enlarged(model: MaskRCNN, config: RunConfig) -> None:
    [store] = open_stores(config.data, config.data.val)
    categories = tuple((c.id, c.name) for c in store.categories)
    picture = cv2.imread(str(store.image(0).path))
    factor = -(-320 // max(picture.shape[:2]))
    plain = drawn_detections(picture, [], categories)
    assert np.array_equal(plain[::factor, ::factor], picture)
    truth = drawn_truth(store, 0)
    assert truth.shape == plain.shape
    assert not np.array_equal(truth, plain)


@pytest.mark.slow
def test_results_of_worker_processes_are_those_of_this_process(model: MaskRCNN, config: RunConfig) -> None:
    expected = results_of(model, config)
    found = results_of(model, config, num_workers=2)
    assert list(found) == list(expected), "the order of the images differs"
    assert found == expected


def test_recorded_results_are_those_of_the_eager_model_image_by_image(model: MaskRCNN, config: RunConfig) -> None:
    expected = results_of(model, config)
    runner = DetectionRunner(model, torch.device("cpu"), capture=lambda work: work)
    runner.mode = lambda shape, expected_images: "recorded"  # type: ignore[method-assign]
    found = results_of(model, config, runner=runner)
    assert found.keys() == expected.keys()
    for image_id, items in expected.items():
        assert [item["category_id"] for item in found[image_id]] == [item["category_id"] for item in items]
        for key, tolerance in (("bbox", 2e-3), ("score", 2e-4)):  # a padded batch rounds differently
            values = [np.array([item[key] for item in of]) for of in (found[image_id], items)]
            np.testing.assert_allclose(*values, atol=tolerance)


def test_a_pause_of_the_garbage_collector_ends_and_keeps_what_was_set_before() -> None:
    assert gc.isenabled()
    with garbage_collection_paused():
        assert not gc.isenabled()
        with garbage_collection_paused():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the inner pause ended the outer one"
    assert gc.isenabled()
    with pytest.raises(KeyError), garbage_collection_paused():
        raise KeyError
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_objects_created_in_a_pause_are_old_and_cycles_among_them_are_still_found() -> None:
    with garbage_collection_paused():
        kept = [[number] for number in range(50_000)]
        cycle: list[object] = [Remembered()]
        cycle.append(cycle)
        is_dead = weakref.ref(cycle[0])
    assert gc.get_count()[0] < 50_000
    assert len(gc.get_objects(generation=2)) > 50_000
    del cycle
    gc.collect()
    assert is_dead() is None
    assert len(kept) == 50_000


class Remembered:
    """An object that a weak reference can refer to."""


def test_progress_counts_every_image_once(model: MaskRCNN, config: RunConfig) -> None:
    [store] = open_stores(config.data, config.data.val)
    loader = build_eval_loader(config, store)
    seen: list[int] = []
    results = predict_batches(
        DetectionRunner(model, torch.device("cpu")),
        loader,
        categories=[(c.id, c.name) for c in store.categories],
        accurate_paste=True,
        on_image=seen.append,
    )
    assert seen == list(results)
    assert sum(images.count for images in loader.expected_images().values()) == len(seen) == 9


def test_detection_is_recorded_before_the_first_image_is_loaded(model: MaskRCNN, config: RunConfig) -> None:
    [store] = open_stores(config.data, config.data.val)
    loader = build_eval_loader(replaced(config, {"eval.images_per_gpu": 2}), store)
    events: list[str] = []

    def capture(work: Work) -> Work:
        events.append("recorded")
        return work

    def batches() -> Iterator[EvalBatch]:
        events.append("loading")
        yield from loader

    expected = {canvas: ExpectedImages(1000, images.batch_size) for canvas, images in loader.expected_images().items()}
    assert {images.batch_size for images in loader.expected_images().values()} <= {1, 2}
    runner = DetectionRunner(model, torch.device("cpu"), capture=capture)
    categories = [(c.id, c.name) for c in store.categories]
    found = predict_batches(runner, batches(), categories=categories, accurate_paste=True, expected=expected)
    assert events == ["recorded"] * len(expected) + ["loading"]
    assert found.keys() == results_of(model, config).keys()


def test_on_a_gpu_images_get_the_canvases_of_the_run_and_not_one_each(
    model: MaskRCNN, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    sizes = [(60, 100), (100, 60), (61, 99), (80, 80)]
    heights, widths = [size[0] for size in sizes], [size[1] for size in sizes]
    for rule in ("orientation", "tight"):
        run = replaced(config, {"data.buckets": rule, "model.max_size_px": 120})
        on_gpu = Detector(model, run, ((1, "a"), (2, "b")), "random", torch.device("cuda"))
        first, second, third, square = on_gpu._canvases(heights, widths, sizes)
        assert first == third == square == (second[1], second[0])
        assert first[0] < first[1]
    on_cpu = Detector(model, config, ((1, "a"), (2, "b")), "random", torch.device("cpu"))
    assert on_cpu._canvases(heights, widths, sizes) == sizes


def test_evaluation_scores_against_the_images_that_could_be_read(
    model: MaskRCNN, config: RunConfig, tmp_path: Path
) -> None:
    """The annotations are loaded while detection runs, before it is known which images are unreadable."""
    shutil.copytree(config.data.root, tmp_path / "set")
    run = replaced(config, {"data.root": str(tmp_path / "set"), "data.on_bad": "skip"})
    [store] = open_stores(run.data, run.data.val)
    Path(str(store.image(4).path)).write_bytes(b"")
    categories = tuple((category.id, category.name) for category in store.categories)
    found = evaluate(Detector(model, run, categories, "random", torch.device("cpu")), batch_size=4)
    results = results_of(model, run)
    assert found.num_images == len(results) == 8
    scores = score_results(store, results, masks=True)
    assert (found.box, found.mask) == (scores["bbox"], scores["segm"])
    assert sum(one.num_objects for one in found.box.per_class) > 0
