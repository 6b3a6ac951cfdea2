"""A rehearsal of COCO: one epoch of `maskfleet train --recipe r50_fpn_1x` on 30,000 generated images, and a validation.

    python benchmarks/rehearsal.py [--images 30000] [--val-images 5000] [--distinct 1500] [--batch 16]
        [--step-images-per-s 282] [--extra train.compile=true] [--small] [--out benchmarks/results/rehearsal.json]

The data set is that of `coco_like.py`. The command runs as a user types it, from random weights in a file with a tiny
learning rate. In the validation every image has up to 100 detections, because the score threshold is 0, and their masks
fill their boxes. Figures come from metrics.jsonl.

`whole_run` has images per second without the start of the process: from the first step, and from full speed where steps
are eager at first. `training` leaves the validation out, `with_validation` has it after the images of this run, and
`in_real_epochs` after the 117,266 of COCO. Each has its share of the step's own speed in this run, and of
`--step-images-per-s`, measured by `step.py`. The step without waiting is too fast where the GPU computed while the host
waited for data, which makes this share too low. On a machine with other work the shares mean little.

The result is written every ten seconds. After `--timeout-s`, the generation of images included, the run is stopped, and
so it is `--max-end-s` after the validation, while it writes its report; the result then has what was seen.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import machine_facts
from running import SMALL, StartedRun, as_sets
from watching import Watch, watched, write

HERE = Path(__file__).parent
RECIPE = "r50_fpn_1x"
COCO_IMAGES = 117_266  # of train2017 with annotations


def made_data(root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Generate the data set in a process that imports little, because each of its workers imports the same."""
    counts = {"--images": options.images, "--val-images": options.val_images, "--distinct": options.distinct}
    argv = [sys.executable, str(HERE / "coco_like.py"), str(root)]
    argv += [str(part) for pair in counts.items() for part in pair]
    facts: dict[str, Any] = json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return facts


def fields_of(weights: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What differs from the recipe."""
    return {
        "model.num_categories": 80,
        "model.backbone.weights": None,
        "model.inference.score_threshold": 0.0,
        "train.weights": str(weights),
        "train.base_lr": 1e-6,  # the weights are random
        "train.images_per_gpu": options.batch,
        "train.epochs": 1,
        "checkpoint.every_minutes": options.checkpoint_minutes,
        **(SMALL if options.small else {}),
    }


def save_weights_for(sets: list[str], path: Path) -> None:
    """Random weights for the model of the run; torch is imported here, while nothing else needs the machine."""
    from maskfleet.config.load import resolve
    from random_weights import save_random_weights

    save_random_weights(path, resolve(recipe_name=RECIPE, sets=sets).config.model)


def rehearsed(folder: Path, options: argparse.Namespace, record: dict[str, Any]) -> None:
    """Generate, train and validate; `record` is filled in and written on the way."""
    begun_at = time.monotonic()
    record["data"] = made_data(folder / "coco", options)
    print("data", json.dumps(record["data"]), flush=True)
    sets = as_sets(fields_of(folder / "random.safetensors", options))
    sets += [part for extra in options.extra for part in ("--set", extra)]
    save_weights_for(sets[1::2], folder / "random.safetensors")
    record["prepared_s"] = round(time.monotonic() - begun_at, 1)
    command = ["train", str(folder / "run"), "--recipe", RECIPE, "--data", str(folder / "coco"), *sets]
    record["command"] = " ".join(["maskfleet", *command]).replace(str(folder), "FOLDER")

    def flush(watch: Watch) -> None:
        record["run"] = watch.summary(
            val_images=options.val_images,
            epoch_images=COCO_IMAGES,
            benchmark_images_per_s=options.step_images_per_s,
        )
        write(record, options.out)

    with StartedRun([sys.executable, "-m", "maskfleet", *command], folder / "run") as run:
        try:
            watched(run, timeout_s=options.timeout_s - record["prepared_s"], flush=flush, max_end_s=options.max_end_s)
        finally:
            if options.keep is not None:
                run.keep(options.keep)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=30_000)
    parser.add_argument("--val-images", type=int, default=5_000)
    parser.add_argument("--distinct", type=int, default=1_500, help="images to draw; the others are hard links to them")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--checkpoint-minutes", type=float, default=0.75)
    parser.add_argument("--step-images-per-s", type=float, help="of the step alone, to compare with")
    parser.add_argument("--extra", metavar="FIELD=VALUE", action="append", default=[])
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script on a CPU")
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary folder")
    parser.add_argument("--keep", type=Path, help="a folder for metrics.jsonl and the output of the run")
    parser.add_argument("--timeout-s", type=float, default=400)
    parser.add_argument("--max-end-s", type=float, default=60, help="for the report after the validation")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "rehearsal.json")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    record: dict[str, Any] = {
        "what": "rehearsal of COCO: one epoch and one validation by the command",
        **machine_facts(),
    }
    with tempfile.TemporaryDirectory(prefix="maskfleet-rehearsal-", dir=options.folder) as folder:
        rehearsed(Path(folder), options, record)
    print(json.dumps(record["run"], indent=2))


if __name__ == "__main__":
    main()
