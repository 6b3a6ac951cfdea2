"""Consoles of the commands: results go to standard output, everything else to standard error."""

from __future__ import annotations

import sys

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
