"""`maskfleet bench`: how fast is this machine, and what holds it back?"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from maskfleet.cli.console import err, out, print_raw
from maskfleet.cli.options import ConfigOption, JsonOption, RecipeOption, SetOption

if TYPE_CHECKING:
    from maskfleet.bench.speed import Speed
    from maskfleet.config.run import RunConfig, SplitConfig

NUM_SHAPES, SHAPE_SIZE = 96, (480, 640)  # of the set that is drawn when no data is given: COCO's usual size


def bench(
    recipe: RecipeOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", "-d", help="Folder of the data to load. Default: generated pictures.", show_default=False
        ),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(
            "--batch", "-b", min=1, help="Images per step; may be repeated. Default: the run's.", show_default=False
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are timed.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """Measure training, detection and the loader on this machine, beside the limit of its GPU."""
    import torch

    from maskfleet.bench.speed import detect_speed, train_speed
    from maskfleet.config.load import resolve

    run = resolve(recipe_name=recipe, file=config, sets=set_ or []).config
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    speeds: list[Speed] = []
    for count in batch or [run.train.images_per_gpu]:
        for measure in (train_speed, detect_speed):
            err.print(f"measuring {measure.__name__.replace('_', ' ')}, {count} images per step …")
            speeds.append(measure(run, device, batch=count, steps=steps))
    err.print("measuring the loader …")
    loader = _loader_speed(run, data, device, max(batch or [run.train.images_per_gpu]), steps)
    if as_json:
        print_raw(json.dumps(_as_json(speeds, loader), indent=2))
    else:
        _print(speeds, loader)


def _loader_speed(run: RunConfig, data: Path | None, device: Any, batch: int, steps: int) -> float:
    """Images per second from the folder `data`, or else from generated pictures."""
    import tempfile

    from maskfleet.bench.speed import loader_speed
    from maskfleet.config.base import replaced
    from maskfleet.data.store.coco import found_splits
    from maskfleet.data.store.dataset import open_stores
    from maskfleet.data.synthetic.dataset import make_shapes

    with tempfile.TemporaryDirectory() as folder:
        train: tuple[str | SplitConfig, ...] = run.data.train
        if data is None:
            data, train = Path(folder) / "shapes", ("train",)
            height, width = SHAPE_SIZE
            make_shapes(data, num_train=NUM_SHAPES, num_val=1, height=height, width=width, max_objects=15)
        elif "auto" in train:
            train = found_splits(data)[0]
        run = replaced(run, {"data.root": str(data), "data.train": train})
        return loader_speed(run, open_stores(run.data, run.data.train), device, batch=batch, steps=steps)


def _print(speeds: list[Speed], loader: float) -> None:
    from rich.table import Table

    columns = ("", "batch", "images/s", "ms per step", "first step", "GPU memory", "of the GPU's limit")
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for speed in speeds:
        share = speed.share_of_roofline
        table.add_row(
            f"{speed.what}{', compiled' if speed.compiled else ''}",
            str(speed.batch),
            f"{speed.images_per_s:.1f}",
            f"{speed.step_ms:.1f}",
            f"{speed.first_step_s:.0f} s",
            "" if speed.peak_gib is None else f"{speed.peak_gib:.1f} GiB",
            "" if share is None else f"{share:.0%}",
        )
    table.add_row("load", "", f"{loader:.1f}")
    out.print(table)
    out.print("\n" + verdict(speeds, loader), markup=False)


def verdict(speeds: list[Speed], loader: float) -> str:
    """What limits training, and what to do about it."""
    fastest = max(speed.images_per_s for speed in speeds if speed.what == "train")
    if loader >= 1.2 * fastest:
        return f"The loader is {loader / fastest:.1f} times as fast as training: the data will not hold it back."
    if loader >= fastest:
        return "The loader is just fast enough: on a busy machine it may hold training back."
    return (
        f"The loader holds training back to {loader:.1f} of {fastest:.1f} images/s.\n"
        "  → give it more CPU cores, set data.num_workers, or put the images on a faster disk"
    )


def _as_json(speeds: list[Speed], loader: float) -> dict[str, Any]:
    rows = [dataclasses.asdict(speed) | {"share_of_roofline": speed.share_of_roofline} for speed in speeds]
    return {"speeds": rows, "loader_images_per_s": loader, "verdict": verdict(speeds, loader)}
