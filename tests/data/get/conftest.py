"""Settings of the tests of downloads."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Syncing all disks waits for whatever else the machine writes."""
    monkeypatch.setattr(os, "sync", lambda: None)
