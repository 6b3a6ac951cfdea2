"""Run as a script: train in a run directory with several ranks on the CPU, as `train --gpus` does on GPUs.

Arguments: how many ranks, where they meet, and the arguments of the Python that each of them runs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from maskfleet.launch.supervise.child import run_ranks

if __name__ == "__main__":
    raise SystemExit(
        run_ranks([sys.executable, *sys.argv[3:]], int(sys.argv[1]), env=os.environ, folder=Path(sys.argv[2]))
    )
