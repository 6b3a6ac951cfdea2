"""`maskfleet predict`: what a trained model sees in images."""

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
    import cv2
    from rich.progress import track

    from maskfleet.evaluation.pictures import drawn_detections, read_picture
    from maskfleet.inference.load import trained_model
    from maskfleet.inference.single import detect_in
    from maskfleet.training.distributed import Worker
    from maskfleet.training.run import device_for

    device = device_for(Worker())
    trained = trained_model(weights, device)
    threshold = trained.run.eval.show_score_threshold if score is None else score
    out_dir.mkdir(parents=True, exist_ok=True)
    everything = []
    for number, path in enumerate(track(images, "detecting", console=err, transient=True), 1):
        picture = read_picture(path)
        results = detect_in(trained.model, picture, trained.run, device, image_id=number, categories=trained.categories)
        everything += [{"file_name": path.name, **result} for result in results]
        shown = [result for result in results if result["score"] > threshold]
        target = out_dir / f"{path.stem}.png"
        cv2.imwrite(str(target), drawn_detections(picture, shown, trained.categories))
        out.print(f"{path} → {target}: {len(shown)} above {threshold:g}, {len(results)} in all", markup=False)
    target = out_dir / "detections.json"
    target.write_text(json.dumps(everything), encoding="utf-8")
    out.print(f"all detections are in {target}", markup=False)
