"""The grammar of host addresses, the same for every command: `host`, `user@host`, `user@host:port`.

No shell character and no leading dash passes it. `ProxyCommand` in ~/.ssh/config hands host and user to a shell, and
ssh would take a name that begins with a dash as an option.
"""

from __future__ import annotations

import ipaddress
import re

from maskfleet.errors import LaunchError

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}"  # of a user or a host; DNS allows 253 characters
_IPV6 = r"[0-9A-Fa-f:.]{2,45}(?:%[A-Za-z0-9_.-]{1,15})?"  # with the interface of a link-local address
_ADDRESS = re.compile(
    rf"(?:(?P<user>{_NAME})@)?(?:(?P<name>{_NAME})|\[(?P<ipv6>{_IPV6})\])(?::(?P<port>[0-9]{{1,5}}))?"
)
FORMS = "write host, user@host or user@host:port, an IPv6 address in brackets: user@[fd00::1]:22"


def address_parts(address: str) -> tuple[str | None, str, int | None]:
    """(user, host, SSH port) of `user@host:port`; LaunchError before anything can be started with another text."""
    match = _ADDRESS.fullmatch(address)
    if match is None or not _is_ipv6(match["ipv6"]) or not _is_port(match["port"]):
        raise LaunchError(f"{address!r} is not the address of a host", remedy=FORMS)
    return match["user"], match["name"] or match["ipv6"], int(match["port"]) if match["port"] else None


def bare_address(address: str) -> str:
    """`user@host:port` without user and SSH port."""
    return address_parts(address)[1]


def _is_ipv6(text: str | None) -> bool:
    if text is None:
        return True
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _is_port(text: str | None) -> bool:
    return text is None or 1 <= int(text) <= 65535
