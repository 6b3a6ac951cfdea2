"""pyproject.toml puts tests/ on the path: tests import the slow references (reference*.py) by name."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

# In the background of a script Ctrl-C does nothing, here and in all that is started from here; tests send it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says more of the machine, and of what else runs on it, than of the code.
settings.register_profile("maskfleet", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("maskfleet")

pytest_plugins = ["micro_run"]
