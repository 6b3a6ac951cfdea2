"""The files of a run on hosts: the first host reads them, since all hosts share the run directory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import asyncssh

from maskfleet.errors import ConnectionBrokenError
from maskfleet.launch.files.transfer import AGENT, Pipes, RunFiles, Stream, Volume
from maskfleet.launch.job import JobHandle
from maskfleet.launch.ssh.connect import connect
from maskfleet.system.process import remote_line


def run_files(handle: JobHandle) -> RunFiles:
    """What `handle` refers to, read by an agent process on the job's first host."""
    host = handle.location.split(",")[0]
    return RunFiles(Volume(lambda: _agent_on(host), {"inside": remote_path(handle)}), asyncio.run)


def remote_path(handle: JobHandle) -> str:
    """The path on the hosts; `/~/` in a handle stands for the home folder."""
    return handle.path.removeprefix("/") if handle.path.startswith("/~/") else handle.path


@contextlib.asynccontextmanager
async def _agent_on(host: str) -> AsyncIterator[Stream]:
    connection = await connect(host)
    try:
        line = remote_line(["python3", *AGENT])
        async with connection.raw.create_process(line, encoding=None, stderr=asyncssh.DEVNULL) as process:
            yield Pipes(process.stdin, process.stdout)
            process.terminate()
    except (asyncssh.Error, OSError) as error:
        raise ConnectionBrokenError(f"the connection to {host} broke: {error}", remedy="try again") from error
    finally:
        connection.close()
