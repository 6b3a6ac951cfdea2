"""`maskfleet data stage`: bring a data set to where training reads it."""

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
        typer.Option(help="What SOURCE must hold.", show_default="manifest.jsonl of SOURCE, if it has one"),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Files that are copied at once.")] = 16,
    check: Annotated[bool, typer.Option("--check", help="Copy nothing; read all of DESTINATION and compare.")] = False,
) -> None:
    """Copy a data set from S3 to a folder, or back: verified, and what is complete is not copied again."""
    from maskfleet.data.stage import stage as staging
    from maskfleet.log import duration_text

    started_at = time.monotonic()
    err.print(f"{'Checking' if check else 'Staging'} {source} -> {destination}", markup=False)
    with _progress("checking" if check else "copying") as tell:
        act = staging.check if check else staging.stage
        done = act(source, destination, manifest=manifest, workers=workers, progress=tell)
    elapsed_s = time.monotonic() - started_at
    for note in done.notes:
        err.print(f"note: {note}", markup=False)
    total = f"{done.files:,} files, {size_text(done.total_bytes)}"
    if check:
        out.print(f"{destination}: {total}, all as in {done.manifest}", markup=False)
        return
    if done.files_copied:
        rate = f"{size_text(done.bytes_copied / max(elapsed_s, 1e-3))}/s"
        copied = f"{done.files_copied:,} copied ({size_text(done.bytes_copied)} in {duration_text(elapsed_s)}, {rate})"
    else:
        copied = "all were there and complete"
    out.print(f"{destination}: {total}; {copied}", markup=False)
    out.print(f"Manifest written: {done.manifest}", markup=False)


class Meter:
    """Bytes a second over the last half minute, and from it the time that is left."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque([(clock(), 0)])

    def text(self, tally: Tally) -> str:
        """One line on how far it is."""
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
    """A bar on a terminal, and elsewhere a line every ten seconds."""
    meter = Meter()
    if not err.is_terminal:
        last_at = time.monotonic()

        def tell(tally: Tally) -> None:
            nonlocal last_at
            if time.monotonic() - last_at >= LINE_EVERY_S:
                last_at = time.monotonic()
                err.print(f"{verb}: {meter.text(tally)}", markup=False)

        yield tell
        return
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[line]}"))
    with Progress(*columns, console=err, transient=True) as bars:
        task = bars.add_task(verb, total=None, line="listing")

        def draw(tally: Tally) -> None:
            bars.update(task, completed=tally.bytes_done, total=tally.total_bytes, line=meter.text(tally))

        yield draw
