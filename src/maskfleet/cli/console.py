"""Consoles of the commands: results go to standard output, everything else to standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from maskfleet.errors import MaskfleetError

out = Console(soft_wrap=True, highlight=False)
err = Console(stderr=True, soft_wrap=True, highlight=False)


def print_raw(text: str) -> None:
    """Print `text` to standard output byte for byte, for files and pipes."""
    sys.stdout.write(text if text.endswith("\n") else f"{text}\n")


def print_error(error: MaskfleetError) -> None:
    """Print what went wrong and what to do."""
    # In one call, which writes once, so that lines of several ranks do not mix.
    err.print(Text.assemble(("error:", "bold red"), f" {error.what}\n  ", ("→", "bold"), f" {error.remedy}"))


@contextmanager
def byte_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal's standard error; yields a function to call with (bytes done, bytes in total)."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
