"""From a run to an endpoint and back, over HTTP: moto as SageMaker, S3 and CloudFormation, the program `serve` behind
a door that passes on requests as SageMaker does."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from endpoint_world import Command
from processes import ENV, LONG_S
from sagemaker_world import REGION

from maskfleet.config.base import replaced
from maskfleet.config.load import write_run_file
from maskfleet.config.run import RunConfig
from maskfleet.inference.sources import VideoOutput
from maskfleet.launch.sagemaker.endpoint import deploy as deploying
from maskfleet.launch.sagemaker.endpoint import invoke as invoking
from maskfleet.launch.sagemaker.services import Services
from maskfleet.model.build import build_mask_rcnn
from maskfleet.model.weights.checkpoint import CheckpointFolder, Snapshot
from maskfleet.system.deploy_files import deploy_path
from maskfleet.training.checkpoint import write_checkpoint
from tools import moto_server

pytestmark = pytest.mark.slow
IMAGE = f"123456789012.dkr.ecr.{REGION}.amazonaws.com/maskfleet-train:1"
STACK = ("--stack", "sm", "--image", IMAGE, "--instance", "ml.m5.xlarge")  # moto knows no newer GPU types


class Door(ThreadingHTTPServer):
    """InvokeEndpoint on loopback: the body goes to /invocations of a program, errors come back as SageMaker's."""

    daemon_threads = True
    program_port = 0


