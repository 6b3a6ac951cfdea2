"""The hosts of an SSH launch: from its list, a hosts file or a CloudFormation stack."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from maskfleet.config.base import replaced
from maskfleet.config.launch import SshLaunch
from maskfleet.errors import LaunchError
from maskfleet.launch.address import FORMS, address_parts
from maskfleet.launch.instances import INSTANCES, Instance, instance_named
from maskfleet.launch.ssh.route import DIRECT, Routes
from maskfleet.launch.ssh.stack import StackHosts, hosts_of_stack, wait_for_hosts
from maskfleet.launch.supervise.job_files import Host

# Fields of the launch section that outputs of our template set, unless the launch section does.
_FROM_OUTPUTS = {"user": "LoginUser", "run_root": "RunRoot", "python": "Python"}
HOSTS_COMMAND = "/usr/local/bin/cluster-hosts"  # on the nodes of our template
logger = logging.getLogger("maskfleet")


@dataclass(frozen=True, slots=True)
class Cluster:
    """The hosts of a launch, how they are reached, and the launch section with what their stack says."""

    hosts: list[Host]
    launch: SshLaunch
    routes: Routes = DIRECT


def cluster_of(launch: SshLaunch, *, known: Mapping[str, Instance] = INSTANCES, nodes: int | None = None) -> Cluster:
    """The hosts that `launch` names, from its list, its file or its stack.

    For a stack it waits until enough of them are healthy: `nodes`, else `min_nodes`, else all.
    """
    default = instance_named(launch.instance, known).gpus if launch.instance is not None else 1
    routes = DIRECT
    if launch.stack is not None:
        found = _of_stack(launch, launch.stack, known, default, nodes or launch.min_nodes)
        hosts, routes, launch = found.hosts, found.routes, _with_outputs(launch, found)
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
    for host in hosts:
        address_parts(host.address)  # names from a stack and `user` are checked here too
    return Cluster(hosts, launch, routes)


def _of_stack(
    launch: SshLaunch, stack: str, known: Mapping[str, Instance], default: int, enough: int | None
) -> StackHosts:
    def look() -> StackHosts:
        return hosts_of_stack(stack, region=launch.region, known=known, default_slots=default, enough=enough)

    return wait_for_hosts(look, limit_s=launch.stack_wait_s, say=logger.warning)


def _with_outputs(launch: SshLaunch, found: StackHosts) -> SshLaunch:
    """`launch` with what our template says about its nodes; a field that was changed stays as it is."""
    defaults, outputs = SshLaunch(), found.outputs
    changes = {"region": found.region} | {
        field: outputs[output]
        for field, output in _FROM_OUTPUTS.items()
        if output in outputs and getattr(launch, field) == getattr(defaults, field)
    }
    if "WorkerGroup" in outputs and launch.hosts_command is None:
        changes["hosts_command"] = HOSTS_COMMAND
    return replaced(launch, changes)


def read_hosts_file(file: Path, default: int) -> list[Host]:
    """Hosts of a file with one `host slots=8` per line; `#` begins a comment."""
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
    match = re.fullmatch(r"(\S+?)(?:\s+slots=([0-9]{1,9})|=([0-9]{1,9}))?", text)
    if match is None:
        raise LaunchError(
            f"{where}: {text!r} is not a host",
            remedy="write --hosts one,two=8, or in a file `host slots=8`, one per line",
        )
    try:
        address_parts(match[1])
    except LaunchError as error:
        raise LaunchError(f"{where}: {error.what}", remedy=FORMS) from error
    slots = int(match[2] or match[3] or default)
    if not 1 <= slots <= 1024:
        raise LaunchError(
            f"{where}: {match[1]} has {slots} slots", remedy="a host has at least one slot, usually one per GPU"
        )
    return Host(match[1], slots)
