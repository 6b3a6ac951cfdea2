"""How people reach a server of this machine: on loopback as it is, from elsewhere through TLS and a password."""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from maskfleet.errors import MaskfleetError
from maskfleet.system.network import listening_socket
from maskfleet.system.web.certificate import Certificate
from maskfleet.system.web.proxy import MAX_BODY, PasswordGate, PasswordProxy, is_loopback


def is_local(host: str) -> bool:
    """Whether only this machine reaches `host`; an error for all interfaces at once, and for what is no address."""
    try:
        found = is_loopback(host)
        is_any = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return found  # a name
    except OSError as error:
        raise MaskfleetError(
            f"{host} is no address of this machine: {error.strerror}", remedy="give an address or a name of it"
        ) from error
    if is_any:
        raise MaskfleetError(
            f"{host} would open the page on every network of this machine",
            remedy="give the one address that the others use; `hostname -I` lists them",
        )
    return found


def free_port(host: str, port: int) -> int:
    """`port` of `host`, or any free one for 0; an error if it is in use."""
    try:
        with listening_socket(host, port) as free:
            return int(free.getsockname()[1])
    except OSError as error:
        raise _unusable(host, port, error) from error


@contextmanager
def protected(
    address: tuple[str, int],
    *,
    upstream_port: int,
    gate: PasswordGate,
    certificate: Certificate,
    max_body: int = MAX_BODY,
) -> Iterator[int]:
    """`upstream_port` of loopback on `address`, over TLS and behind the password of `gate`; yields the port."""
    try:
        proxy = PasswordProxy(
            address, upstream_port=upstream_port, gate=gate, tls=certificate.server_context(), max_body=max_body
        )
    except OSError as error:
        raise _unusable(*address, error) from error
    thread = threading.Thread(target=proxy.serve_forever, name="password-proxy", daemon=True)
    thread.start()
    try:
        yield proxy.port
    finally:
        proxy.shutdown()
        proxy.server_close()


def url_of(scheme: str, host: str, port: int) -> str:
    """The address for a browser."""
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/"


def _unusable(host: str, port: int, error: OSError) -> MaskfleetError:
    return MaskfleetError(
        f"port {port} of {host} cannot be used: {error.strerror}", remedy="choose another with --port or --host"
    )
