"""Tests of compiling: what they compile stays out of the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from maskfleet.inference.device import CACHE_VARIABLE


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "compiled"))
