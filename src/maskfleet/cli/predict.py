"""`maskfleet predict`: what a trained model detects in images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from maskfleet.cli.console import err, out


def predict(
    weights: Annotated[Path, typer.Argument(help="Run directory or weights file.", show_default=False)],
    images: Annotated[list[Path], typer.Argument(help="Image files.", show_default=False)],
    out_dir: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for the drawn images and detections.json.")
    ] = Path("predictions"),
    score: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Draw detections above this score. Default: the run's own.", show_default=False
        ),
    ] = None,
) -> None:
    """Draw boxes and masks on IMAGES, and write all detections as COCO results."""
    from rich.progress import track

    from maskfleet.inference.load import load

    detector = load(weights)
    threshold = detector.run.eval.show_score_threshold if score is None else score
    out_dir.mkdir(parents=True, exist_ok=True)
    results = []
    for image_id, path in enumerate(track(images, "detecting", console=err, transient=True), 1):
        found = detector.detect(path)
        results += [{"file_name": path.name, **result} for result in found.to_coco(image_id)]
        shown = found[found.scores > threshold]
        target = out_dir / f"{path.stem}.png"
        detector.draw(path, shown, path=target)
        out.print(f"{path} → {target}: {len(shown)} above {threshold:g}, {len(found)} in all", markup=False)
    target = out_dir / "detections.json"
    target.write_text(json.dumps(results), encoding="utf-8")
    out.print(f"all detections are in {target}", markup=False)
