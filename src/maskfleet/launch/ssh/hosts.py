"""The hosts of an SSH launch: from its list, a hosts file or a CloudFormation stack."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from maskfleet.config.launch import SshLaunch
from maskfleet.errors import LaunchError
from maskfleet.launch.instances import INSTANCES, Instance, instance_named
from maskfleet.launch.ssh.stack import hosts_of_stack
from maskfleet.launch.supervise.job_files import Host

_ADDRESS = re.compile(r"(?:[A-Za-z0-9_.-]+@)?(?:[A-Za-z0-9_](?:[A-Za-z0-9_.-]*)|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?")


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
    match = re.fullmatch(r"(\S+?)(?:\s+slots=(\d+)|=(\d+))?", text)
    if match is None or not _ADDRESS.fullmatch(match[1]):
        raise LaunchError(
            f"{where}: {text!r} is not a host",
            remedy="write --hosts one,two=8, or in a file `host slots=8`, one per line",
        )
    slots = int(match[2] or match[3] or default)
    if not 1 <= slots <= 1024:
        raise LaunchError(
            f"{where}: {match[1]} has {slots} slots", remedy="a host has at least one slot, usually one per GPU"
        )
    return Host(match[1], slots)
