"""`maskfleet export`: a trained model as one file, with its class names, category ids and test size inside."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Literal

import typer

from maskfleet.cli.console import out
from maskfleet.cli.options import BestOption, LastOption, StepOption, chosen_checkpoint
from maskfleet.cli.outputs import expect_writable
from maskfleet.errors import ConfigError

Format = Literal["safetensors", "npz", "torch", "onnx"]
SUFFIXES: dict[Format, str] = {"safetensors": ".safetensors", "npz": ".npz", "torch": ".pt2", "onnx": ".onnx"}
INSTALL = "pip install 'maskfleet[onnx]'"


def export(
    run: Annotated[Path, typer.Argument(help="Run directory or weights file.", show_default=False)],
    to: Annotated[
        Format,
        typer.Option(help="safetensors (ours), npz (TensorPack), torch (a torch.export program, .pt2) or onnx."),
    ] = "safetensors",
    out_file: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File to write. Default: the run's name, in this folder.", show_default=False),
    ] = None,
    best: BestOption = False,
    last: LastOption = False,
    step: StepOption = None,
) -> None:
    """Write a trained model as one file, with class names, category ids and test size inside."""
    from maskfleet.inference.load import load
    from maskfleet.model.weights import labels_of, save_tensorpack, save_weights

    path = _target(run, to, out_file)
    expect_writable(path, option="--out")
    if to == "onnx":
        _check_package()
    detector = load(run, "cpu", checkpoint=chosen_checkpoint(best=best, last=last, step=step))
    labels, model = labels_of(detector.run, detector.categories), detector.run.model
    match to:
        case "safetensors":
            save_weights(path, detector.model.state_dict(), model, labels)
        case "npz":
            save_tensorpack(path, detector.model.state_dict(), model, labels)
        case "torch":
            from maskfleet.inference.export.program import save_program

            save_program(path, detector)
        case "onnx":
            from maskfleet.inference.export.onnx.detector import save_onnx

            comparison = save_onnx(path, detector)
            unchecked = f"not compared with the network: onnxruntime is not installed ({INSTALL})"
            out.print(unchecked if comparison is None else str(comparison), markup=False)
    out.print(f"wrote {path}: {detector.source}", markup=False)


def _check_package() -> None:
    """Refuse before the model is loaded, which may take a while."""
    if importlib.util.find_spec("onnx") is None:
        raise ConfigError("an ONNX file needs the Python package onnx", remedy=INSTALL)


def _target(run: Path, to: Format, given: Path | None) -> Path:
    name = run.expanduser().resolve()
    path = given or Path(f"{name.name if name.is_dir() else name.stem}{SUFFIXES[to]}")
    if path.suffix != SUFFIXES[to]:
        raise ConfigError(f"{path} does not end in {SUFFIXES[to]}", remedy=f"--out {path.with_suffix(SUFFIXES[to])}")
    if path.resolve() == name:
        raise ConfigError(f"{path} is the file to export", remedy="give another one with --out")
    return path
