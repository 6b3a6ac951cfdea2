"""The command line. Heavy imports are inside the commands, so that --help is fast."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer
from typer.main import get_command

from maskfleet import __version__
from maskfleet.cli import bench as bench_command
from maskfleet.cli import board as board_command
from maskfleet.cli import cache as cache_command
from maskfleet.cli import config as config_command
from maskfleet.cli import data as data_command
from maskfleet.cli import demo as demo_command
from maskfleet.cli import doctor as doctor_command
from maskfleet.cli import endpoint as endpoint_command
from maskfleet.cli import evaluate as evaluate_command
from maskfleet.cli import export as export_command
from maskfleet.cli import files as files_command
from maskfleet.cli import image as image_command
from maskfleet.cli import infra as infra_command
from maskfleet.cli import jobs as jobs_command
from maskfleet.cli import launch as launch_command
from maskfleet.cli import notebook as notebook_command
from maskfleet.cli import predict as predict_command
from maskfleet.cli import report as report_command
from maskfleet.cli import runs as runs_command
from maskfleet.cli import sagemaker as sagemaker_command
from maskfleet.cli import serve as serve_command
from maskfleet.cli import train as train_command
from maskfleet.cli import weights as weights_command
from maskfleet.cli.console import print_error
from maskfleet.cli.options import hide_types_of_flags
from maskfleet.errors import MaskfleetError

app = typer.Typer(
    name="maskfleet",
    help="Train Mask R-CNN and Faster R-CNN: one run file, from laptop to cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo_command.demo)
app.command("train")(train_command.train)
app.command("eval")(evaluate_command.evaluate)
app.command("predict")(predict_command.predict)
app.command("export")(export_command.export)
app.command("report")(report_command.report)
app.command("runs")(runs_command.runs)
app.command("serve")(serve_command.serve)
app.command("board")(board_command.board)
app.add_typer(data_command.app, name="data")
app.command("launch")(launch_command.launch)
app.command("status")(jobs_command.status)
app.command("logs")(jobs_command.logs)
app.command("explain")(jobs_command.explain)
app.command("cancel")(jobs_command.cancel)
app.command("ls")(files_command.ls)
app.command("cp")(files_command.cp)
app.command("fetch")(files_command.fetch)
app.command("notebook")(notebook_command.notebook)
app.add_typer(endpoint_command.app, name="endpoint")
app.add_typer(infra_command.app, name="infra")
app.add_typer(image_command.app, name="image")
app.add_typer(config_command.app, name="config")
app.add_typer(weights_command.app, name="weights")
app.add_typer(cache_command.app, name="cache")
app.command("doctor")(doctor_command.doctor)
app.command("bench")(bench_command.bench)
app.add_typer(sagemaker_command.app, name="sagemaker")


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"maskfleet {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Train Mask R-CNN and Faster R-CNN: one run file, from laptop to cluster."""


def main() -> None:
    """Run the command line; errors that a user can fix become one message and an exit code."""
    # Read once, when torch is loaded. Threads that spin while waiting slow a CPU step tenfold if cores are shared.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Lines of several ranks must not mix; with PYTHONUNBUFFERED a line is written in pieces.
            stream.reconfigure(line_buffering=True, write_through=False)
    command = get_command(app)
    hide_types_of_flags(command)
    try:
        command()
    except MaskfleetError as error:
        print_error(error)
        sys.exit(error.exit_code)
