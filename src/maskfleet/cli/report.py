"""`maskfleet report`: one HTML file about one run, or about several in comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from maskfleet.cli.console import err, out
from maskfleet.cli.options import DeviceOption
from maskfleet.cli.outputs import expect_writable
from maskfleet.errors import ConfigError

COMPARISON_FILE = Path("comparison.html")
ONE_RUN, OF_SEVERAL = (6, 12), (2, 4)  # best and worst images that are shown


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File to write. Default: RUN/report.html; of several runs, comparison.html here.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data", "-d", help="Folder of the data, if it has moved. Default: the runs' own.", show_default=False
        ),
    ] = None,
    device: DeviceOption = None,
) -> None:
    """Write a page with curves, AP, errors, pictures and settings; several runs are compared with the first."""
    from rich.progress import Progress

    from maskfleet.evaluation.report.page import FILE, write_report
    from maskfleet.training.output.record import checked_run, record_of, with_distinct_names

    folders = [run.expanduser() for run in runs]
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ConfigError("a run is named twice", remedy="name each run once")
    for folder in folders:  # before the first one takes minutes
        checked_run(folder)
    path = (output or (folders[0] / FILE if len(folders) == 1 else COMPARISON_FILE)).expanduser()
    expect_writable(path, option="--output")
    examples = ONE_RUN if len(folders) == 1 else OF_SEVERAL
    records = []
    with Progress(console=err, transient=True) as bar:
        for folder in folders:
            task = bar.add_task(folder.name, total=None)

            def advance(what: str, done: int, total: int | None, task: object = task, name: str = folder.name) -> None:
                bar.update(task, description=f"{name}: {what}", completed=done, total=total)  # type: ignore[arg-type]

            records.append(record_of(folder, data=data, device=device, examples=examples, progress=advance))
            bar.remove_task(task)
    for record in records:
        for note in record.notes:
            err.print(f"{record.name}: {note}", markup=False)
    write_report(path, with_distinct_names(records, folders))
    out.print(str(path), markup=False)
