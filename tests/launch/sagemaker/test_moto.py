"""A job's log and model over HTTP from moto's server, where it behaves as AWS: CloudWatch Logs and S3."""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sagemaker_world import REGION, launch

from maskfleet.config.recipes import recipe
from maskfleet.launch.backend import backend_of, parse_handle
from maskfleet.launch.job import JobState
from maskfleet.launch.sagemaker.backend import SageMakerBackend
from maskfleet.launch.sagemaker.logs import GROUP
from maskfleet.launch.sagemaker.request import REQUEST_FILE
from maskfleet.launch.sagemaker.services import Services
from tools import moto_server

pytestmark = pytest.mark.slow
HANDLE = f"sagemaker://{REGION}/r50"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Services]:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {"ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test", "EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    for name in ("CONFIG_FILE", "SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(f"AWS_{name}", str(tmp_path / "none"))
    with moto_server(tmp_path / "log") as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        yield Services(REGION)


def test_a_job_its_log_and_its_model(server: Services, tmp_path: Path) -> None:
    backend = SageMakerBackend(launch(nodes=2))
    rendered = backend.render(backend.job(recipe("demo"), name="r50"))
    server.client("sagemaker").create_training_job(**json.loads(rendered.files[REQUEST_FILE]))
    logs, s3 = server.client("logs"), server.client("s3")
    logs.create_log_group(logGroupName=GROUP)
    first_ms = int(time.time() - 40_000) * 1000  # CloudWatch takes no lines from the future
    for host, offset in (("algo-1", 0), ("algo-2", 500)):
        stream = f"r50/{host}-1794830400"
        logs.create_log_stream(logGroupName=GROUP, logStreamName=stream)
        for start in range(0, 30_000, 10_000):  # more than the 10,000 lines of a page
            rows = [
                {"timestamp": first_ms + 1000 * number + offset, "message": f"[rank{offset // 100}]: {number}"}
                for number in range(start, start + 10_000)
            ]
            logs.put_log_events(logGroupName=GROUP, logStreamName=stream, logEvents=rows)
    s3.create_bucket(Bucket="lab", CreateBucketConfiguration={"LocationConstraint": REGION})
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        info = tarfile.TarInfo("weights.safetensors")
        info.size = 12 << 20  # more than one part of a download
        tar.addfile(info, io.BytesIO(os.urandom(info.size)))
    job = server.client("sagemaker").describe_training_job(TrainingJobName="r50")
    model = job["ModelArtifacts"]["S3ModelArtifacts"].removeprefix("s3://lab/")
    s3.put_object(Bucket="lab", Key=model, Body=buffer.getvalue())

    handle = parse_handle(HANDLE)
    found = list(backend_of(handle).logs(handle))
    assert found == [f"[rank{rank}]: {number}" for number in range(30_000) for rank in (0, 5)]
    assert backend_of(handle).status(handle).state is JobState.DONE
    with backend_of(handle).files(handle) as files:
        assert files.fetch(tmp_path / "r50").files == 1
    assert (tmp_path / "r50" / "weights.safetensors").stat().st_size == 12 << 20
