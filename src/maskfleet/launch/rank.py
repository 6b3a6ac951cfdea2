"""One rank under mpirun: marks itself as its host's, finds its network interface, and becomes the trainer.

mpirun hands every host the same environment, but mark and interface differ between hosts.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from maskfleet.launch.jobdir import Job, JobFolder
from maskfleet.launch.starters import bare_address, environment, local_address, train_command


def own_index(job: Job) -> int:
    """Which host of the job this is."""
    for index, host in enumerate(job.hosts):
        if len(job.hosts) == 1 or local_address(job, index) == _resolved(bare_address(host.address)):
            return index
    return 0


def _resolved(name: str) -> str:
    try:
        return str(socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0][4][0])
    except OSError:
        return name


def main() -> None:
    run_dir = Path(sys.argv[1])
    job = JobFolder(run_dir).job()
    env = environment(job, run_dir, own_index(job), os.environ)
    os.execve(sys.executable, [sys.executable, *train_command(run_dir)], env)


if __name__ == "__main__":
    main()
