"""Ranks that a test starts one by one, without a launcher that would clean up after them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from processes import ENV, LONG_S

from ports import free_port


def rank_env(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The environment of one rank of this machine."""
    own = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**ENV, **{name: str(value) for name, value in own.items()}, **meeting}


def start_ranks(
    argvs: Sequence[Sequence[str]], *, world_size: int | None = None, env: Mapping[str, str] | None = None
) -> list[subprocess.Popen[str]]:
    """A process of this Python for each rank, with the arguments of that rank."""
    port, world_size = free_port(), world_size or len(argvs)
    return [
        subprocess.Popen(
            [sys.executable, *argv],
            env={**rank_env(rank, world_size, port), **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank, argv in enumerate(argvs)
    ]


def outputs(ranks: Sequence[subprocess.Popen[str]]) -> list[str]:
    """What each rank printed until it ended; the rest is killed when one takes too long."""
    try:
        return [process.communicate(timeout=LONG_S)[0] for process in ranks]
    finally:
        kill(ranks)


def kill(ranks: Sequence[subprocess.Popen[str]]) -> None:
    for process in ranks:
        process.kill()
        process.communicate()


def train_argv(run_dir: Path, *options: str) -> list[str]:
    return ["-m", "maskfleet", "train", str(run_dir), *options]
