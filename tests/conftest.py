"""Settings for all tests. pyproject.toml puts tests/ and folders below it on the path, so helpers import by name."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A shell script starts background jobs with SIGINT ignored, and children inherit that; some tests send SIGINT.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # as under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# How long an example takes depends on the machine and its load more than on the code. The same examples every time: a
# test fails because of a change, not by chance. `make fuzz` looks for new ones.
settings.register_profile("maskfleet", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("maskfleet")

# Tests reach no network; those of downloads use a server of their own.
os.environ["MASKFLEET_OFFLINE"] = "1"

# Nothing that an earlier session left in the user's caches changes a result, and nothing is left there.
_CACHES = tempfile.TemporaryDirectory(prefix="maskfleet-test-caches-")
os.environ["MASKFLEET_CACHE"] = str(Path(_CACHES.name, "maskfleet"))
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(_CACHES.name, "compiled"))


def pytest_unconfigure(config: pytest.Config) -> None:
    _CACHES.cleanup()


pytest_plugins = ["micro_run", "web_fixtures"]
