"""One file from a web server to disk, resumed after a break, and put in place only when it is complete."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from maskfleet.system.files import move_into_place, read_json, write_atomically
from maskfleet.system.web.ranges import WebError, WebFile, find_file, shown


def download(
    urls: Sequence[str],
    target: Path,
    *,
    size: int | None = None,
    check: Callable[[Path], None],
    progress: Callable[[int, int], None],
) -> WebFile:
    """Fetch the file at the first of `urls` that has it to `target`; only one process may do so at a time.

    `size` is what it must have, if that is known. `check` judges the complete file before it gets its name; if it
    raises, the file is deleted. A later call resumes a download of the same version of the file.
    """
    found = find_file(urls)
    if size is not None and found.size != size:
        raise WebError(
            f"{shown(found.url)} has {found.size:,} bytes instead of {size:,}: it is another file, or incomplete",
            remedy="use another mirror",
        )
    part, about = target.with_name(f".{target.name}.part"), target.with_name(f".{target.name}.part.json")
    if not part.exists() or read_json(about) != asdict(found):
        part.unlink(missing_ok=True)
        write_atomically(about, json.dumps(asdict(found)))
    with part.open("ab") as file:
        progress(file.tell(), found.size)
        if file.tell() > found.size:
            file.truncate(0)
        for chunk in found.read(file.tell(), found.size):
            file.write(chunk)
            progress(file.tell(), found.size)
    try:
        check(part)
    except BaseException:
        part.unlink()
        raise
    move_into_place(part, target)
    about.unlink(missing_ok=True)
    return found
