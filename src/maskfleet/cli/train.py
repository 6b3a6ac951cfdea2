"""`maskfleet train`: train in a run directory, or resume the run in it."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from maskfleet.cli.options import ConfigOption, DataOption, DeviceOption, RecipeOption, SetOption, with_data
from maskfleet.errors import ConfigError

if TYPE_CHECKING:
    from maskfleet.config.run import RunConfig


def train(
    run_dir: Annotated[Path, typer.Argument(help="Run directory: new, or one to continue.", show_default=False)],
    recipe: RecipeOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    data: DataOption = None,
    device: DeviceOption = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1, help="GPUs of this machine to train on, one process each. Default: one.", show_default=False
        ),
    ] = None,
    wait: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds to wait for another process that trains in RUN_DIR; by default that is an error.",
            show_default=False,
        ),
    ] = 0,
) -> None:
    """Train, or continue the run in RUN_DIR from its newest checkpoint. Never deletes a run."""
    resolved = run_config(run_dir, recipe, config, with_data(set_, data))
    if gpus is not None and device is not None:
        raise ConfigError("--gpus and --device exclude each other", remedy="give one of them")
    if gpus is not None and gpus > 1:
        _start_ranks(gpus, run_dir, resolved, wait)
    from maskfleet.data.pipeline.preload import start_fork_server

    start_fork_server(resolved.data.num_workers)  # it imports torch while this process does
    from maskfleet.training.start import train as start

    start(resolved, run_dir, wait_s=wait, device=device)


def run_config(run_dir: Path, recipe: str | None, config: Path | None, sets: list[str]) -> RunConfig:
    """The configuration from the options; without a recipe or file, they change that of the run in the directory."""
    from maskfleet.config.load import RUN_FILE, resolve

    own = run_dir / RUN_FILE
    if config is None and recipe is None and own.exists():
        config = own
    resolved = resolve(recipe_name=recipe, file=config, sets=sets).config
    if "auto" not in (*resolved.data.train, *resolved.data.val):
        return resolved
    from maskfleet.data.store.dataset import with_found_splits

    return with_found_splits(resolved)


def _start_ranks(count: int, run_dir: Path, config: RunConfig, wait_s: float) -> NoReturn:
    """Start this command once per GPU; this process exits when they have."""
    import torch

    from maskfleet.config.load import RUN_FILE, dump, refuse_another_run
    from maskfleet.launch.supervise.child import run_ranks

    if "RANK" in os.environ:
        raise ConfigError("--gpus cannot be used by a rank that was started already", remedy="leave --gpus out")
    found = torch.cuda.device_count()
    if count > found:
        raise ConfigError(
            f"--gpus {count}, but this machine has {found} GPUs", remedy="use fewer, or see `maskfleet doctor`"
        )
    refuse_another_run(run_dir, config)  # here, so that it is said once and not by every rank
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, RUN_FILE)
        file.write_text(dump(config), encoding="utf-8")
        argv = [sys.executable, "-m", "maskfleet", "train", str(run_dir), "--config", str(file), "--wait", str(wait_s)]
        raise typer.Exit(run_ranks(argv, count, env=os.environ, folder=run_dir / f".ranks-{os.getpid()}"))
