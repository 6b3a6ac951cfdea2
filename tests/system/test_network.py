"""Listening sockets: ours on one address, and who can reach those of a process."""

from __future__ import annotations

import os
import socket

import pytest

from maskfleet.system.network import (
    LOOPBACK,
    Listener,
    address_for_others,
    interface_with,
    listeners,
    listening_socket,
    source_address,
)


def test_a_listening_socket_has_one_address_and_a_port_of_its_own() -> None:
    with listening_socket(LOOPBACK) as first, listening_socket(LOOPBACK) as second:
        assert first.getsockname()[0] == second.getsockname()[0] == LOOPBACK
        assert first.getsockname()[1] != second.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            listening_socket(LOOPBACK, first.getsockname()[1])


def test_the_listening_sockets_of_a_process_are_found() -> None:
    before = listeners([os.getpid()])
    with listening_socket(LOOPBACK), socket.create_server(("0.0.0.0", 0)):
        found = [one for one in listeners([os.getpid()]) if one not in before]
    kinds = sorted((one.address, one.is_loopback, one.is_open) for one in found)
    assert kinds == [("0.0.0.0", False, True), (LOOPBACK, True, False)]
    assert listeners([2**22 + 1]) == []


@pytest.mark.parametrize(
    ("address", "is_open"),
    [("10.0.0.1", False), ("54.1.2.3", True), ("::", True), ("::1", False), ("fd00::1", False), ("2600::1", True)],
)
def test_addresses_of_the_internet_and_of_all_interfaces_are_open(address: str, is_open: bool) -> None:
    assert Listener(1, address, 80).is_open is is_open


def test_this_host_has_an_address_for_others_even_where_its_name_is_on_loopback() -> None:
    assert source_address(LOOPBACK) == LOOPBACK
    assert address_for_others("10.1.2.3") == "10.1.2.3"
    try:
        assert address_for_others("localhost") != LOOPBACK
    except OSError as error:
        pytest.skip(f"this machine has no network: {error}")


def test_the_interface_of_an_address_is_named() -> None:
    assert interface_with(LOOPBACK) == "lo"
    assert interface_with("203.0.113.77") is None
