"""Train on three hosts of this machine while faults happen, ask for the status all the time, and write what came out.

    make chaos                                  every fault, once
    python scripts/chaos.py --only read-only    one of them; --seed repeats the choice of hosts and moments

Needs root and Debian's iproute2, openssh-server and openmpi-bin; a C compiler for the clocks, python3-fusepy and
libfuse2 for the slow disk. A fault that cannot be tried here is listed as such.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "chaos.json"
for folder in ("tests/cluster", "tests", "benchmarks"):
    sys.path.insert(0, str(ROOT / folder))

from client import Client  # noqa: E402
from faults import FAULTS  # noqa: E402
from one_fault import HOSTS, IMAGES, outcome_of  # noqa: E402

from cluster import Cluster, why_not  # noqa: E402
from machine import machine_facts  # noqa: E402
from maskfleet.config.base import replaced  # noqa: E402
from maskfleet.config.load import dump  # noqa: E402
from maskfleet.config.recipes import recipe  # noqa: E402
from maskfleet.data.synthetic.dataset import make_shapes  # noqa: E402
from micro_run import MICRO  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=None, help="chooses hosts and moments; default: a new one")
    parser.add_argument("--only", action="append", choices=[fault.name for fault in FAULTS])
    parser.add_argument("--epochs", type=int, default=150, help="length of each run; an epoch has 4 steps")
    parser.add_argument("--keep", type=Path, help="folder for the logs of the runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(f"NOT TESTED: three hosts on this machine: {reason}", file=sys.stderr)
        return 1
    for number in (signal.SIGINT, signal.SIGTERM):  # also in the background of a script, where SIGINT is ignored
        signal.signal(number, lambda *_: sys.exit(1))  # by the way that removes the hosts
    seed = asked.seed if asked.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"seed {seed}", flush=True)
    results: dict[str, Any] = {**machine_facts(("torch",)), "seed": seed, "epochs": asked.epochs, "faults": []}
    chosen = [fault for fault in FAULTS if not asked.only or fault.name in asked.only]
    with hosts() as client:
        for fault in chosen:
            choice = random.Random(f"{seed} {fault.name}")  # noqa: S311 - the same for each fault whichever are chosen
            results["faults"].append(outcome_of(fault, client, choice, asked.epochs, keep=asked.keep))
            asked.out.write_text(json.dumps(results, indent=2) + "\n")
    bad = [one["name"] for one in results["faults"] if not one.get("passed", True)]
    print(f"wrote {asked.out}; failed: {', '.join(bad) or 'none'}", flush=True)
    return 1 if bad else 0


@contextmanager
def hosts() -> Iterator[Client]:
    """Three hosts whose files are on a disk of their own, which can be filled."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name) / "disk"
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", str(folder)], check=True)
        cluster = Cluster(folder, HOSTS, name="mc", network="10.78.0")
        try:
            cluster.up()
            data = cluster.shared / "set"
            make_shapes(
                data,
                num_train=IMAGES,
                num_val=5,
                height=(64, 64),
                width=(64, 64),
                num_categories=2,
                max_objects=3,
                seed=3,
            )
            run_file = folder / "micro.yaml"
            changes = {**MICRO, "data.root": str(data), "train.images_per_gpu": 1}
            run_file.write_text(dump(replaced(recipe("demo"), changes)))
            yield Client(cluster, run_file)
        finally:
            cluster.down()
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


if __name__ == "__main__":
    raise SystemExit(main())
