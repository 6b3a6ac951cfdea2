"""Time and sockets that N ranks need to join, with gloo's full mesh and with connections made when they are used.

    python benchmarks/control_group.py [--ranks 16,64,128] [--out benchmarks/results/control_group.json]

All ranks are processes of this machine, forked after torch is imported, and join as a run does on the CPU, which has
two gloo groups: gradients and control. With many ranks on few cores the time of `agree` is that of the cores.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from machine import machine_facts
from maskfleet.training.distributed import Ranks, Worker, joined

MODES = {"mesh": "0", "lazy": "1"}
CALLS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="16,64,128", help="numbers of ranks, separated by commas")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(options.one)))
        return
    results = [
        {"ranks": int(count), "mode": mode, **measured(int(count), lazy)}
        for count in options.ranks.split(",")
        for mode, lazy in MODES.items()
    ]
    for result in results:
        print(result)
    if options.out is not None:
        options.out.write_text(json.dumps({"machine": machine_facts(), "results": results}, indent=1) + "\n")


def measured(count: int, lazy: str) -> dict[str, Any]:
    """`measure` in a process of its own: gloo reads the environment once."""
    argv = [sys.executable, __file__, "--one", str(count)]
    env = {**os.environ, "TORCH_GLOO_LAZY_INIT": lazy, "OMP_NUM_THREADS": "1"}
    printed = subprocess.run(argv, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return result


def measure(count: int) -> dict[str, Any]:
    """Start `count` ranks -> seconds to join, milliseconds of `agree`, and the sockets of one rank and of all."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    rank = next((rank for rank in range(1, count) if os.fork() == 0), 0)
    worker, started_at = Worker(rank, count, rank, count), time.monotonic()
    with tempfile.TemporaryDirectory() as folder, joined(worker, torch.device("cpu"), env, Path(folder)) as ranks:
        ranks.barrier()
        join_s = time.monotonic() - started_at
        values = _agreed(ranks)
        gathered = ranks.gather([join_s, values, _sockets()])
        ranks.barrier()
    if gathered is None:
        os._exit(0)  # a forked rank: what follows is for the first one
    sockets = [one[2] for one in gathered]
    return {
        "join_s": round(max(one[0] for one in gathered), 2),
        "agree_ms": round(1e3 * max(one[1] for one in gathered), 2),
        "most_sockets_of_a_rank": max(sockets),
        "sockets": sum(sockets),
    }


def _agreed(ranks: Ranks) -> float:
    """Seconds of one `agree` when nothing else happens."""
    ranks.agree([0, 0])
    started_at = time.monotonic()
    for _ in range(CALLS):
        ranks.agree([0, 0])
    return (time.monotonic() - started_at) / CALLS


def _sockets() -> int:
    count = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            count += str(descriptor.readlink()).startswith("socket:")
        except FileNotFoundError:
            continue  # the one that listed the folder
    return count


if __name__ == "__main__":
    main()
