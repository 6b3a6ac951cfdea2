"""Network interfaces of this host, and listening sockets: one of our own, and who can reach those of a process."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = "127.0.0.1"
BACKLOG = 1024  # all ranks of a job connect within seconds
EFA_DEVICES = Path("/sys/class/infiniband")
_SIOCGIFADDR = 0x8915
_LISTENING = "0A"  # in /proc/net/tcp
_TEST_NETWORK = "192.0.2.1"  # RFC 5737: never assigned, so only the default route leads to it


def interface_with(address: str) -> str | None:
    """Name of the network interface that has the IPv4 `address`; None if there is none."""
    return next((name for _, name in socket.if_nameindex() if address_of(name) == address), None)


def address_of(interface: str) -> str | None:
    """The first IPv4 address of a network interface; None if it has none, or there is no such interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", os.fsencode(interface)[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def source_address(target: str) -> str:
    """The address of this host from which it reaches `target`, a name or an address; OSError without a route."""
    family, kind, _, _, place = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # a datagram socket: chooses a route, sends nothing
        return str(probe.getsockname()[0])


def address_for_others(name: str) -> str:
    """The address behind this host's own `name` for other hosts: Debian's /etc/hosts gives it one on loopback."""
    address = str(socket.getaddrinfo(name, 9, type=socket.SOCK_STREAM)[0][4][0])
    return source_address(_TEST_NETWORK) if ipaddress.ip_address(address).is_loopback else address


def listening_socket(address: str, port: int = 0) -> socket.socket:
    """A TCP socket that listens on one address only; port 0 takes a free one."""
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # not stopped by closed connections
        listening.bind((address, port))
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def has_efa(devices: Path = EFA_DEVICES) -> bool:
    """Whether the kernel of this host lists an EFA interface; a container sees them also if it may not use them."""
    # Amazon Linux names them efa_0 or, by their PCI address, rdmap16s27.
    return devices.is_dir() and any(one.name.startswith(("efa", "rdmap")) for one in devices.iterdir())


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening TCP socket of a process."""

    pid: int
    address: str
    port: int

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback

    @property
    def is_open(self) -> bool:
        """Whether it listens on all interfaces, or on an address that is routed on the internet."""
        address = ipaddress.ip_address(self.address)
        return address.is_unspecified or address.is_global


def listeners(pids: Iterable[int]) -> list[Listener]:
    """The listening TCP sockets of `pids`, as the kernel lists them; none of processes that may not be examined."""
    sockets = {}
    for table in ("tcp", "tcp6"):
        path = Path("/proc/net") / table
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[3] == _LISTENING:
                address, _, port = fields[1].partition(":")
                sockets[fields[9]] = (_address(address), int(port, 16))
    return [Listener(pid, *sockets[inode]) for pid in pids for inode in sorted(_inodes(pid)) if inode in sockets]


def _address(text: str) -> str:
    """An address of /proc/net/tcp: 32-bit words in the byte order of this machine."""
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    address = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _inodes(pid: int) -> set[str]:
    found = set()
    try:
        for link in (Path("/proc") / str(pid) / "fd").iterdir():
            try:
                target = str(link.readlink())
            except OSError:
                continue  # closed in the meantime
            if target.startswith("socket:["):
                found.add(target[8:-1])
    except OSError:
        return set()  # it has exited, or belongs to another user
    return found