class _Request(BaseHTTPRequestHandler):
    server: Door

    def do_POST(self) -> None:
        assert re.fullmatch(r"/endpoints/shapes/invocations", self.path)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        passed = {name: self.headers[name] for name in ("Content-Type", "X-Amzn-SageMaker-Custom-Attributes")}
        program = http.client.HTTPConnection("127.0.0.1", self.server.program_port, timeout=LONG_S)
        program.request("POST", "/invocations", body, passed)
        answer = program.getresponse()
        content, status, kind = answer.read(), answer.status, {}
        program.close()
        if status != 200:
            said = {
                "Message": "Received error from primary",
                "OriginalStatusCode": status,
                "OriginalMessage": content.decode(),
            }
            content, status, kind = json.dumps(said).encode(), 424, {"x-amzn-ErrorType": "ModelError"}
        self.send_response(status)
        for name, value in {**kind, "Content-Type": "application/json", "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""


@pytest.fixture
def door() -> Iterator[Door]:
    with Door(("127.0.0.1", 0), _Request) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, door: Door) -> Iterator[Services]:
    """moto with the stack `sm` and its bucket."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    settings = {
        "ACCESS_KEY_ID": "test",
        "SECRET_ACCESS_KEY": "test",
        "EC2_METADATA_DISABLED": "true",
        "REGION": REGION,
        "CONFIG_FILE": str(tmp_path / "none"),
        "SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
        "ENDPOINT_URL_SAGEMAKER_RUNTIME": f"http://127.0.0.1:{door.server_port}",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    # moto can neither simulate policies nor list quotas of SageMaker; test_deploy.py tests what is asked there.
    monkeypatch.setattr(deploying, "_requirements", lambda *_: iter(()))
    with moto_server(tmp_path / "moto.log") as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        services = Services(REGION)
        services.client("s3").create_bucket(Bucket="lab", CreateBucketConfiguration={"LocationConstraint": REGION})
        template = (deploy_path("cloudformation") / "sagemaker.yaml").read_text(encoding="utf-8")
        services.client("cloudformation").create_stack(
            StackName="sm",
            TemplateBody=template,
            Parameters=[{"ParameterKey": "S3Bucket", "ParameterValue": "lab"}],
            Capabilities=["CAPABILITY_IAM"],
        )
        yield services


@pytest.fixture
def run_dir(tmp_path: Path, micro: RunConfig) -> Path:
    """An untrained run with checkpoints of steps 1 and 2, which differ."""
    folder = tmp_path / "run"
    folder.mkdir()
    write_run_file(folder, replaced(micro, {"model.inference.score_threshold": 0.0}))
    for step in (1, 2):
        torch.manual_seed(step)
        model = build_mask_rcnn(replaced(micro, {"model.num_categories": 2}).model)
        tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
        numbers = {"categories": [{"id": 7, "name": "disc"}, {"id": 9, "name": "ring"}]}
        write_checkpoint(
            CheckpointFolder(folder / "checkpoints").path(step), Snapshot(step, tensors, numbers), best=False
        )
    return folder


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    image = np.random.default_rng(0).integers(0, 255, (40, 64, 3), np.uint8)
    for name in ("a.jpg", "b.png", "c.bmp", "d.webp"):
        cv2.imwrite(str(folder / name), image)
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    with VideoOutput(folder / "clip.mp4") as video:
        for _ in range(2):
            video.add(image, 5.0)
    return folder


def served(root: Path, log: Path, **environment: str) -> tuple[subprocess.Popen[bytes], int]:
    argv = [sys.executable, "-m", "maskfleet", "sagemaker", "serve", "--root", str(root), "--port", "0"]
    with log.open("wb") as file:
        process = subprocess.Popen(argv, env=ENV | environment, stdout=file, stderr=file, start_new_session=True)
    deadline = time.monotonic() + LONG_S
    while (found := re.search(r"answers on http://127\.0\.0\.1:(\d+)", log.read_text())) is None:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process, int(found[1])


def test_a_run_becomes_an_endpoint_that_answers_as_predict_does(
    account: Services,
    door: Door,
    run_dir: Path,
    photos: Path,
    tmp_path: Path,
    command: Command,
) -> None:
    options = ("endpoint", "deploy", "shapes", run_dir, "--step", 1, *STACK)
    code, dry, _ = command(*options, "--dry-run")
    assert code == 0
    requests = json.loads(dry)
    code, name, said = command(*options, "--wait")
    assert (code, name) == (0, "shapes\n"), said
    assert "shapes: InService" in said
    sagemaker = account.client("sagemaker")
    model = sagemaker.describe_model(ModelName=requests["CreateModel"]["ModelName"])
    assert model["PrimaryContainer"] == requests["CreateModel"]["PrimaryContainer"]
    assert "HostingRole" in model["ExecutionRoleArn"]
    assert len(model["VpcConfig"]["Subnets"]) == 3
    assert "has this model and these settings already" in command(*options)[2]

    key = model["PrimaryContainer"]["ModelDataUrl"].removeprefix("s3://lab/")
    account.client("s3").download_file("lab", key, str(tmp_path / "model.tar.gz"))
    container = tmp_path / "ml" / "model"
    container.mkdir(parents=True)
    with tarfile.open(tmp_path / "model.tar.gz") as tar:
        tar.extractall(container, filter="data")
    process, door.program_port = served(tmp_path / "ml", tmp_path / "serve.log")
    try:
        code, _, said = command("endpoint", "invoke", "shapes", photos, "--out", tmp_path / "remote", "--score", 0.3)
        assert code == 2
        assert "1 of 6 files" in said
        large = tmp_path / "large.png"
        cv2.imwrite(str(large), np.random.default_rng(0).integers(0, 255, (1500, 1500, 3), np.uint8))
        code, _, said = command("endpoint", "invoke", "shapes", large, "--out", tmp_path / "none")
        assert code == 2
        assert "and the endpoint takes 6,291,456" in said
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(LONG_S)
    command("predict", run_dir, photos, "--step", 1, "--out", tmp_path / "local", "--score", 0.3, "--device", "cpu")
    local, remote = tmp_path / "local", tmp_path / "remote"
    names = sorted(path.name for path in local.iterdir())
    assert names == ["a.png", "b.png", "c.png", "clip.mp4", "d.png", "detections.json"]
    assert json.loads((local / "detections.json").read_text())
    for name in names:
        assert (local / name).read_bytes() == (remote / name).read_bytes(), name

    code, listed, _ = command("endpoint", "list", "--json")
    assert [one["name"] for one in json.loads(listed)] == ["shapes"]
    code, shown, _ = command("endpoint", "status", "shapes")
    assert code == 0
    assert f"model {model['PrimaryContainer']['ModelDataUrl']}" in shown
    code, _, said = command("endpoint", "delete", "shapes")
    assert "standard input is not a terminal" in said
    assert code == 2
    code, _, said = command("endpoint", "delete", "shapes", "--yes")
    assert code == 0, said
    assert sagemaker.list_endpoints()["Endpoints"] == []
    assert sagemaker.list_endpoint_configs()["EndpointConfigs"] == []
    assert sagemaker.list_models()["Models"] == []
    assert "there is no endpoint shapes" in command("endpoint", "status", "shapes")[2]


def test_asynchronous_answers_come_from_s3(
    account: Services, run_dir: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    options = ("endpoint", "deploy", "shapes", run_dir, *STACK, "--async")
    code, dry, _ = command(*options, "--dry-run")
    assert code == 0
    config = json.loads(dry)["CreateEndpointConfig"]["AsyncInferenceConfig"]
    assert config["OutputConfig"]["S3OutputPath"] == "s3://lab/maskfleet/async/shapes/output"
    code, _, said = command(*options, "--wait")
    assert code == 0, said
    version = json.loads(dry)["CreateModel"]["ModelName"]
    kept = account.client("sagemaker").describe_endpoint_config(EndpointConfigName=version)
    assert kept["AsyncInferenceConfig"] == config
    # moto leaves the configuration out of DescribeEndpoint, and answers invocations itself.
    real = invoking.needed
    monkeypatch.setattr(invoking, "needed", lambda *given: {**real(*given), "AsyncInferenceConfig": config})
    monkeypatch.delenv("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME")
    found = {"category_id": 7, "bbox": [1.0, 2.0, 30.0, 20.0], "score": 0.9, "category_name": "disc", "label": 1}
    refusal = {"error": "image 0 is too large", "remedy": "scale it down"}
    results = [
        {"data": json.dumps({"height": 40, "width": 64, "detections": [found]})},
        {"is_failure": True, "data": json.dumps(refusal)},
    ]
    body = json.dumps({"region": REGION, "results": results}).encode()
    address = f"{os.environ['AWS_ENDPOINT_URL']}/moto-api/static/sagemaker/async-endpoint-results"
    urllib.request.urlopen(urllib.request.Request(address, body, {"Content-Type": "application/json"})).close()
    images = (photos / "a.jpg", photos / "b.png")
    code, _, said = command("endpoint", "invoke", "shapes", *images, "--out", tmp_path / "out", "--at-once", 1)
    assert code == 2
    assert "image 0 is too large" in said
    [one] = json.loads((tmp_path / "out" / "detections.json").read_text())
    assert (one["category"], one["bbox"]) == ("disc", found["bbox"])
    listed = account.client("s3").list_objects_v2(Bucket="lab", Prefix="maskfleet/async/shapes/input/")
    assert sorted(row["Size"] for row in listed["Contents"]) == sorted(image.stat().st_size for image in images)
