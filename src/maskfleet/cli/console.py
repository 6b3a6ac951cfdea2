"""Where commands print: results to standard output, everything else to standard error."""

from __future__ import annotations

import sys

from rich.console import Console

from maskfleet.errors import MaskfleetError

out = Console(soft_wrap=True, highlight=False)
err = Console(stderr=True, soft_wrap=True, highlight=False)


def print_raw(text: str) -> None:
    """Print `text` to standard output byte for byte, for files and pipes."""
    sys.stdout.write(text if text.endswith("\n") else f"{text}\n")


def print_error(error: MaskfleetError) -> None:
    """Say what went wrong and what to do."""
    with err:  # written at once: half a line of one rank may meet half a line of another
        err.print("[bold red]error:[/] ", end="")
        err.print(error.what, markup=False)
        err.print("  [bold]→[/] ", end="")
        err.print(error.remedy, markup=False)
