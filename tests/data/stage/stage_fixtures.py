"""A real S3 server for tests of staging, by `pytest_plugins = ("stage_fixtures",)`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from flaky_s3 import FlakyS3, flaky_s3
from stage_server import client_of, direct

from tools import moto_server


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with moto_server(tmp_path_factory.mktemp("moto") / "log") as url:
        yield url
        client_of(url).close()


@pytest.fixture
def s3(moto: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FlakyS3]:
    """An S3 that is empty but for the bucket `coco-data`; AWS_ENDPOINT_URL names it."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with flaky_s3(moto) as flaky:
        monkeypatch.setenv("AWS_ENDPOINT_URL", flaky.url)
        client = direct(flaky)
        client.create_bucket(Bucket="coco-data")
        flaky.requests.clear()
        yield flaky
        for page in client.get_paginator("list_objects_v2").paginate(Bucket="coco-data"):
            for found in page.get("Contents", ()):
                client.delete_object(Bucket="coco-data", Key=found["Key"])
        client.delete_bucket(Bucket="coco-data")
