"""`maskfleet data get`: download a public data set."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from maskfleet.cli.console import err, out
from maskfleet.cli.stage import transfer_progress
from maskfleet.data.stage.manifest import size_text
from maskfleet.system.signals import interrupt_on_signals


def get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Data set: coco2017.")],
    destination: Annotated[str, typer.Argument(metavar="DESTINATION", help="A folder, or s3://bucket/prefix.")],
    test: Annotated[bool, typer.Option("--test", help="Also the test images: 6.6 GB, without annotations.")] = False,
    mirror: Annotated[
        str | None, typer.Option(metavar="URL", help="Address that has the same archives.", show_default=False)
    ] = None,
    archives: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder that has the archives; nothing is downloaded.", show_default=False),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Connections.")] = 16,
) -> None:
    """Download a data set and unpack it on the way; needs no space for archives, and resumes after a break."""
    from maskfleet.data.get.catalogue import data_set
    from maskfleet.data.get.get import Origin, get_data_set
    from maskfleet.errors import ConfigError
    from maskfleet.log import duration_text
    from maskfleet.system.web.ranges import shown

    if mirror is not None and archives is not None:
        raise ConfigError("--mirror and --archives were both given", remedy="leave out one of them")
    wanted = data_set(name)
    started_at = time.monotonic()
    source = archives or shown(mirror or wanted.addresses[0])
    err.print(f"Getting {name} from {source} -> {destination}", markup=False)
    with interrupt_on_signals(), transfer_progress("fetching") as report_progress:
        done = get_data_set(
            wanted, destination, origin=Origin(mirror, archives), test=test, workers=workers, progress=report_progress
        )
    elapsed_s = time.monotonic() - started_at
    for note in done.notes:
        err.print(f"note: {note}", markup=False)
    fetched = "all were already complete"
    if done.files_copied:
        fetched = f"{done.files_copied:,} fetched ({size_text(done.bytes_copied)} in {duration_text(elapsed_s)})"
    out.print(f"{destination}: {done.files:,} files, {size_text(done.total_bytes)}; {fetched}", markup=False)
    out.print(f"Manifest written: {done.manifest}", markup=False)
