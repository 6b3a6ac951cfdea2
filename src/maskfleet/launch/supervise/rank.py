"""One rank under mpirun: sets the network interface, starts the trainer, and lets it save before it exits."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

from maskfleet.launch.address import bare_address
from maskfleet.launch.supervise.commands import STOPPED, environment, local_address, train_command
from maskfleet.launch.supervise.job_files import Job, JobFolder
from maskfleet.system.process import shell_code, start

STOPS = (signal.SIGTERM, signal.SIGINT)


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


def main() -> int:
    run_dir = Path(sys.argv[1])
    folder = JobFolder(run_dir)
    job = folder.job()
    index = own_index(job)
    # In the session of mpirun, which ends all processes of its session.
    trainer = start(
        [sys.executable, *train_command(run_dir)],
        env=environment(job, run_dir, index, os.environ),
        output="inherit",
        lifetime="session",
    )

    def forward(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second signal would keep the trainer from saving
        trainer.send_signal(number)

    for number in STOPS:
        signal.signal(number, forward)
    code = trainer.wait()
    assert code is not None, "without a time limit it waits for the end"
    if code in [128 + number for number in STOPS]:
        # With any other exit code mpirun would kill the ranks that are still saving.
        folder.host(index).mkdir(parents=True, exist_ok=True)
        (folder.host(index) / STOPPED).touch()
        return 0
    return shell_code(code)


if __name__ == "__main__":
    raise SystemExit(main())
