"""An untrained run, its detector, and its page behind a real server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from maskfleet.config.base import replaced
from maskfleet.config.load import write_run_file
from maskfleet.config.run import RunConfig
from maskfleet.inference.detector import Detector
from maskfleet.inference.load import load
from maskfleet.model.build import build_mask_rcnn
from maskfleet.model.weights.checkpoint import CheckpointFolder, Snapshot
from maskfleet.serve.app import App
from maskfleet.serve.batching import DetectionQueue
from maskfleet.serve.detection import DetectionService
from maskfleet.serve.page.guard import own_pages_only
from maskfleet.serve.page.site import Site
from maskfleet.serve.page.validation import open_validation
from maskfleet.serve.server import AppServer
from maskfleet.training.checkpoint import write_checkpoint


@pytest.fixture(scope="session")
def served_run(tmp_path_factory: pytest.TempPathFactory, micro: RunConfig) -> Path:
    """A run of two classes with one checkpoint, whose model finds something in every image."""
    folder = tmp_path_factory.mktemp("served") / "run"
    folder.mkdir()
    write_run_file(folder, replaced(micro, {"model.inference.score_threshold": 0.0}))
    torch.manual_seed(0)
    model = build_mask_rcnn(replaced(micro, {"model.num_categories": 2}).model)
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    numbers = {"categories": [{"id": 1, "name": "<b>disc</b>"}, {"id": 7, "name": "ring"}]}
    write_checkpoint(CheckpointFolder(folder / "checkpoints").path(1), Snapshot(1, tensors, numbers))
    return folder


@pytest.fixture(scope="session")
def page_detector(served_run: Path) -> Detector:
    return load(served_run, "cpu")


@pytest.fixture(scope="session")
def site_app(page_detector: Detector) -> Iterator[App]:
    """The app of the page; it begins with all detections."""
    queue = DetectionQueue(page_detector, batch_size=2)
    service = DetectionService(queue, source="test", default_score=0.0)
    site = Site(page_detector, service, open_validation(page_detector.run, None), default_score=0.0)
    yield App(site.routes, guard=own_pages_only())
    queue.close()


@pytest.fixture(scope="module")
def page_url(site_app: App) -> Iterator[str]:
    """The address of the page behind a real server."""
    with AppServer(site_app, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()
