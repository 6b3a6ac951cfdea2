"""Which region and profile an AWS session has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from maskfleet.errors import MaskfleetError
from maskfleet.system.aws import aws_session

pytest.importorskip("boto3")


@pytest.fixture(autouse=True)
def _nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))


def test_the_region_is_the_given_one_or_that_of_either_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert aws_session("tests").region_name is None
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    assert aws_session("tests").region_name == "eu-west-1"
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    assert aws_session("tests").region_name == "us-west-2"
    assert aws_session("tests", region="ap-south-1").region_name == "ap-south-1"


def test_a_missing_profile_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(MaskfleetError, match="nobody") as caught:
        aws_session("tests")
    assert "AWS_PROFILE" in caught.value.remedy
