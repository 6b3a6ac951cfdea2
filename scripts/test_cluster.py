"""Run tests/cluster on three hosts in network namespaces of this machine, with a time limit, and clean up.

Needs root and Debian's iproute2, openssh-server and openmpi-bin. Without them it prints that and fails, or
succeeds with --may-skip.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 2400
sys.path.insert(0, str(ROOT / "tests" / "cluster"))

from cluster import Cluster, why_not  # noqa: E402


def main() -> int:
    arguments = [argument for argument in sys.argv[1:] if argument != "--may-skip"]
    reason = why_not()
    if reason is not None:
        print(f"NOT TESTED: three hosts on this machine: {reason}", file=sys.stderr)
        print("  → run as root after: apt-get install iproute2 openssh-server openmpi-bin", file=sys.stderr)
        return 0 if "--may-skip" in sys.argv else 1
    env = {**os.environ, "MASKFLEET_TEST_CLUSTER": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "tests/cluster", "-n0", "-v", *arguments]
    tests = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True)
    try:
        return tests.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        print(f"the tests did not finish within {LIMIT_S} s", file=sys.stderr)
        return 1
    finally:
        if tests.poll() is None:
            os.killpg(tests.pid, signal.SIGKILL)
            tests.wait()
        Cluster(Path(os.devnull)).down()
        Cluster(Path(os.devnull), 4, name="mfe").down()  # of test_elastic.py


if __name__ == "__main__":
    raise SystemExit(main())
