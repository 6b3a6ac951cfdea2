"""The default run: `maskfleet train RUN_DIR --data DATA`, as the README has it, on a data set of one's own.

    python benchmarks/default_run.py --data DATA [--extra train.log_every_steps=1] [--out FILE]

Reports the time to the first step, images per second at full speed, the wall time of the whole command, AP, and memory.
metrics.jsonl has a line every 20 steps, so the first step ended between `to_start_of_first_step_s` and
`to_first_line_s`; with `train.log_every_steps=1` the latter is its end. `--small` uses a tiny model, to try the script
on a CPU. The result is written every ten seconds; after `--timeout-s` the run is stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import machine_facts
from maskfleet.config.load import resolve
from maskfleet.data.store.dataset import open_stores, with_found_splits
from running import SMALL, StartedRun, as_sets
from watching import Watch, watched, write

HERE = Path(__file__).parent


def images_of(data: Path) -> dict[str, int]:
    """How many images the default recipe trains on and validates with."""
    config = with_found_splits(resolve(sets=[f"data.root={data}"]).config).data
    sets = {"train": config.train, "val": config.val}
    return {name: sum(len(store) for store in open_stores(config, splits)) for name, splits in sets.items()}


def measured(run_dir: Path, options: argparse.Namespace, record: dict[str, Any]) -> None:
    """Run the command to its end; `record` is filled in and written on the way."""
    sets = [*as_sets(SMALL if options.small else {}), *(part for extra in options.extra for part in ("--set", extra))]
    command = ["train", str(run_dir), "--data", str(options.data), *sets]
    record["command"] = " ".join(["maskfleet", *command]).replace(str(run_dir), "RUN_DIR")
    record["command"] = record["command"].replace(str(options.data), "DATA")

    def flush(watch: Watch) -> None:
        record["run"] = watch.summary(val_images=record.get("images", {}).get("val", 0))
        write(record, options.out)

    with StartedRun([sys.executable, "-m", "maskfleet", *command], run_dir) as run:
        try:
            watch = watched(run, timeout_s=options.timeout_s, flush=flush)
        finally:
            if options.keep is not None:
                run.keep(options.keep)
    record["images"] = images_of(options.data)  # not before: the run is to open the data set for the first time
    flush(watch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a data set in COCO's format")
    parser.add_argument("--extra", metavar="FIELD=VALUE", action="append", default=[])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary folder")
    parser.add_argument("--keep", type=Path, help="a folder for metrics.jsonl and the output of the run")
    parser.add_argument("--timeout-s", type=float, default=300)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "default_run.json")
    options = parser.parse_args()
    record: dict[str, Any] = {"what": "the default run", **machine_facts()}
    with tempfile.TemporaryDirectory(prefix="maskfleet-default-", dir=options.folder) as folder:
        measured(Path(folder) / "run", options, record)
    print(json.dumps(record["run"], indent=2))


if __name__ == "__main__":
    main()
