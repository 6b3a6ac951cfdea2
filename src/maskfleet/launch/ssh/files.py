"""The files of a run on hosts: the first host reads them, since all hosts share the run directory."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Sequence

import asyncssh

from maskfleet.config.launch import SshLaunch
from maskfleet.errors import ConnectionBrokenError, LaunchError
from maskfleet.launch.address import address_parts
from maskfleet.launch.files.transfer import AGENT, Pipes, RunFiles, Stream, Volume
from maskfleet.launch.job import JobHandle
from maskfleet.launch.ssh.connect import connect
from maskfleet.launch.ssh.route import Routes
from maskfleet.launch.supervise.job_files import Host
from maskfleet.system.process import remote_line

STACK = "stack="  # begins the location in the handle of a job on a stack: stack=NAME@REGION
_STACK_NAME = re.compile(r"[A-Za-z][-A-Za-z0-9]{0,127}")
_REGION = re.compile(r"[a-z][a-z0-9-]{2,30}")


def run_files(handle: JobHandle, host: str, routes: Routes) -> RunFiles:
    """What `handle` refers to, read by an agent process on `host`."""
    return RunFiles(Volume(lambda: _agent_on(host, routes), {"inside": remote_path(handle)}), asyncio.run)


def launch_of(handle: JobHandle) -> SshLaunch:
    """The launch section with the hosts of the job: those that the handle names, or those of its stack now."""
    if not handle.location.startswith(STACK):
        return SshLaunch(hosts=_hosts_in(handle))
    name, _, region = handle.location.removeprefix(STACK).partition("@")
    if not _STACK_NAME.fullmatch(name) or not _REGION.fullmatch(region):
        raise LaunchError(
            f"the handle {handle} does not name a stack and its region",
            remedy="use the handle as `maskfleet launch` printed it, such as ssh://stack=fleet@us-west-2/efs/runs/r50",
        )
    return SshLaunch(stack=name, region=region, stack_wait_s=0, min_nodes=1)


def location_of(launch: SshLaunch, hosts: Sequence[Host]) -> str:
    """How a handle names the hosts: the stack, whose instances may be replaced, or else each of them."""
    if launch.stack is not None and launch.region is not None:
        return f"{STACK}{launch.stack}@{launch.region}"
    return ",".join(host.address for host in hosts)


def _hosts_in(handle: JobHandle) -> tuple[str, ...]:
    """The addresses of the job's hosts; LaunchError if one of them is not an address."""
    hosts = tuple(handle.location.split(","))
    for host in hosts:
        try:
            address_parts(host)
        except LaunchError as error:
            raise LaunchError(
                f"the handle {handle} names {host!r}, which is not the address of a host",
                remedy="use the handle as `maskfleet launch` printed it, such as ssh://me@host1:22,host2/fleet/runs/r50",
            ) from error
    return hosts


def remote_path(handle: JobHandle) -> str:
    """The path on the hosts; `/~/` in a handle stands for the home folder."""
    return handle.path.removeprefix("/") if handle.path.startswith("/~/") else handle.path


@contextlib.asynccontextmanager
async def _agent_on(host: str, routes: Routes) -> AsyncIterator[Stream]:
    connection = await connect(host, routes=routes)
    try:
        line = remote_line(["python3", *AGENT])
        async with connection.raw.create_process(line, encoding=None, stderr=asyncssh.DEVNULL) as process:
            yield Pipes(process.stdin, process.stdout)
            process.terminate()
    except (asyncssh.Error, OSError) as error:
        raise ConnectionBrokenError(f"the connection to {host} broke: {error}", remedy="try again") from error
    finally:
        connection.close()
