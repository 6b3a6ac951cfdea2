"""The image's `serve` program, with the model folder that the `train` program leaves."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import cv2
import numpy as np
import pytest
from opt_ml import Host, opt_ml
from processes import ENV, LONG_S

from maskfleet.model.weights.checkpoint import CheckpointFolder


@pytest.fixture(scope="module")
def trained(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    host = Host(opt_ml(tmp_path_factory.mktemp("job") / "ml", shapes))
    assert host.code() == 0, host.printed
    return host.root


def started(root: Path, log: Path, **environment: str) -> tuple[subprocess.Popen[bytes], int]:
    """The program and the port it took."""
    argv = [sys.executable, "-m", "maskfleet", "sagemaker", "serve", "--root", str(root), "--port", "0"]
    with log.open("wb") as file:
        process = subprocess.Popen(argv, env=ENV | environment, stdout=file, stderr=file, start_new_session=True)
    deadline = time.monotonic() + LONG_S
    while (found := re.search(r"answers on http://127\.0\.0\.1:(\d+)", log.read_text())) is None:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process, int(found[1])


def ask(port: int, method: str, path: str, body: bytes = b"", kind: str = "image/png") -> tuple[int, dict[str, object]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONG_S)
    try:
        connection.request(method, path, body, {"Content-Type": kind})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


@pytest.mark.slow
def test_the_model_of_a_job_is_served_until_sigterm(trained: Path, tmp_path: Path) -> None:
    step = CheckpointFolder(trained / "model" / "checkpoints").steps()[0]
    image = cv2.imencode(".png", np.full((64, 64, 3), 128, np.uint8))[1].tobytes()
    process, port = started(trained, tmp_path / "log", MASKFLEET_STEP=str(step), MASKFLEET_SCORE="0")
    try:
        status, answer = ask(port, "GET", "/ping")
        assert (status, answer["status"]) == (200, "ok")
        assert str(answer["model"]).endswith(f"step {step}")
        status, answer = ask(port, "POST", "/invocations", image)
        assert status == 200
        assert answer["detections"]
        assert ask(port, "POST", "/invocations", b"broken")[0] == 400
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(LONG_S)
    assert code == 0, (tmp_path / "log").read_text()


@pytest.mark.slow
def test_weights_without_checkpoints_are_served_and_an_unknown_step_is_an_error(trained: Path, tmp_path: Path) -> None:
    model = tmp_path / "ml" / "model"
    model.mkdir(parents=True)
    (model / "model.safetensors").symlink_to(trained / "model" / "model.safetensors")
    process, port = started(tmp_path / "ml", tmp_path / "log")
    assert ask(port, "GET", "/ping")[0] == 200
    process.send_signal(signal.SIGTERM)
    assert process.wait(LONG_S) == 0
    argv = [sys.executable, "-m", "maskfleet", "sagemaker", "serve", "--root", str(trained), "--step", "99999"]
    refused = subprocess.run(argv, env=ENV, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert refused.returncode == 2
    assert "there is no checkpoint of step 99999" in refused.stderr
