"""From weights to AP, held against pycocotools end to end."""

from __future__ import annotations

import contextlib
import io
import json
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
from maskfleet.data.store.dataset import open_stores
from maskfleet.data.synthetic.dataset import make_shapes
from maskfleet.evaluation.evaluate import score_results
from maskfleet.inference.detector import Detector
from maskfleet.inference.draw import drawn_detections, drawn_truth
from maskfleet.inference.predict import predict_batches
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


def results_of(model: MaskRCNN, config: RunConfig, world_size: int = 1) -> dict[int, list[dict[str, object]]]:
    [store] = open_stores(config.data, config.data.val)
    merged: dict[int, list[dict[str, object]]] = {}
    for rank in range(world_size):
        loader = build_eval_loader(config, store, rank=rank, world_size=world_size)
        part = predict_batches(
            model,
            loader,
            device=torch.device("cpu"),
            categories=[(c.id, c.name) for c in store.categories],
            accurate_paste=True,
        )
        assert not merged.keys() & part.keys()
        merged |= part
    return merged


def test_scores_are_pycocotools(model: MaskRCNN, config: RunConfig, tmp_path: Path) -> None:
    [store] = open_stores(config.data, config.data.val)
    results = results_of(model, config)
    scores = score_results(store, results, masks=True, max_detections=100)
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
    scores = score_results(store, results, masks=False, max_detections=100)
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
