"""Run as a script: the supervisor of a run directory, whose ranks are those of rerun_train.py."""

from __future__ import annotations

import sys
from pathlib import Path

from maskfleet.launch.supervise import commands
from maskfleet.launch.supervise.supervisor import supervise

if __name__ == "__main__":
    commands.train_command = lambda run_dir: [str(Path(__file__).with_name("rerun_train.py")), "train", str(run_dir)]
    raise SystemExit(supervise(Path(sys.argv[1]), 0))
