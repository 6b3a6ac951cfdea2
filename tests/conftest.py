"""pyproject.toml puts tests/ on the path: tests import the slow references (reference*.py) by name."""

from __future__ import annotations

import signal

# In the background of a script Ctrl-C does nothing, here and in all that is started from here; tests send it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
