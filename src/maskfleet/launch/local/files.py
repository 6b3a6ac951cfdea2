"""The files of a run on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from maskfleet.launch.files.transfer import AGENT, Pipes, RunFiles, Stream, Volume
from maskfleet.launch.job import JobHandle
from maskfleet.system.process import piped


def run_files(handle: JobHandle) -> RunFiles:
    """What `handle` refers to, read by an agent process on this machine."""
    return RunFiles(Volume(local_agent, {"inside": handle.path}), asyncio.run, folder=Path(handle.path))


@contextlib.asynccontextmanager
async def local_agent() -> AsyncIterator[Stream]:
    """Start an agent here."""
    async with piped([sys.executable, *AGENT]) as process:
        yield Pipes(process.stdin, process.stdout)
