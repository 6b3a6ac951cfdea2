"""`maskfleet cache`: compiled code in one file, to start runs on other machines without compiling."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from maskfleet.cli.console import out, print_raw
from maskfleet.cli.options import JsonOption

app = typer.Typer(help="Save compiled code to a file, and load it on another machine.", no_args_is_help=True)

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="File of compiled code.")]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda or cuda:1; by default the first GPU.", show_default=False)
]


@app.command()
def save(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run on this machine that was compiled.")],
    file: FileArgument,
) -> None:
    """Save the compiled step of a run; what is not in the cache of this machine is compiled."""
    from maskfleet.training.background.save import save_compiled

    header = save_compiled(run_dir, file)
    out.print(f"{file}: {_canvases(header.canvases)}, {file.stat().st_size / 1e6:.1f} MB")


@app.command()
def load(file: FileArgument, device: DeviceOption = None) -> None:
    """Put the compiled code of a file into the cache of this machine. It is code: load only files that you trust."""
    import os

    from maskfleet.inference.device import chosen_device, keep_compiled_code
    from maskfleet.training.background.artifacts import load_artifacts

    keep_compiled_code(os.environ)
    header = load_artifacts(file, chosen_device(device))
    out.print(f"loaded {_canvases(header.canvases)} into {os.environ['TORCHINDUCTOR_CACHE_DIR']}")


@app.command()
def info(file: FileArgument, as_json: JsonOption = False) -> None:
    """Show what a file was compiled for; nothing of it is run."""
    from maskfleet.training.background.artifacts import read_header

    header = read_header(file)
    if as_json:
        print_raw(json.dumps(asdict(header), indent=2))
        return
    for name, value in asdict(header.target).items():
        print_raw(f"{name:<10} {value}")
    print_raw(f"{'images':<10} {_canvases(header.canvases)}")


def _canvases(canvases: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(f"{height} x {width}" for height, width in canvases)
