"""`maskfleet data stage`: copy a data set to where training reads it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from maskfleet.cli.console import err, out
from maskfleet.data.stage.manifest import size_text

if TYPE_CHECKING:
    from maskfleet.data.stage.transfer import Tally

LINE_EVERY_S = 10.0
_WINDOW_S = 30.0


def stage(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="s3://bucket/prefix, or a folder.")],
    destination: Annotated[str, typer.Argument(metavar="DESTINATION", help="s3://bucket/prefix, or a folder.")],
    manifest: Annotated[
        Path | None,
        typer.Option(
            help="Manifest of the files that SOURCE must have.", show_default="manifest.jsonl of SOURCE, if it has one"
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Files copied in parallel.")] = 16,
    check: Annotated[bool, typer.Option("--check", help="Copy nothing; read DESTINATION and verify it.")] = False,
) -> None:
    """Copy a data set from S3 to a folder or back, with checksums; complete files are not copied again."""
    from maskfleet.data.stage.stage import stage as stage_data
    from maskfleet.log import duration_text

    started_at = time.monotonic()
    err.print(f"{'Checking' if check else 'Staging'} {source} -> {destination}", markup=False)
    with _progress("checking" if check else "copying") as report_progress:
        done = stage_data(
            source, destination, manifest=manifest, workers=workers, check=check, progress=report_progress
        )
    elapsed_s = time.monotonic() - started_at
    for note in done.notes:
        err.print(f"note: {note}", markup=False)
    total = f"{done.files:,} files, {size_text(done.total_bytes)}"
    if check:
        out.print(f"{destination}: {total}, all match {done.manifest}", markup=False)
        return
    if done.files_copied:
        rate = f"{size_text(done.bytes_copied / max(elapsed_s, 1e-3))}/s"
        copied = f"{done.files_copied:,} copied ({size_text(done.bytes_copied)} in {duration_text(elapsed_s)}, {rate})"
    else:
        copied = "all were already complete"
    out.print(f"{destination}: {total}; {copied}", markup=False)
    out.print(f"Manifest written: {done.manifest}", markup=False)


class Meter:
    """Bytes per second over the last 30 s, and the remaining time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque([(clock(), 0)])

    def text(self, tally: Tally) -> str:
        """Progress, rate and remaining time as one line."""
        from maskfleet.log import duration_text

        now = self._clock()
        self._seen.append((now, tally.bytes_done))
        while len(self._seen) > 2 and now - self._seen[1][0] >= _WINDOW_S:
            self._seen.popleft()
        then, before = self._seen[0]
        rate = (tally.bytes_done - before) / (now - then) if now > then else 0.0
        left = f"{duration_text((tally.total_bytes - tally.bytes_done) / rate)} left" if rate > 0 else "waiting"
        files = f"{tally.files_done:,} of {tally.files:,} files"
        sizes = f"{size_text(tally.bytes_done)} of {size_text(tally.total_bytes)}"
        return f"{files}, {sizes}, {size_text(max(rate, 0.0))}/s, {left}"


@contextmanager
def _progress(verb: str) -> Iterator[Callable[[Tally], None]]:
    """A progress bar on a terminal, elsewhere a line every ten seconds."""
    meter = Meter()
    if not err.is_terminal:
        last_at = time.monotonic()

        def report_progress(tally: Tally) -> None:
            nonlocal last_at
            if time.monotonic() - last_at >= LINE_EVERY_S:
                last_at = time.monotonic()
                err.print(f"{verb}: {meter.text(tally)}", markup=False)

        yield report_progress
        return
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[line]}"))
    with Progress(*columns, console=err, transient=True) as bars:
        task = bars.add_task(verb, total=None, line="listing")

        def draw(tally: Tally) -> None:
            bars.update(task, completed=tally.bytes_done, total=tally.total_bytes, line=meter.text(tally))

        yield draw
