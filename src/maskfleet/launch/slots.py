"""How many ranks each machine of a launch runs: from what it says, its instance type, or the GPUs that are there."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from maskfleet.config.base import replaced
from maskfleet.config.launch import EksLaunch, LocalLaunch, SageMakerLaunch, SshLaunch
from maskfleet.errors import LaunchError
from maskfleet.launch.instances import INSTANCES, Instance, instance_named
from maskfleet.launch.job import AnyLaunch
from maskfleet.launch.ssh.stack import hosts_of_stack
from maskfleet.launch.supervise.job_files import Host

_ADDRESS = re.compile(r"(?:[A-Za-z0-9_.-]+@)?(?:[A-Za-z0-9_](?:[A-Za-z0-9_.-]*)|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?")


def gpus_here() -> int:
    """GPUs of this machine, as the kernel lists them; no torch is asked."""
    folder = Path("/proc/driver/nvidia/gpus")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def slots_for(
    launch: AnyLaunch,
    *,
    nodes: int | None = None,
    known: Mapping[str, Instance] = INSTANCES,
    count_gpus: Callable[[], int] = gpus_here,
) -> tuple[AnyLaunch, tuple[int, ...]]:
    """(the launch with its hosts settled as `host=slots`, ranks of each machine)."""
    match launch:
        case LocalLaunch():
            if nodes not in (None, 1):
                raise LaunchError(
                    f"--nodes {nodes} does not go with --on local", remedy="use --on ssh for more machines"
                )
            gpus = count_gpus() if launch.gpus is None else launch.gpus
            return launch, (launch.ranks or max(1, gpus),)
        case SshLaunch():
            hosts = hosts_of(launch, known=known)
            if nodes is not None and nodes > len(hosts):
                raise LaunchError(f"--nodes {nodes}, but there are only {len(hosts)} hosts", remedy="name more hosts")
            hosts = hosts[:nodes]
            addresses = tuple(f"{host.address}={host.slots}" for host in hosts)
            settled = {"hosts": addresses, "hosts_file": None, "stack": None, "instance": None}
            return replaced(launch, settled), tuple(host.slots for host in hosts)
        case SageMakerLaunch():
            return launch, (instance_named(launch.instance, known).gpus,) * launch.nodes
        case EksLaunch():
            settled_eks = _with_facts(launch, known)
            assert settled_eks.gpus is not None
            return settled_eks, (settled_eks.ranks or max(1, settled_eks.gpus),) * settled_eks.nodes


def _with_facts(launch: EksLaunch, known: Mapping[str, Instance]) -> EksLaunch:
    """`launch` with the GPUs of its instance type settled, and what the chart cannot know of a type from a file."""
    if launch.gpus is not None and launch.instance not in known:
        return launch
    facts = instance_named(launch.instance, known)
    gpus = facts.gpus if launch.gpus is None else launch.gpus
    if gpus > facts.gpus:
        raise LaunchError(f"{facts.name} has {facts.gpus} GPUs, not {gpus}", remedy="lower gpus or take a larger type")
    if launch.efa and not facts.efa:
        raise LaunchError(f"{facts.name} has no EFA device", remedy="leave launch.efa out, or take a type that has EFA")
    changes: dict[str, object] = {"gpus": gpus}
    if _shape(facts) != _shape(INSTANCES.get(facts.name)):
        # A node keeps some of its CPUs and memory for itself.
        changes["cpus"] = launch.cpus or max(1, facts.vcpus - max(1, facts.vcpus // 12))
        changes["memory_gib"] = launch.memory_gib or max(1, facts.memory_gib * 4 // 5 - 1)
        if launch.efa is not False and "efa_per_node" not in launch.chart_values:
            changes["chart_values"] = {**launch.chart_values, "efa_per_node": facts.efa}
    return replaced(launch, changes)


def _shape(facts: Instance | None) -> tuple[int, ...] | None:
    return (facts.gpus, facts.efa, facts.vcpus, facts.memory_gib) if facts is not None else None


def hosts_of(launch: SshLaunch, *, known: Mapping[str, Instance] = INSTANCES) -> list[Host]:
    """The hosts that `launch` names, from its list, its file or its stack."""
    default = instance_named(launch.instance, known).gpus if launch.instance is not None else 1
    if launch.stack is not None:
        hosts = hosts_of_stack(launch.stack, region=launch.region, known=known, default_slots=default)
    elif launch.hosts_file is not None:
        hosts = read_hosts_file(Path(launch.hosts_file), default)
    else:
        hosts = [parse_host(text, default, where=f"host {text!r}") for text in launch.hosts]
    if not hosts:
        raise LaunchError("no host is named", remedy="give --hosts host1,host2, --hosts-file FILE or --stack NAME")
    names = [host.address for host in hosts]
    twice = next((one for one in names if names.count(one) > 1), None)
    if twice is not None:
        raise LaunchError(f"host {twice} is named twice", remedy="name it once, with slots=N for its ranks")
    if launch.user is not None:
        hosts = [
            Host(one.address if "@" in one.address else f"{launch.user}@{one.address}", one.slots) for one in hosts
        ]
    return hosts


def read_hosts_file(file: Path, default: int) -> list[Host]:
    """Hosts of a file with `host slots=8` a line; `#` begins a comment."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"cannot read the hosts file {file}: {error}", remedy="check the path") from error
    hosts = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if text:
            hosts.append(parse_host(text, default, where=f"{file}:{number}"))
    return hosts


def parse_host(text: str, default: int, *, where: str) -> Host:
    """`host`, `host slots=8` or `host=8`; `user@` and `:port` may be part of it."""
    match = re.fullmatch(r"(\S+?)(?:\s+slots=(\d+)|=(\d+))?", text)
    if match is None or not _ADDRESS.fullmatch(match[1]):
        raise LaunchError(
            f"{where}: {text!r} is not a host",
            remedy="write --hosts one,two=8, or in a file `host slots=8`, one a line",
        )
    slots = int(match[2] or match[3] or default)
    if not 1 <= slots <= 1024:
        raise LaunchError(f"{where}: {match[1]} has {slots} slots", remedy="a host has at least one slot: one a GPU")
    return Host(match[1], slots)
