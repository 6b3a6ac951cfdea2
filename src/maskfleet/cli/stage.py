"""`maskfleet data stage`: copy a data set to where training reads it."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from maskfleet.cli.console import err, out, print_raw
from maskfleet.cli.options import JsonOption
from maskfleet.data.stage.manifest import size_text
from maskfleet.system.signals import interrupt_on_signals

if TYPE_CHECKING:
    from maskfleet.data.stage.transfer import Tally

LINE_EVERY_S = 10.0
_WINDOW_S = 30.0


def stage(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="s3://bucket/prefix, a folder, or a zip, tar or tar.gz archive.")
    ],
    destination: Annotated[str, typer.Argument(metavar="DESTINATION", help="s3://bucket/prefix, or a folder.")],
    manifest: Annotated[
        Path | None,
        typer.Option(
            help="Manifest of the files that SOURCE must have.", show_default="manifest.jsonl of SOURCE, if it has one"
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Files copied in parallel.")] = 16,
    check: Annotated[bool, typer.Option("--check", help="Copy nothing; read DESTINATION and verify it.")] = False,
    shards: Annotated[bool, typer.Option("--shards", help="Pack the images into tar files with an index.")] = False,
    shard_size: Annotated[int, typer.Option(min=1, max=100_000, help="Size of a shard in MB, with --shards.")] = 256,
) -> None:
    """Copy a data set to a folder or to S3, with checksums; complete files are not copied again."""
    from maskfleet.data.stage.stage import stage as stage_data
    from maskfleet.log import duration_text

    started_at = time.monotonic()
    err.print(f"{'Checking' if check else 'Staging'} {source} -> {destination}", markup=False)
    with interrupt_on_signals(), transfer_progress("checking" if check else "copying") as report_progress:
        done = stage_data(
            source,
            destination,
            manifest=manifest,
            workers=workers,
            check=check,
            shard_bytes=shard_size * 10**6 if shards else None,
            progress=report_progress,
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


def status(
    location: Annotated[str, typer.Argument(metavar="URI", help="s3://bucket/prefix, or a folder.")],
    as_json: JsonOption = False,
) -> None:
    """Tell whether a staged data set is complete, by listing it. Exit code 1: it is partial, unverified or empty."""
    from maskfleet.data.stage.status import staging_status

    found = staging_status(location)
    if as_json:
        print_raw(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        form = " in shards" if found.is_sharded else ""
        out.print(f"{location}: {found.state}", markup=False)
        out.print(
            f"  {found.files:,} files{form}, {size_text(found.bytes)}, as their manifest lists them", markup=False
        )
        if found.missing or found.changed:
            examples = ", ".join(name if name.isprintable() else repr(name) for name in found.examples)
            out.print(f"  {found.missing:,} missing, {found.changed:,} changed: {examples}", markup=False)
        if found.unlisted:
            listed = f"{found.unlisted:,} files, {size_text(found.unlisted_bytes)}, that no manifest lists"
            out.print(f"  {listed}", markup=False)
        if found.unstorable:
            example = f"first {found.unstorable_example}: rename or remove them"
            out.print(f"  {found.unstorable:,} files that cannot be staged, {example}", markup=False, soft_wrap=True)
        if found.state != "complete":
            advice = "Run `maskfleet data stage SOURCE URI`, or the `maskfleet data get` that began it, to complete it."
            out.print(advice, markup=False)
    raise typer.Exit(0 if found.state == "complete" else 1)


def preload(
    folder: Annotated[Path, typer.Argument(help="Folder of the data set on an FSx for Lustre file system.")],
    workers: Annotated[int, typer.Option(min=1, max=256, help="Files loaded in parallel.")] = 64,
) -> None:
    """Load the files of a folder from S3 into FSx for Lustre, before training reads them for the first time."""
    from maskfleet.data.stage.preload import LUSTRE
    from maskfleet.data.stage.preload import preload as load_files
    from maskfleet.log import duration_text

    started_at = time.monotonic()
    with interrupt_on_signals(), transfer_progress("loading") as report_progress:
        done = load_files(folder, workers=workers, progress=report_progress)
    if done.file_system != LUSTRE:
        kind = done.file_system or "a file system of an unknown kind"
        out.print(f"{folder} is on {kind}, not on Lustre: there is nothing to load", markup=False)
        return
    elapsed = duration_text(time.monotonic() - started_at)
    out.print(f"{folder}: {done.files:,} files, {size_text(done.total_bytes)}, are loaded ({elapsed})", markup=False)


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
def transfer_progress(verb: str) -> Iterator[Callable[[Tally], None]]:
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
