"""Run tests/k8s against the cluster that KUBECONFIG names, with a time limit.

Needs kubectl, helm and the rights of a cluster administrator, but no node. Without a cluster it prints that and fails,
or succeeds with --may-skip.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 2400
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "k8s")]

from kube import why_no_cluster  # noqa: E402


def main() -> int:
    arguments = [argument for argument in sys.argv[1:] if argument != "--may-skip"]
    reason = why_no_cluster()
    if reason is not None:
        print(f"NOT TESTED: charts and commands on a cluster: {reason}", file=sys.stderr)
        print(
            "  → export KUBECONFIG=FILE of a test cluster; see docs/run-anywhere/eks/testing.md",
            file=sys.stderr,
        )
        return 0 if "--may-skip" in sys.argv else 1
    command = [sys.executable, "-m", "pytest", "tests/k8s", "-n0", "-v", *arguments]
    tests = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        return tests.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        print(f"the tests did not finish within {LIMIT_S} s", file=sys.stderr)
        # An interrupt lets the fixtures remove their namespaces.
        tests.send_signal(signal.SIGINT)
        return 1
    finally:
        if tests.poll() is None:
            tests.wait(240)


if __name__ == "__main__":
    raise SystemExit(main())
