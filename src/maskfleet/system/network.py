"""The network interfaces of this host."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

_SIOCGIFADDR = 0x8915


def interface_with(address: str) -> str | None:
    """Name of the network interface that has the IPv4 `address`; None if there is none."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", os.fsencode(name)[:15]))
            except OSError:
                continue  # an interface without an IPv4 address
        if socket.inet_ntoa(answer[20:24]) == address:
            return name
    return None
