"""What is left in a process after its ranks have parted."""

from __future__ import annotations

import textwrap
from pathlib import Path

from by_hand import outputs, start_ranks

RANK = """
import os, sys
from pathlib import Path
import torch
from maskfleet.training.distributed import joined, worker_from_env

def threads():
    names = [Path(f"/proc/self/task/{task}/comm").read_text() for task in os.listdir("/proc/self/task")]
    return sorted(name.strip() for name in names if "gloo" in name)

with joined(worker_from_env(os.environ), torch.device("cpu"), os.environ, Path(sys.argv[1])) as ranks:
    torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)  # imports much of torch, as every run does here
    ranks.barrier()
    print("inside", len(threads()) > 0)
print("after", threads())
"""


def test_threads_of_a_group_end_with_it(tmp_path: Path) -> None:
    """One that still frees a tensor while Python exits would abort the process: rank and run were done, but failed."""
    for text in outputs(start_ranks([["-c", textwrap.dedent(RANK), str(tmp_path)]] * 2)):
        assert text.splitlines() == ["inside True", "after []"]
