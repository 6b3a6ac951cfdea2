"""How the ranks of a training job reach each other: addresses of the hosts, and variables of gloo, NCCL and EFA."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from maskfleet.errors import LaunchError
from maskfleet.launch.instances import INSTANCES
from maskfleet.launch.sagemaker.container.tree import Resources
from maskfleet.log import logger
from maskfleet.system.network import EFA_DEVICES, address_of, has_efa

RESOLVE_S = 600.0  # the last host of a job may start minutes after the first
_LIBRARY = Path("/opt/amazon/efa")  # where Amazon's installer puts libfabric
_POLL_S = 1.0


def await_hosts(hosts: tuple[str, ...], *, give_up: Callable[[], bool], timeout_s: float = RESOLVE_S) -> None:
    """Wait until the names of all hosts resolve, or `give_up`: a host gets its name when its container starts."""
    deadline = time.monotonic() + timeout_s
    for host in hosts:
        while not give_up() and not _resolves(host):
            if time.monotonic() >= deadline:
                raise LaunchError(
                    f"the name of host {host} does not resolve after {timeout_s:.0f} s",
                    remedy="see the log of that host; SageMaker's network gives each host its name",
                )
            time.sleep(_POLL_S)


def own_address(resources: Resources) -> str:
    """The address at which this host listens for the others: that of the job's interface, not one on loopback."""
    try:
        return str(ipaddress.ip_address(resources.current_host))
    except ValueError:
        found = address_of(resources.interface) if resources.interface else None
        return found or socket.gethostbyname(resources.current_host)


def network_variables(
    resources: Resources, env: Mapping[str, str], *, devices: Path = EFA_DEVICES, library: Path = _LIBRARY
) -> dict[str, str]:
    """Variables for gloo, NCCL and libfabric; those in `env` keep their values."""
    if len(resources.hosts) == 1:
        return {}
    chosen: dict[str, str] = {}
    if resources.interface:
        chosen |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), resources.interface)
    facts = INSTANCES.get(resources.instance_type or "")
    if has_efa(devices) and library.is_dir():
        chosen |= {"FI_PROVIDER": "efa", "FI_EFA_USE_HUGE_PAGE": "0"}
    elif facts is not None and facts.efa:
        lacks = "the image has no EFA software" if has_efa(devices) else "this container sees no EFA device"
        logger.warning("%s has EFA, but %s: training over TCP", facts.name, lacks)
    return {name: value for name, value in chosen.items() if name not in env}


def _has_efa(devices: Path) -> bool:
    # Amazon Linux names them efa_0 or, by their PCI address, rdmap16s27.
    return devices.is_dir() and any(one.name.startswith(("efa", "rdmap")) for one in devices.iterdir())


def _resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, 9, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return True
