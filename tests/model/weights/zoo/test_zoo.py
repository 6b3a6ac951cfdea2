"""Published weights: fetched once to a cache, verified, pinned, and used by recipes."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner
from web_server import Answer, WebServer

from maskfleet.cli.main import app
from maskfleet.config.base import replaced
from maskfleet.config.recipes import RECIPES, recipe
from maskfleet.config.run import RunConfig
from maskfleet.errors import WeightsError
from maskfleet.model.weights.zoo import catalogue
from maskfleet.model.weights.zoo.cache import cached, fetch
from maskfleet.model.weights.zoo.catalogue import ZOO, ZooFile, expect_zoo_file, zoo_file
from maskfleet.system.files import sha256
from maskfleet.training.distributed import Ranks, Worker
from maskfleet.training.preflight import fetch_weights, found_weights

NAME = "ImageNet-R50-AlignPadding"
FILE = ZOO[NAME]


def npz(seed: int = 0) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **{"conv0/W": np.random.default_rng(seed).normal(size=(7, 7, 3, 64)).astype(np.float32)})
    return buffer.getvalue()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MASKFLEET_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MASKFLEET_OFFLINE", raising=False)
    return tmp_path / "cache/weights"


@pytest.fixture
def zoo(web: WebServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> WebServer:
    monkeypatch.setattr(catalogue, "ADDRESSES", (web.url,))
    web.files[f"/{NAME}.npz"] = npz()
    return web


def test_weights_are_fetched_once_and_verified_at_every_use(zoo: WebServer, cache: Path) -> None:
    assert cached(FILE) is None
    path = fetch(FILE)
    assert (path, path.read_bytes()) == (cache / f"{NAME}.npz", npz())
    asked = len(zoo.asked)
    assert fetch(FILE) == cached(FILE) == path
    assert len(zoo.asked) == asked
    path.write_bytes(npz()[:-1])
    assert cached(FILE) is None, "a file that was changed is not used"
    assert fetch(FILE).read_bytes() == npz()
    assert sorted(one.name for one in cache.iterdir() if not one.name.startswith(".")) == [f"{NAME}.npz", "pins.json"]


def test_a_break_resumes_even_in_another_process(zoo: WebServer, cache: Path) -> None:
    zoo.fault = lambda asked: (
        None if asked.end == 1 else Answer(403, body=b"") if asked.start else Answer(cut_after=5000)
    )
    with pytest.raises(WeightsError, match="cannot be fetched"):
        fetch(FILE)
    assert (cache / f".{NAME}.npz.part").stat().st_size == 5000
    zoo.fault, zoo.asked = lambda asked: None, []
    assert fetch(FILE).read_bytes() == npz()
    assert [one.start for one in zoo.asked] == [0, 5000]
    assert not list(cache.glob(".*.part*"))


def test_a_file_that_changed_meanwhile_starts_again(zoo: WebServer, cache: Path) -> None:
    zoo.fault = lambda asked: (
        None if asked.end == 1 else Answer(403, body=b"") if asked.start else Answer(cut_after=5000)
    )
    with pytest.raises(WeightsError):
        fetch(FILE)
    zoo.fault = lambda asked: None
    zoo.files[f"/{NAME}.npz"], zoo.etags[f"/{NAME}.npz"] = npz(1), '"two"'
    assert fetch(FILE).read_bytes() == npz(1)


@pytest.mark.slow
def test_another_file_of_the_same_name_is_refused_unless_accepted(zoo: WebServer, cache: Path) -> None:
    fetch(FILE).unlink()
    zoo.files[f"/{NAME}.npz"] = npz(1)
    with pytest.raises(WeightsError, match="when it was first fetched") as raised:
        fetch(FILE)
    assert "--repin" in raised.value.remedy
    assert not (cache / f"{NAME}.npz").exists()
    done = CliRunner().invoke(app, ["weights", "get", NAME, "--repin"])
    assert done.exit_code == 0, done.output
    assert cached(FILE) == cache / f"{NAME}.npz"


@pytest.mark.parametrize(
    ("file", "what"),
    [
        (ZooFile(NAME, "", size=17), "instead of 17"),
        (ZooFile(NAME, "", sha256="0" * 64), "has SHA-256"),
    ],
)
def test_known_sizes_and_checksums_are_compared(zoo: WebServer, file: ZooFile, what: str) -> None:
    with pytest.raises(WeightsError, match=what):
        fetch(file)
    assert cached(file) is None


@pytest.mark.parametrize("content", [b"PK\x03\x04 not really", npz()[:-40]])
def test_what_is_no_archive_of_arrays_never_gets_its_name(zoo: WebServer, cache: Path, content: bytes) -> None:
    zoo.files[f"/{NAME}.npz"] = content
    with pytest.raises(WeightsError, match="damaged"):
        fetch(FILE)
    assert not (cache / f"{NAME}.npz").exists()
    assert not list(cache.glob(".*.part"))


def test_offline_the_remedy_works(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASKFLEET_OFFLINE", "1")
    with pytest.raises(WeightsError, match="MASKFLEET_OFFLINE is set") as raised:
        fetch(FILE)
    assert f"weights get {NAME} --from FILE" in raised.value.remedy
    (tmp_path / "brought.npz").write_bytes(npz())
    done = CliRunner().invoke(app, ["weights", "get", NAME, "--from", str(tmp_path / "brought.npz")])
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() == str(cache / f"{NAME}.npz")
    assert fetch(FILE).read_bytes() == npz()


@pytest.mark.parametrize(("size", "what"), [(None, "does not exist"), (3, "3 bytes, but .* has 165,362,754")])
def test_a_wrong_file_from_disk_is_refused(cache: Path, tmp_path: Path, size: int | None, what: str) -> None:
    if size is not None:
        (tmp_path / "file").write_bytes(b"x" * size)
    with pytest.raises(WeightsError, match=what):
        fetch(ZOO["COCO-MaskRCNN-R50FPN2x"], from_file=tmp_path / "file")


def test_a_cache_that_cannot_be_written_is_named(zoo: WebServer, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(WeightsError, match=r"the cache .*cache/weights cannot be used") as raised:
        fetch(FILE)
    assert "MASKFLEET_CACHE" in raised.value.remedy


def test_two_at_once_fetch_one_file(zoo: WebServer) -> None:
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(fetch(FILE))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 2
    assert len([one for one in zoo.asked if one.end > 1]) == 1


def test_a_recipe_fetches_its_weights_and_says_so(
    zoo: WebServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = replaced(recipe("r50_fpn_1x"), {"data.root": str(tmp_path)})
    with caplog.at_level("INFO", logger="maskfleet"):
        fetch_weights(config, Ranks(Worker(0, 1, 0, 1), None))
    assert f"{NAME}.npz is not here: fetching it from {zoo.url}" in caplog.text
    name = str(config.model.backbone.weights)
    assert found_weights(name, config) == cached(FILE)
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_bytes(npz(1))
    assert found_weights(name, config) == tmp_path / name, "a file of the user's comes first"
    assert sha256(tmp_path / name) != sha256(cached(FILE) or tmp_path)


def test_a_detector_is_known_by_its_name_alone(zoo: WebServer) -> None:
    name = "COCO-MaskRCNN-R50FPN2xGN"
    config = replaced(RunConfig(), {"train.weights": name})
    with pytest.raises(WeightsError, match=f"{name}.npz cannot be fetched: .* does not exist"):
        fetch_weights(config, Ranks(Worker(0, 1, 0, 1), None))


def test_every_recipe_names_weights_that_can_be_fetched() -> None:
    for name in RECIPES:
        weights = recipe(name).model.backbone.weights
        assert weights is None or zoo_file(weights) is not None, name


def test_names_and_lists(zoo: WebServer) -> None:
    assert zoo_file(f"pretrained-models/{NAME}.npz") == zoo_file(NAME) == FILE
    assert zoo_file("mine.npz") is None
    with pytest.raises(WeightsError, match="no published weights") as raised:
        expect_zoo_file("ImageNet-R50")
    assert "did you mean ImageNet-R50-AlignPadding?" in raised.value.remedy
    fetch(FILE)
    done = CliRunner().invoke(app, ["weights", "list"])
    assert all(name in done.output for name in ZOO)
    assert f"ResNet-50 for ImageNet  (in {fetch(FILE).parent})" in done.output
    assert f'"name": "{NAME}"' in CliRunner().invoke(app, ["weights", "list", "--json"]).output
