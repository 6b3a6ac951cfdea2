"""The files of a run on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from maskfleet.launch.files.transfer import AGENT, RunFiles, Stream, Volume
from maskfleet.launch.job import JobHandle
from maskfleet.system.process import piped


def run_files(handle: JobHandle) -> RunFiles:
    """What `handle` refers to, read by an agent process on this machine."""
    return RunFiles(Volume(local_agent, {"inside": handle.path}), asyncio.run, folder=Path(handle.path))


@contextlib.asynccontextmanager
async def local_agent() -> AsyncIterator[Stream]:
    """Start an agent here."""
    async with piped([sys.executable, *AGENT]) as process:
        yield _Pipes(process)


class _Pipes:
    """Standard input and output of an agent on this machine."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._input, self._output = process.stdin, process.stdout

    async def read(self) -> bytes:
        return await self._output.read(1 << 16)

    async def write(self, data: bytes) -> None:
        self._input.write(data)
        await self._input.drain()
