"""A data set in shards or in S3 gives the same batches, bit for bit, as the same files in a folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
from flaky_s3 import Answer, Cut, FlakyS3, Request
from stage_server import bring, direct, recheck

from maskfleet.config.run import RunConfig
from maskfleet.data.checks.annotations import check_split
from maskfleet.data.files import root as roots
from maskfleet.data.pipeline.build import build_eval_loader, build_train_loader
from maskfleet.data.store.dataset import open_stores, with_found_splits
from maskfleet.data.synthetic.dataset import make_shapes
from maskfleet.errors import DataError, DataSourceError

pytest_plugins = ("stage_fixtures",)
STEPS = 8


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources") / "shapes"
    make_shapes(folder, num_train=14, num_val=5, height=(48, 96), width=(48, 96), crowd_fraction=0.3)
    return folder


@pytest.fixture(autouse=True)
def no_old_listings() -> None:
    roots._listings.clear()


def run_config(root: object, cache: Path, **data: Any) -> RunConfig:
    sizes = {"train_short_edge_px": (64, 80), "test_short_edge_px": 80, "num_workers": 0}
    return RunConfig.model_validate(
        {
            "model": {"max_size_px": 128, "rpn": {"crowd_overlap": 0.7}},
            "data": {"root": str(root), "train": ["train"], "val": ["val"], "cache_dir": str(cache)} | sizes | data,
            "train": {"images_per_gpu": 2, "seed": 11},
            "eval": {"images_per_gpu": 2},
        }
    )


def tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name))


def batches(config: RunConfig) -> list[list[torch.Tensor]]:
    train = build_train_loader(config, open_stores(config.data, config.data.train))
    [val] = open_stores(config.data, config.data.val)
    evaluation = build_eval_loader(config, val)
    try:
        return [list(tensors(batch)) for batch in [*train.batches(0, STEPS), *evaluation]]
    finally:
        train.close()
        evaluation.close()


def assert_same(ours: list[list[torch.Tensor]], theirs: list[list[torch.Tensor]]) -> None:
    assert len(ours) == len(theirs) > STEPS
    for one, other in zip(ours, theirs, strict=True):
        assert len(one) == len(other) > 3
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_shards_in_a_folder_give_the_same_batches(shapes: Path, tmp_path: Path) -> None:
    bring(shapes, tmp_path / "shards", shard_bytes=8_000)
    assert len(list((tmp_path / "shards").glob("*.tar"))) > 2
    assert_same(batches(run_config(tmp_path / "shards", tmp_path / "a")), batches(run_config(shapes, tmp_path / "b")))


def test_the_splits_of_shards_are_found_and_checked(shapes: Path, tmp_path: Path) -> None:
    bring(shapes, tmp_path / "shards", shard_bytes=8_000)
    config = with_found_splits(run_config(tmp_path / "shards", tmp_path / "a", train=["auto"], val=["auto"]))
    assert (config.data.train, config.data.val) == (("train",), ("val",))
    for store in open_stores(config.data, ["train", "val"]):
        assert [problem for problem in check_split(store, decode=True) if problem.severity == "error"] == []


def test_a_damaged_shard_stops_training_even_if_bad_images_are_skipped(shapes: Path, tmp_path: Path) -> None:
    bring(shapes, tmp_path / "shards", shard_bytes=10**9)
    shard = tmp_path / "shards" / "shard-000000.tar"
    shard.write_bytes(shard.read_bytes()[:5000])
    with pytest.raises(DataError, match=r"shard-000000.tar is truncated") as caught:
        batches(run_config(tmp_path / "shards", tmp_path / "a", on_bad="skip"))
    assert "stage the shards again" in caught.value.remedy


def test_the_remedy_for_a_shard_with_other_bytes_repairs_it(shapes: Path, tmp_path: Path) -> None:
    """Its size is right, so that only --check finds it."""
    bring(shapes, tmp_path / "shards", shard_bytes=10**9)
    shard = tmp_path / "shards" / "shard-000000.tar"
    right = shard.read_bytes()
    shard.write_bytes(right[:600] + bytes(len(right) - 600))
    with pytest.raises(DataError, match="does not match its SHA-256") as caught:
        batches(run_config(tmp_path / "shards", tmp_path / "a"))
    assert caught.value.remedy.startswith("stage it again, first with --check")
    with pytest.raises(DataError, match="missing or changed"):
        recheck(shapes, tmp_path / "shards", shard_bytes=10**9)
    bring(shapes, tmp_path / "shards", shard_bytes=10**9)
    assert shard.read_bytes() == right


@pytest.mark.slow
@pytest.mark.parametrize(("form", "num_workers"), [("files", 0), ("staged", 0), ("shards", 0), ("shards", 2)])
def test_s3_gives_the_same_batches(s3: FlakyS3, shapes: Path, tmp_path: Path, form: str, num_workers: int) -> None:
    bring(shapes, "s3://coco-data/set", shard_bytes=8_000 if form == "shards" else None)
    if form == "files":  # as another tool would leave them
        direct(s3).delete_object(Bucket="coco-data", Key="set/manifest.jsonl")
    if num_workers:
        forkserver._forkserver._stop()  # type: ignore[attr-defined]  # one that runs has an older AWS_ENDPOINT_URL
    remote = run_config("s3://coco-data/set", tmp_path / "a", num_workers=num_workers)
    ours = batches(remote)
    assert_same(ours, batches(run_config(shapes, tmp_path / "b")))
    s3.requests.clear()
    assert_same(batches(remote), ours)
    assert not [path for path in s3.gets() if path.endswith((".jpg", ".png", ".tar"))], "images are in the cache"


@pytest.mark.slow
def test_a_small_cache_or_none_only_costs_requests(s3: FlakyS3, shapes: Path, tmp_path: Path) -> None:
    bring(shapes, "s3://coco-data/set", shard_bytes=8_000)
    expected = batches(run_config(shapes, tmp_path / "b"))
    for cache_gb in (0, 20e-6):
        config = run_config("s3://coco-data/set", tmp_path / f"cache-{cache_gb}", cache_gb=cache_gb)
        assert_same(batches(config), expected)
        entries = [path for path in (tmp_path / f"cache-{cache_gb}").rglob("entries/*/*") if path.is_file()]
        assert sum(path.stat().st_size for path in entries) <= cache_gb * 1e9


@pytest.mark.slow
def test_answers_that_fail_for_a_moment_are_asked_again(s3: FlakyS3, shapes: Path, tmp_path: Path) -> None:
    bring(shapes, "s3://coco-data/set", shard_bytes=8_000)
    seen: dict[str, int] = {}

    def fault(request: Request) -> Answer | Cut | None:
        if not request.path.endswith(".tar"):
            return None
        seen[request.range] = seen.get(request.range, 0) + 1
        faults = (Answer(503, "SlowDown"), Answer(500, "InternalError"), Cut(10))
        return faults[seen[request.range] - 1] if seen[request.range] <= len(faults) else None

    s3.fault = fault
    remote = run_config("s3://coco-data/set", tmp_path / "a")
    assert_same(batches(remote), batches(run_config(shapes, tmp_path / "b")))
    assert set(seen.values()) == {4}


BROKEN = {
    "AccessDenied": (403, "not allowed to read s3://coco-data/set/shard-", "s3:GetObject"),
    "ExpiredToken": (400, "AWS does not accept the credentials in use", "aws sso login"),
    "PreconditionFailed": (412, "changed after the run had started", "start the run again"),
}


@pytest.mark.slow
@pytest.mark.parametrize("code", BROKEN)
def test_a_source_that_fails_is_named_and_never_skipped(s3: FlakyS3, shapes: Path, tmp_path: Path, code: str) -> None:
    status, what, remedy = BROKEN[code]
    bring(shapes, "s3://coco-data/set", shard_bytes=8_000)
    s3.fault = lambda request: Answer(status, code) if request.path.endswith(".tar") else None
    with pytest.raises(DataError, match=what) as caught:
        batches(run_config("s3://coco-data/set", tmp_path / "a", on_bad="skip"))
    assert remedy in caught.value.remedy


@pytest.mark.slow
def test_an_object_that_is_replaced_during_training_is_named(s3: FlakyS3, shapes: Path, tmp_path: Path) -> None:
    bring(shapes, "s3://coco-data/set")
    config = run_config("s3://coco-data/set", tmp_path / "a", cache_gb=0)
    loader = build_train_loader(config, open_stores(config.data, config.data.train))
    assert len(list(loader.batches(0, 2))) == 2
    for name in sorted(path.name for path in (shapes / "train").iterdir()):
        direct(s3).put_object(Bucket="coco-data", Key=f"set/train/{name}", Body=b"another picture")
    with pytest.raises(DataError, match=r"s3://coco-data/set/train/\S+ changed after the run had started"):
        list(loader.batches(2, 6))


@pytest.mark.slow
def test_a_missing_object_is_an_image_that_can_be_skipped(s3: FlakyS3, shapes: Path, tmp_path: Path) -> None:
    bring(shapes, "s3://coco-data/set")
    name = sorted(path.name for path in (shapes / "train").iterdir())[3]
    direct(s3).delete_object(Bucket="coco-data", Key=f"set/train/{name}")
    with pytest.raises(DataError, match=f"{name}, cannot be read: was deleted from S3"):
        batches(run_config("s3://coco-data/set", tmp_path / "a"))
    roots._listings.clear()
    assert len(batches(run_config("s3://coco-data/set", tmp_path / "a", on_bad="skip"))) > STEPS
    direct(s3).delete_object(Bucket="coco-data", Key="set/manifest.jsonl")
    roots._listings.clear()
    config = run_config("s3://coco-data/set", tmp_path / "a")
    [store] = open_stores(config.data, ["train"])
    s3.requests.clear()
    assert [problem.kind for problem in check_split(store, listed=True) if problem.severity == "error"] == [
        "image-missing"
    ]
    assert s3.requests == [], "the check before training reads no image"


@pytest.mark.slow
def test_a_prefix_without_objects_is_named(s3: FlakyS3, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there are no objects in s3://coco-data/nothing"):
        open_stores(run_config("s3://coco-data/nothing", tmp_path).data, ["train"])


@pytest.mark.slow
def test_an_index_without_its_shards_is_named(s3: FlakyS3, shapes: Path, tmp_path: Path) -> None:
    bring(shapes, "s3://coco-data/set", shard_bytes=10**9)
    for key in ("set/shard-000000.tar", "set/manifest.jsonl"):
        direct(s3).delete_object(Bucket="coco-data", Key=key)
    with pytest.raises(DataSourceError, match=r"has an index of shards, but not shard-000000.tar"):
        open_stores(run_config("s3://coco-data/set", tmp_path).data, ["train"])
