"""Stage a data set from Python: a public one by its name, or one that is somewhere already."""

from __future__ import annotations

import time
from collections.abc import Callable

from maskfleet.data.get.catalogue import DATA_SETS, data_set
from maskfleet.data.get.get import Origin, get_data_set
from maskfleet.data.stage.manifest import size_text
from maskfleet.data.stage.stage import Staged, stage
from maskfleet.data.stage.transfer import Tally

LINE_EVERY_S = 10.0


def stage_data(source: str, destination: str, *, say: Callable[[str], None] | None = None) -> Staged:
    """Copy a data set to a folder or s3://bucket/prefix and verify it; complete files are not copied again.

    `source` is the name of a public data set (coco2017), s3://bucket/prefix, a folder, or a zip or tar archive. `say`
    gets a line about the progress every ten seconds.
    """
    progress = _reporter(say) if say is not None else _silent
    if source in DATA_SETS:
        return get_data_set(data_set(source), destination, origin=Origin(), progress=progress)
    return stage(source, destination, progress=progress)


def _silent(tally: Tally) -> None:
    """Report nothing."""


def _reporter(say: Callable[[str], None]) -> Callable[[Tally], None]:
    last_at = time.monotonic()

    def report(tally: Tally) -> None:
        nonlocal last_at
        if time.monotonic() - last_at >= LINE_EVERY_S:
            last_at = time.monotonic()
            done = f"{size_text(tally.bytes_done)} of {size_text(tally.total_bytes)}"
            say(f"{tally.files_done:,} of {tally.files:,} files, {done}")

    return report
