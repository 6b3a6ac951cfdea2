"""Fixtures: a screen, and AWS: moto's server, or botocore's Stubber with answers as AWS gives them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("boto3")
import habits
from small_stack import Screen, StubbedAws

from tools import moto_server


@pytest.fixture
def screen() -> Screen:
    return Screen()


@pytest.fixture(autouse=True)
def _account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials that reach no real account."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")


@pytest.fixture(scope="package")
def moto_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with moto_server(tmp_path_factory.mktemp("moto") / "log") as url:
        yield url


@pytest.fixture
def moto(moto_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """moto as AWS, with the habits of CloudFormation that it lacks; nothing waits."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto_url)
    monkeypatch.setattr("maskfleet.infra.cloudformation.events.POLL_S", 0.0)
    habits.play(monkeypatch)
    return moto_url


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubbedAws]:
    """AWS with prepared answers, each of which must be asked for; nothing waits."""
    monkeypatch.setattr("maskfleet.infra.cloudformation.events.POLL_S", 0.0)
    aws = StubbedAws()
    yield aws
    aws.close()
    aws.assert_all_asked()
