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
from maskfleet.cli.options import hide_types_of_flags, suggest_fields
from maskfleet.errors import MaskfleetError
from maskfleet.system.files import FULL_DISK

app = typer.Typer(
    name="maskfleet",
    help="Train Mask R-CNN and Faster R-CNN: one run file, from laptop to cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# Headings of `maskfleet --help`, in this order.
_TRAIN = "Train and evaluate"
_RESULTS = "Look at results"
_LAUNCH = "Run on other machines"
_DATA = "Data and weights"
_SETTINGS = "Settings and containers"

app.command("demo", rich_help_panel=_TRAIN)(demo_command.demo)
app.command("train", rich_help_panel=_TRAIN)(train_command.train)
app.command("eval", rich_help_panel=_TRAIN)(evaluate_command.evaluate)
app.command("predict", rich_help_panel=_TRAIN)(predict_command.predict)
app.command("export", rich_help_panel=_TRAIN)(export_command.export)
app.command("bench", rich_help_panel=_TRAIN)(bench_command.bench)
app.command("report", rich_help_panel=_RESULTS)(report_command.report)
app.command("runs", rich_help_panel=_RESULTS)(runs_command.runs)
app.command("serve", rich_help_panel=_RESULTS)(serve_command.serve)
app.command("board", rich_help_panel=_RESULTS)(board_command.board)
app.command("doctor", rich_help_panel=_LAUNCH)(doctor_command.doctor)
app.command("launch", rich_help_panel=_LAUNCH)(launch_command.launch)
app.command("status", rich_help_panel=_LAUNCH)(jobs_command.status)
app.command("logs", rich_help_panel=_LAUNCH)(jobs_command.logs)
app.command("explain", rich_help_panel=_LAUNCH)(jobs_command.explain)
app.command("cancel", rich_help_panel=_LAUNCH)(jobs_command.cancel)
app.command("ls", rich_help_panel=_LAUNCH)(files_command.ls)
app.command("cp", rich_help_panel=_LAUNCH)(files_command.cp)
app.command("fetch", rich_help_panel=_LAUNCH)(files_command.fetch)
app.command("notebook", rich_help_panel=_LAUNCH)(notebook_command.notebook)
app.add_typer(infra_command.app, name="infra", rich_help_panel=_LAUNCH)
app.add_typer(image_command.app, name="image", rich_help_panel=_LAUNCH)
app.add_typer(endpoint_command.app, name="endpoint", rich_help_panel=_LAUNCH)
app.add_typer(data_command.app, name="data", rich_help_panel=_DATA)
app.add_typer(weights_command.app, name="weights", rich_help_panel=_DATA)
app.add_typer(config_command.app, name="config", rich_help_panel=_SETTINGS)
app.add_typer(cache_command.app, name="cache", rich_help_panel=_SETTINGS)
app.add_typer(sagemaker_command.app, name="sagemaker", rich_help_panel=_SETTINGS)


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
    suggest_fields(command)
    try:
        command()
    except MaskfleetError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        full = MaskfleetError(
            f"cannot write {error.filename or 'a file'}: {error.strerror}",
            remedy="free disk space, then run the same command again",
        )
        print_error(full)
        sys.exit(full.exit_code)
