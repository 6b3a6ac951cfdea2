"""`maskfleet demo`: train a small Mask R-CNN on generated images in minutes, on this CPU."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from maskfleet.cli.console import err, out

NUM_TRAIN, NUM_VAL, SIDE_PX, NUM_CATEGORIES, MAX_OBJECTS = 480, 60, 128, 3, 4


def demo(
    folder: Annotated[
        Path, typer.Argument(help="Folder for the data and the run; a second call resumes the run.")
    ] = Path("demo"),
) -> None:
    """Make a set of shapes, train a small Mask R-CNN on it, and show the result."""
    from rich.progress import Progress

    from maskfleet.config.load import resolve
    from maskfleet.data.synthetic.dataset import make_shapes

    data, run_dir = folder / "shapes", folder / "run"
    with Progress(console=err, transient=True) as bar:
        task = bar.add_task("drawing shapes", total=NUM_TRAIN + NUM_VAL)
        make_shapes(
            data,
            num_train=NUM_TRAIN,
            num_val=NUM_VAL,
            height=(SIDE_PX, SIDE_PX),
            width=(SIDE_PX, SIDE_PX),
            num_categories=NUM_CATEGORIES,
            max_objects=MAX_OBJECTS,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    config = resolve(recipe_name="demo", sets=[f'data.root="{data}"']).config
    import torch

    from maskfleet.evaluation.report.record import score_text
    from maskfleet.training.start import train

    # A network this small gains little from more threads, and the loader needs a core.
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    metrics = train(config, run_dir).metrics
    box, mask = metrics["mAP(bbox)/IoU=0.5"], metrics["mAP(segm)/IoU=0.5"]
    out.print(f"\nOn {NUM_VAL} validation images: box AP50 {score_text(box)} %, mask AP50 {score_text(mask)} %.")
    out.print(f"The result, with pictures: {run_dir / 'report.html'}", markup=False)
    hints = next_steps(run_dir, data)
    width = max(map(len, hints))
    out.print("\nWhat to try next:")
    for command, purpose in hints.items():
        out.print(f"  {command:<{width}}  {purpose}", markup=False)


def next_steps(run_dir: Path, data: Path) -> dict[str, str]:
    """Commands to paste into the shell, and what for."""
    script = _activation()
    first = {} if script is None else {f". {shlex.quote(str(script))}": "find the command maskfleet in this shell"}
    return first | {
        f"maskfleet predict {run_dir} {data}/val/*.jpg": "draw its detections",
        f"maskfleet serve {run_dir}": "try it in the browser",
        f"maskfleet eval {run_dir}": "AP, class by class",
        "maskfleet data inspect DATA": "inspect your own COCO-format data",
        "maskfleet train runs/mine --data DATA": "train on it",
    }


def _activation() -> Path | None:
    """The script that puts `maskfleet` on the PATH; None if it is there. `make demo` calls it by its path."""
    script = Path(sys.prefix, "bin", "activate")
    if shutil.which("maskfleet") or not script.is_file():
        return None
    return script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script
