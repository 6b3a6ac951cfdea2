"""`maskfleet bench`: how fast is this machine, and what holds it back?"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from maskfleet.cli.console import err, out, print_raw
from maskfleet.cli.options import ConfigOption, JsonOption, RecipeOption, SetOption
from maskfleet.errors import ConfigError

if TYPE_CHECKING:
    from maskfleet.bench.speed import Speed
    from maskfleet.config.run import RunConfig, SplitConfig

NUM_SHAPES, SHAPE_SIZE = 96, (480, 640)  # of the set that is drawn when no data is given: COCO's usual size
DEFAULT_STEPS = 20
AUTO_BATCH = 16  # for a run whose images per GPU are not known before it starts


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
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps that are timed. Default: 20.", show_default=False)
    ] = None,
    scaling: Annotated[
        bool, typer.Option("--scaling", help="Measure nothing: predict the efficiency on 1 to 1,024 GPUs.")
    ] = False,
    instance: Annotated[
        list[str] | None,
        typer.Option(
            help="--scaling: instance type; may be repeated. Default: one per family.",
            show_default=False,
        ),
    ] = None,
    gpus: Annotated[str | None, typer.Option(help="--scaling: numbers of GPUs, as in 1,8,64.")] = None,
    images_per_gpu: Annotated[
        int | None, typer.Option(help="--scaling: images per GPU and step. Default: 16.", show_default=False)
    ] = None,
    exchange_dtype: Annotated[
        str | None, typer.Option(help="--scaling: gradients in fp32 or bf16. Default: fp32.", show_default=False)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="--scaling: of the simulation. Default: 0.")] = None,
    html: Annotated[Path | None, typer.Option(help="--scaling: also write a page with charts.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure training, detection and the loader on this machine, beside the limit of its GPU."""
    predicting = {
        "--instance": instance,
        "--gpus": gpus,
        "--images-per-gpu": images_per_gpu,
        "--exchange-dtype": exchange_dtype,
        "--seed": seed,
        "--html": html,
    }
    if scaling:
        measuring: dict[str, Any] = {"--recipe": recipe, "--config": config, "--set": set_}
        measuring |= {"--data": data, "--batch": batch, "--steps": steps}
        _refuse(measuring, "the scaling model is of R50-FPN Mask R-CNN on COCO and measures nothing")
        from maskfleet.bench.scaling.predict import Setting
        from maskfleet.cli.scaling import predict_scaling

        chosen = {"images_per_gpu": images_per_gpu, "exchange_dtype": exchange_dtype, "seed": seed}
        setting = Setting(**{name: value for name, value in chosen.items() if value is not None})  # type: ignore[arg-type]
        predict_scaling(instance or [], gpus, setting, as_json=as_json, html=html)
        return
    _refuse(predicting, "it belongs to --scaling", "add --scaling")
    _measure(recipe, config, set_, data=data, batch=batch, steps=steps or DEFAULT_STEPS, as_json=as_json)


def _refuse(options: dict[str, Any], reason: str, remedy: str | None = None) -> None:
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise ConfigError(f"{given[0]} cannot be used here: {reason}", remedy=remedy or f"leave out {', '.join(given)}")


def _measure(
    recipe: str | None,
    config: Path | None,
    set_: list[str] | None,
    *,
    data: Path | None,
    batch: list[int] | None,
    steps: int,
    as_json: bool,
) -> None:
    import torch

    from maskfleet.bench.speed import detect_speed, train_speed
    from maskfleet.config.load import resolve

    run = resolve(recipe_name=recipe, file=config, sets=set_ or []).config
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    speeds: list[Speed] = []
    batch = batch or [AUTO_BATCH if run.train.images_per_gpu == "auto" else run.train.images_per_gpu]
    for count in batch:
        for measure in (train_speed, detect_speed):
            err.print(f"measuring {measure.__name__.replace('_', ' ')}, {count} images per step …")
            speeds.append(measure(run, device, batch=count, steps=steps))
    err.print("measuring the loader …")
    loader = _loader_speed(run, data, device, max(batch), steps)
    if as_json:
        print_raw(json.dumps(_as_json(speeds, loader), indent=2))
    else:
        _print(speeds, loader)


def _loader_speed(run: RunConfig, data: Path | None, device: Any, batch: int, steps: int) -> float:
    """Images per second from the folder `data`, or else from generated pictures."""
    import tempfile

    from maskfleet.bench.speed import loader_speed
    from maskfleet.config.base import replaced
    from maskfleet.data.store.dataset import open_stores
    from maskfleet.data.store.splits import found_splits
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
