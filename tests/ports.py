"""Ports for servers that a test starts by number.

Binding port 0 and closing the socket is not enough: before the server starts, a connection of a test that runs at the
same time may get that port, and keeps it for a minute after it is closed.
"""

from __future__ import annotations

import itertools
import os
import socket

LOWEST, COUNT = 10_000, 10_000  # below the range from which the kernel takes ports for connections
_NUMBERS = itertools.count(os.getpid() * 997)  # far from where other test processes start


def free_port(count: int = 1) -> int:
    """The first of `count` consecutive free ports of 127.0.0.1; no call returns the same port again."""
    free: list[int] = []
    for number in itertools.islice(_NUMBERS, COUNT):
        port = LOWEST + number % COUNT
        if not _is_free(port):
            free = []
            continue
        free = [*free, port] if port - 1 in free else [port]
        if len(free) == count:
            return free[0]
    raise AssertionError("all ports are in use")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
