"""The image for CPUs, built once, by `pytest_plugins = ("image_fixtures",)`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from image_store import COMPILED, ImageStore, add_full_base, built, image_store

from maskfleet.training.background.artifacts import CompiledCanvas, write_artifacts
from maskfleet.training.background.target import Target


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageStore]:
    folder = tmp_path_factory.mktemp("image")
    try:
        yield image_store(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def train(store: ImageStore) -> str:
    """The name of the image, built on a base that has all dependencies."""
    add_full_base(store)
    compiled = store.folder / "compiled.cache"
    write_artifacts(compiled, Target.of(torch.device("cpu")), [CompiledCanvas(COMPILED, b"code")])
    options = ("--compiled", str(compiled), "--pip-args=--no-index --find-links=/wheels")
    return built(store, "--base", "localhost/full", *options)
