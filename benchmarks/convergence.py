"""Does the compiled bf16 step reach the same AP as the eager fp32 step? Both train the shapes set several times each.

    python benchmarks/convergence.py --way compiled --seed 0 --out DIR     one run: writes DIR/compiled-0.json
    python benchmarks/convergence.py --collect DIR --out benchmarks/results/convergence.json

The recipe is the demo's small model at a larger size, trained until its AP no longer improves.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import machine_facts
from maskfleet.config.base import replaced
from maskfleet.config.recipes import recipe
from maskfleet.config.run import RunConfig
from maskfleet.data.synthetic.dataset import make_shapes
from maskfleet.training.output.metrics import read_metrics
from maskfleet.training.run import train

WAYS: dict[str, dict[str, Any]] = {
    "compiled": {"train.compile": True, "train.precision": "bf16"},
    "eager": {"train.compile": False, "train.precision": "fp32"},
}
NAMES = {"box_ap": "mAP(bbox)/IoU=0.5:0.95", "mask_ap": "mAP(segm)/IoU=0.5:0.95"}


def configured(root: Path, way: str, seed: int, epochs: int) -> RunConfig:
    return replaced(
        recipe("demo"),
        {
            "data.root": str(root),
            "data.train_short_edge_px": (192, 192),
            "data.test_short_edge_px": 192,
            "model.max_size_px": 256,
            "model.rpn.anchor_sizes": (16, 32, 64, 112, 176),
            "train.images_per_gpu": 8,
            "train.base_lr": 0.02,
            "train.seed": seed,
            "train.log_every_steps": 25,
            "train.epoch_schedule": ((0.6 * epochs, 0.1), (0.85 * epochs, 0.01), (epochs, None)),
            "eval.every_epochs": max(1, epochs // 4),
            "eval.images_per_gpu": 8,
            "checkpoint.every_epochs": 0,
            **WAYS[way],
        },
    )


def one_run(way: str, seed: int, epochs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        root, run_dir = Path(folder) / "shapes", Path(folder) / "run"
        make_shapes(root, num_train=600, num_val=200, height=(192, 224), width=(240, 288), workers=4)
        started_at = time.monotonic()
        train(configured(root, way, seed, epochs), run_dir)
        records = read_metrics(run_dir)
    evaluations = [record for record in records if NAMES["box_ap"] in record]
    curve = [{"epoch": one["epoch"]} | {key: round(one[name], 4) for key, name in NAMES.items()} for one in evaluations]
    losses = [record["total_cost"] for record in records if "total_cost" in record]
    return {
        "way": way,
        "seed": seed,
        "epochs": epochs,
        "curve": curve,
        "last_loss": losses[-1] if losses else None,
        "seconds": round(time.monotonic() - started_at, 1),
        **machine_facts(),
    }


def collected(folder: Path) -> dict[str, Any]:
    """Mean and standard deviation over the runs of each variant, and the difference in standard errors."""
    runs = [json.loads(file.read_text()) for file in sorted(folder.glob("*-*.json"))]
    result: dict[str, Any] = {"runs": runs}
    for name in NAMES:
        values = {way: [run["curve"][-1][name] for run in runs if run["way"] == way] for way in WAYS}
        means = {way: statistics.mean(found) for way, found in values.items()}
        error = sum(statistics.variance(found) / len(found) for found in values.values()) ** 0.5
        result[name] = {
            **{way: {"mean": round(means[way], 4), "runs": found} for way, found in values.items()},
            "difference": round(means["compiled"] - means["eager"], 4),
            "standard_error": round(error, 4),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=tuple(WAYS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--collect", type=Path, default=None)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.collect is not None:
        result = collected(options.collect)
        options.out.write_text(json.dumps(result, indent=2) + "\n")
        print(json.dumps({name: result[name] for name in NAMES}, indent=2))
        return
    result = one_run(options.way, options.seed, options.epochs)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{options.way}-{options.seed}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({key: result[key] for key in ("way", "seed", "curve", "seconds")}), flush=True)


if __name__ == "__main__":
    main()
