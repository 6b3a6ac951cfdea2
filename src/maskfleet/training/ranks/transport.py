"""Which transport NCCL chose, from its own log: P2P, shared memory, EFA, InfiniBand or TCP sockets.

NCCL has no other way to tell. The lines are those of NCCL 2.20 to 2.29: format strings of libnccl 2.28.9 (torch 2.11)
and 2.29.7 (torch 2.13), and logs in NVIDIA/nccl#1597, NVIDIA/nccl-tests#188, aws/aws-ofi-nccl#715 and
aws/aws-ofi-nccl#889.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from maskfleet.errors import TrainingError
from maskfleet.log import logger
from maskfleet.system.network import has_efa
from maskfleet.training.distributed import Ranks

LOG_FILE = "NCCL_DEBUG_FILE"
_PREFIX = "maskfleet-nccl-"
_QUIET = ("", "VERSION", "WARN")  # values of NCCL_DEBUG with which NCCL says nothing about its transport
_VERSION = re.compile(r"NCCL version (\d+(?:\.\d+)+)")
_NETWORK = re.compile(r"NCCL INFO (?:Using network (?P<used>.+)|Assigned NET plugin (?P<assigned>.+) to comm)\s*$")
_PROVIDER = re.compile(r"NET/OFI Selected provider is (?P<name>[\w;-]+)", re.IGNORECASE)
_LINK = re.compile(r"NCCL INFO Channel .* via (?P<kind>P2P|SHM|NET)/(?P<rest>.+?)\s*$")
_SOCKET = "Socket"
_VERBS = Path("/dev/infiniband")  # in a container only if it was given an EFA interface


@dataclass(frozen=True, slots=True)
class Transport:
    """What the log of one rank says."""

    version: str = ""
    network: str = ""  # for other hosts, as NCCL calls it: Socket, IB, Libfabric …
    provider: str = ""  # of libfabric
    links: frozenset[str] = frozenset()  # kinds of connections in use: P2P, SHM, NET
    uses_rdma: bool = False  # whether the network reads and writes GPU memory directly

    @property
    def is_efa(self) -> bool:
        return "libfabric" in self.network.lower() and self.provider.startswith("efa")

    def __str__(self) -> str:
        inside = {"P2P": "P2P (NVLink or PCIe)", "SHM": "shared memory"}
        words = [text for kind, text in inside.items() if kind in self.links]
        if "NET" in self.links or not words:
            words.append(self._network_text())
        return f"NCCL {self.version}: {', '.join(words)}".replace("NCCL :", "NCCL:")

    def _network_text(self) -> str:
        rdma = " with GPUDirect RDMA" if self.uses_rdma else ""
        if self.is_efa:
            return f"EFA{rdma}"
        names = {_SOCKET: "TCP sockets", "IB": f"InfiniBand or RoCE{rdma}", "": "an unknown network"}
        return names.get(self.network, f"{self.network} {self.provider}".strip() + rdma)


def parsed(log: str) -> Transport:
    """The transport in the text of an NCCL log of levels INFO, subsystems INIT and NET."""
    version = network = provider = ""
    links, uses_rdma = set[str](), False
    for line in log.splitlines():
        if match := _VERSION.search(line):
            version = match[1]
        elif match := _PROVIDER.search(line):
            provider = match["name"].lower()
        elif match := _NETWORK.search(line):
            network = match["used"] or match["assigned"]
        elif match := _LINK.search(line):
            links.add(match["kind"])
            uses_rdma |= match["kind"] == "NET" and "GDRDMA" in match["rest"]
    return Transport(version, network, provider, frozenset(links), uses_rdma)


@contextmanager
def recorded_nccl_log(env: MutableMapping[str, str], device: torch.device) -> Iterator[None]:
    """Let NCCL, which must not have been used yet, write its log to a private file while the block runs.

    `env` is the environment of this process. If the block fails, NCCL's warnings are logged. Nothing changes if the
    user has the log written elsewhere, or wants to see it.
    """
    if device.type != "cuda" or LOG_FILE in env or env.get("NCCL_DEBUG", "").upper() not in _QUIET:
        yield
        return
    descriptor, path = tempfile.mkstemp(prefix=_PREFIX, suffix=".log")
    os.close(descriptor)
    changes = {LOG_FILE: path, "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
    before = {name: env[name] for name in changes if name in env}
    env.update(changes)
    try:
        yield
    except BaseException:
        for line in (own_log(env) or "").splitlines():
            if "NCCL WARN" in line:
                logger.warning("%s", line)
        raise
    finally:
        Path(path).unlink(missing_ok=True)
        for name in changes:
            del env[name]
        env.update(before)


def report_transport(ranks: Ranks, device: torch.device, env: Mapping[str, str]) -> None:
    """Log on rank 0 which transport NCCL uses; an error on all ranks if EFA was asked for and is not used.

    EFA that is there, but was not asked for and is not used, is a warning.
    """
    if ranks.worker.world_size == 1 or device.type != "cuda":
        return
    with ranks.reporting_lost_ranks("connecting NCCL"):
        dist.all_reduce(torch.zeros(1, device=device))  # NCCL connects on first use
        torch.cuda.synchronize(device)
    log = own_log(env)
    if log is None:
        logger.info("NCCL writes its log, with the transport that it uses, where NCCL_DEBUG_FILE says, or here")
    transport = parsed(log or "")
    gathered = ranks.gather([str(transport), transport.is_efa or log is None, _VERBS.is_dir() and has_efa()])
    problem = None
    if gathered is not None:
        for text in dict.fromkeys(text for text, *_ in gathered) if log is not None else ():
            logger.info("%s", text)
        is_efa = [bool(used) for _, used, _ in gathered]
        problem = efa_problem(ranks.hosts, is_efa, env)
        unused = unused_efa(ranks.hosts, is_efa, [bool(there) for *_, there in gathered])
        if unused and not problem:
            logger.warning("%s", unused)
    problem = ranks.broadcast(problem)
    if problem:
        raise TrainingError(
            f"{problem}; {transport}",
            remedy="use an image with the EFA installer and aws-ofi-nccl and request vpc.amazonaws.com/efa devices "
            "(`fi_info -p efa` must list some), or train over TCP: unset FI_PROVIDER, on EKS with launch.efa=false",
        )


def own_log(env: Mapping[str, str]) -> str | None:
    """What NCCL wrote to the file of `recorded_nccl_log`; None without one, and if it wrote nothing."""
    path = Path(env.get(LOG_FILE, ""))
    return (path.read_text(errors="replace") or None) if path.name.startswith(_PREFIX) else None


def efa_problem(hosts: tuple[str, ...], is_efa: list[bool], env: Mapping[str, str]) -> str | None:
    """What is wrong if the job asked for EFA, by FI_PROVIDER, and ranks of several hosts do not use it."""
    if env.get("FI_PROVIDER") != "efa" or len(set(hosts)) == 1 or all(is_efa):
        return None
    without = sorted({host for host, has in zip(hosts, is_efa, strict=True) if not has})
    return f"the job asked for EFA (FI_PROVIDER=efa), but NCCL does not use it on {', '.join(without)}"


def unused_efa(hosts: tuple[str, ...], is_efa: list[bool], has_devices: list[bool]) -> str | None:
    """A warning for ranks of several hosts that have EFA interfaces and do not use them."""
    without = sorted({host for host, used, there in zip(hosts, is_efa, has_devices, strict=True) if there and not used})
    if not without or len(set(hosts)) == 1:
        return None
    return (
        f"{', '.join(without)} has EFA, but NCCL does not use it: training between hosts is slower. Install the EFA "
        "installer's libfabric and aws-ofi-nccl there; with FI_PROVIDER=efa a run without EFA ends with an error"
    )
