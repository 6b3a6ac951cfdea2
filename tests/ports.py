"""Ports for servers that a test starts by number.

A port that the kernel chose and that was let go again may be gone before its server is up: other tests run beside
this one, and every connection that one of them makes takes such a port, and keeps it for a minute after its end.
"""

from __future__ import annotations

import itertools
import os
import socket

LOWEST, COUNT = 10_000, 10_000  # below those that the kernel gives to connections
_ASKED = itertools.count(os.getpid() * 997)  # far from where the processes beside this one begin


def free_port(room: int = 1) -> int:
    """The first of `room` ports of 127.0.0.1 that follow each other and that nobody uses or is given again."""
    free: list[int] = []
    for number in itertools.islice(_ASKED, COUNT):
        port = LOWEST + number % COUNT
        if not _is_free(port):
            free = []
            continue
        free = [*free, port] if port - 1 in free else [port]
        if len(free) == room:
            return free[0]
    raise AssertionError("every port is taken")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
