"""Do all parts fit together on real images? R50-FPN Mask R-CNN, from random weights, overfits a few of them.

    python benchmarks/overfit.py COCO_FOLDER --split train2017 --out benchmarks/results/overfit.json

Trains and evaluates on the same images, so that losses, targets, sampling, detection and AP must be consistent.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from pathlib import Path

from machine import machine_facts
from maskfleet.config.base import replaced
from maskfleet.config.recipes import recipe
from maskfleet.config.run import RunConfig
from maskfleet.training.output.metrics import read_metrics
from maskfleet.training.run import train

TARGET_BOX_AP, TARGET_MASK_AP = 0.60, 0.50
MARGIN = 0.1  # training stops only this far above the targets


def configured(root: Path, split: str, epochs: int, short_edge_px: int) -> RunConfig:
    """Group normalisation, since nothing is pretrained; no flips, since overfitting is the goal."""
    return replaced(
        recipe("scratch"),
        {
            "data.root": str(root),
            "data.train": (split,),
            "data.val": (split,),
            "data.train_short_edge_px": (short_edge_px, short_edge_px),
            "data.test_short_edge_px": short_edge_px,
            "data.flip_probability": 0.0,
            "model.max_size_px": round(short_edge_px * 5 / 3),
            "train.images_per_gpu": 16,
            "train.base_lr": 0.015,
            "train.log_every_steps": 25,
            "train.epoch_schedule": ((0.8 * epochs, 0.1), (epochs, None)),
            "eval.every_epochs": max(1, epochs // 5),
            "train.target_box_ap": TARGET_BOX_AP + MARGIN,
            "train.target_mask_ap": TARGET_MASK_AP + MARGIN,
            "eval.images_per_gpu": 8,
            "checkpoint.every_epochs": 0,
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--split", default="train2017")
    parser.add_argument("--epochs", type=int, default=400)
    parser.add_argument("--short-edge-px", type=int, default=512)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/overfit.json"))
    arguments = parser.parse_args()
    config = configured(arguments.root, arguments.split, arguments.epochs, arguments.short_edge_px)
    config = replaced(config, {"train.compile": arguments.compile})
    started_at = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        scores = train(config, Path(folder))
        records = read_metrics(Path(folder))
    curve = [
        {"epoch": r["epoch"], "box_ap": r["mAP(bbox)/IoU=0.5:0.95"], "mask_ap": r["mAP(segm)/IoU=0.5:0.95"]}
        for r in records
        if "mAP(bbox)/IoU=0.5:0.95" in r
    ]
    final = {
        kind: {k: v for k, v in dataclasses.asdict(s).items() if k != "per_class"} for kind, s in scores[0].items()
    }
    reached = final["bbox"]["ap"] >= TARGET_BOX_AP and final["segm"]["ap"] >= TARGET_MASK_AP
    result = {
        "what": "R50-FPN Mask R-CNN with GN from random weights, trained and evaluated on the same images",
        "targets": {"box_ap": TARGET_BOX_AP, "mask_ap": TARGET_MASK_AP, "reached": reached},
        "scores": final,
        "curve": curve,
        "images_per_s": [r["images_per_s"] for r in records if "images_per_s" in r][-1],
        "seconds": round(time.monotonic() - started_at, 1),
        "epochs": arguments.epochs,
        "short_edge_px": arguments.short_edge_px,
        **machine_facts(),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({key: result[key] for key in ("targets", "scores", "seconds")}, indent=2))


if __name__ == "__main__":
    main()
