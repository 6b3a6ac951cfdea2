"""The files of a run by its handle, wherever it is: `maskfleet ls`, `cp` and `fetch`."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeVar

from maskfleet.errors import ConnectionBrokenError, LaunchError
from maskfleet.launch.files.transfer import AGENT, Entry, Fetched, Stream, Volume
from maskfleet.launch.job import JobHandle
from maskfleet.system.process import piped

T = TypeVar("T")


class RunFiles:
    """What a handle names: a run's folder, or something in it."""

    def __init__(self, volume: Volume, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._volume, self._run = volume, run

    def entries(self) -> list[Entry]:
        """What is there; of a file, the one entry without a name."""
        found: list[Entry] = self._run(self._volume.entries())
        return found

    def fetch(self, folder: Path, told: Callable[[str], None] = lambda text: None) -> Fetched:
        """All of it into `folder`, verified; what an earlier fetch left is continued."""
        done: Fetched = self._run(self._volume.fetch(folder, told))
        return done

    def get(self, target: Path) -> Fetched:
        """The file that the handle names, to `target`."""
        done: Fetched = self._run(self._volume.get(target))
        return done

    def put(self, source: Path) -> int:
        """`source` to where the handle points; how many bytes were sent."""
        sent: int = self._run(self._volume.put(source))
        return sent


@contextlib.contextmanager
def files_at(
    handle: JobHandle, *, writable: bool = False, told: Callable[[str], None] = lambda text: None
) -> Iterator[RunFiles]:
    """The files that `handle`, with or without a path behind the job's name, means."""
    match handle.on:
        case "local":
            yield RunFiles(Volume(_local_agent, {"inside": handle.path}), asyncio.run)
        case "ssh":
            path = handle.path.removeprefix("/") if handle.path.startswith("/~/") else handle.path
            yield RunFiles(Volume(_ssh_agent(handle), {"inside": path}), asyncio.run)
        case "eks":
            from maskfleet.launch.eks.backend import launch_of
            from maskfleet.launch.eks.files import volume_of
            from maskfleet.system.kube.client import Kube

            launch = launch_of(handle)
            release, _, path = handle.path.partition("/")
            with (
                Kube(context=launch.context, namespace=launch.namespace) as kube,
                volume_of(kube, release, path, writable=writable, told=told) as volume,
            ):
                yield RunFiles(volume, kube.run)
        case _:
            raise LaunchError(f"files of {handle.on} jobs are on S3", remedy="copy them with `aws s3 cp`")


class _Pipes:
    """An agent on this machine."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._input, self._output = process.stdin, process.stdout

    async def read(self) -> bytes:
        return await self._output.read(1 << 16)

    async def write(self, data: bytes) -> None:
        self._input.write(data)
        await self._input.drain()


@contextlib.asynccontextmanager
async def _local_agent() -> AsyncIterator[Stream]:
    async with piped([sys.executable, *AGENT]) as process:
        yield _Pipes(process)


class _SshProcess:
    """An agent on a host."""

    def __init__(self, process: Any) -> None:
        self._process = process

    async def read(self) -> bytes:
        data = await self._process.stdout.read(1 << 16)
        assert isinstance(data, bytes)
        return data

    async def write(self, data: bytes) -> None:
        self._process.stdin.write(data)
        await self._process.stdin.drain()


def _ssh_agent(handle: JobHandle) -> Callable[[], AbstractAsyncContextManager[Stream]]:
    """Opens an agent on the first host of the job: all of them see the run's folder."""

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[Stream]:
        import asyncssh

        from maskfleet.launch.ssh.connect import connect
        from maskfleet.system.process import remote_line

        host = handle.place.split(",")[0]
        connection = await connect(host)
        try:
            line = remote_line(["python3", *AGENT])
            async with connection.raw.create_process(line, encoding=None, stderr=asyncssh.DEVNULL) as process:
                yield _SshProcess(process)
                process.terminate()
        except (asyncssh.Error, OSError) as error:
            raise ConnectionBrokenError(f"the connection to {host} broke: {error}", remedy="try again") from error
        finally:
            connection.close()

    return opened
