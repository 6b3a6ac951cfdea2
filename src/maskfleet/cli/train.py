"""`maskfleet train`: train in a run directory, or resume the run in it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from maskfleet.cli.options import ConfigOption, RecipeOption, SetOption
from maskfleet.errors import ConfigError

if TYPE_CHECKING:
    from maskfleet.config.run import RunConfig


def train(
    run_dir: Annotated[Path, typer.Argument(help="Run directory: new, or one to continue.", show_default=False)],
    recipe: RecipeOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", "-d", help="Folder of the data; short for --set data.root=…", show_default=False),
    ] = None,
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
    sets = list(set_ or [])
    if data is not None:
        sets.append(f"data.root={json.dumps(str(data))}")  # quoted: a path may look like another YAML value
    resolved = run_config(run_dir, recipe, config, sets)
    if gpus is not None and gpus > 1:
        _start_ranks(gpus, run_dir, resolved, wait)
    from maskfleet.training.start import train as start

    start(resolved, run_dir, wait_s=wait)


def run_config(run_dir: Path, recipe: str | None, config: Path | None, sets: list[str]) -> RunConfig:
    """The configuration from the options, or without any the one in the run directory."""
    from maskfleet.config.load import RUN_FILE, resolve

    own = run_dir / RUN_FILE
    if config is None and recipe is None and own.exists():
        config = own
    resolved = resolve(recipe_name=recipe, file=config, sets=sets).config
    if "auto" not in (*resolved.data.train, *resolved.data.val):
        return resolved
    from maskfleet.data.store.dataset import with_found_splits

    return with_found_splits(resolved)


def _start_ranks(count: int, run_dir: Path, config: RunConfig, wait_s: float) -> None:
    """Replace this process by torchrun, which starts this command once per GPU."""
    import torch

    from maskfleet.config.load import write_run_file

    if "RANK" in os.environ:
        raise ConfigError("--gpus cannot be used inside torchrun, which starts the ranks", remedy="leave --gpus out")
    found = torch.cuda.device_count()
    if count > found:
        raise ConfigError(
            f"--gpus {count}, but this machine has {found} GPUs", remedy="use fewer, or see `maskfleet doctor`"
        )
    write_run_file(run_dir, config)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    command = ["-m", "maskfleet", "train", str(run_dir), "--wait", str(wait_s)]
    os.execv(sys.executable, [sys.executable, *launcher, *command])
