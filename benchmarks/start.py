"""How long does a run take to its first step, and to full speed? With an empty cache, a full one, and a file of code.

    python benchmarks/start.py [--recipe r50_fpn_1x] [--batch 16] [--compile background] [--out FILE]

Starts `maskfleet train` as a user does, on generated pictures of COCO's usual size, three times: `cold` has an empty
cache, `warm` the cache of the first, `artifacts` an empty cache and the file that `maskfleet cache save` made of the
first run. A run is stopped once it has done some steps at full speed. Times are from the start of the process;
`switch_s` is the pause between the last eager and the first compiled step. `--small` uses a model of a few thousand
weights, to try the script on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import machine_facts
from maskfleet.config.base import replaced
from maskfleet.config.load import write_run_file
from maskfleet.config.recipes import recipe
from maskfleet.config.run import RunConfig
from maskfleet.data.synthetic.dataset import make_shapes
from maskfleet.training.background.artifacts import FILE_NAME
from random_weights import save_random_weights
from running import SMALL, SWITCHED, StartedRun, is_settled

NUM_IMAGES, NUM_CATEGORIES = 320, 6
WEIGHTS = "random.safetensors"
POLL_S = 0.05
CASES = ("cold", "warm", "artifacts")


@dataclass(frozen=True)
class Options:
    """What is measured."""

    recipe: str
    batch: int
    compile: str
    small: bool
    program: list[str]
    steps: int  # at full speed
    timeout_s: float


def configured(root: Path, options: Options) -> RunConfig:
    """A run that is far too long to end, so that compiling pays."""
    return replaced(
        recipe(options.recipe),
        {
            "data.root": str(root),
            "data.train": ("train",),
            "data.val": (),
            "model.num_categories": NUM_CATEGORIES,
            "model.backbone.weights": None,
            "train.weights": str(root / WEIGHTS),
            "train.base_lr": 1e-6,  # the weights are random
            "train.images_per_gpu": options.batch,
            "train.compile": True if options.compile == "first" else "auto",
            "train.steps": 1_000_000,
            "train.log_every_steps": 1,
            "eval.every_epochs": 0,
            **(SMALL if options.small else {}),
        },
    )


def measured(run_dir: Path, cache: Path, options: Options) -> dict[str, Any]:
    """Start a run in `run_dir` with the compiler's `cache`, and stop it at full speed."""
    first_s = full_s = None
    with StartedRun([sys.executable, *options.program, "train", str(run_dir)], run_dir, _with_cache(cache)) as run:
        while run.is_running and run.seconds < options.timeout_s:
            time.sleep(POLL_S)
            records, now_s = run.num_lines, run.seconds
            if records and first_s is None:
                first_s = now_s
            if full_s is None and first_s is not None and (options.compile == "first" or is_settled(run.output)):
                full_s, at_full = now_s, records
            if full_s is not None and records >= at_full + options.steps:
                break
    return _result(run, first_s, full_s, options.steps)


def save_artifacts(run_dir: Path, file: Path, cache: Path, options: Options) -> None:
    """The compiled code of the run in `run_dir` as a file, by the command that users have."""
    argv = [sys.executable, *options.program, "cache", "save", str(run_dir), str(file)]
    subprocess.run(argv, env=_with_cache(cache), check=True)


def _with_cache(cache: Path) -> dict[str, str]:
    return {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}


def _result(run: StartedRun, first_s: float | None, full_s: float | None, steps: int) -> dict[str, Any]:
    speeds = [line["images_per_s"] for line in run.lines()]
    switched = SWITCHED.search(run.output)
    result: dict[str, Any] = {
        "to_first_step_s": None if first_s is None else round(first_s, 1),
        "to_full_speed_s": None if full_s is None else round(full_s, 1),
        "compiled": switched is not None,
        "loaded_file": "loaded compiled code" in run.output,
        "switch_s": int(switched[1]) if switched else None,
        "eager_images_per_s": round(statistics.median(speeds[2:8]), 1) if len(speeds) > 8 else None,
        "images_per_s": round(statistics.median(speeds[-(steps // 2 + 1) :]), 1) if speeds else None,
    }
    if full_s is None:
        result["end_of_output"] = run.output.strip().splitlines()[-3:]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="r50_fpn_1x")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--compile", choices=("first", "background"), default="background")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--program", default="-m maskfleet", help="what Python runs instead of maskfleet")
    parser.add_argument("--steps", type=int, default=60, help="at full speed")
    parser.add_argument("--timeout-s", type=float, default=400)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/start.json"))
    given = parser.parse_args()
    options = Options(
        given.recipe, given.batch, given.compile, given.small, given.program.split(), given.steps, given.timeout_s
    )
    size = (64, 64) if options.small else (480, 480)
    cases: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_shapes(folder / "set", num_train=NUM_IMAGES, num_val=1, height=size, width=(size[0], size[0] * 4 // 3))
        config = configured(folder / "set", options)
        save_random_weights(folder / "set" / WEIGHTS, config.model)
        for case in given.cases:
            run_dir = folder / case
            write_run_file(run_dir, config)
            if case == "artifacts":
                save_artifacts(folder / "cold", run_dir / FILE_NAME, folder / "cache", options)
            cache = folder / ("cache-artifacts" if case == "artifacts" else "cache")
            cases[case] = measured(run_dir, cache, options)
            print(case, json.dumps(cases[case]), flush=True)
    what = f"{options.recipe}, {options.batch} images per step{', small' if options.small else ''}"
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps({"what": what, "cases": cases, **machine_facts()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
