"""`maskfleet ls`, `cp` and `fetch`: the files of a run by its handle, on this machine or on any other target."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from maskfleet.cli.console import err, out, print_raw
from maskfleet.cli.options import JsonOption
from maskfleet.errors import ConfigError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from maskfleet.launch.files.transfer import FileEntry, RunFiles

PlaceArgument = Annotated[str, typer.Argument(help="A job's handle, optionally followed by /PATH.", show_default=False)]
_HANDLE = re.compile(r"[a-z]+://")


def ls(place: PlaceArgument, as_json: JsonOption = False) -> None:
    """List the folder of a run. On EKS, HANDLE//PATH begins at the root of the shared volume."""
    with _files(place) as files:
        entries = files.entries()
    if as_json:
        rows = [{"path": one.path, "kind": one.kind, "size": one.size, "mtime_ns": one.mtime_ns} for one in entries]
        print_raw(json.dumps(rows, indent=2))
        return
    for one in entries:
        out.print(_line(one, place), markup=False)


def cp(
    source: Annotated[str, typer.Argument(help="A file here, or HANDLE/PATH.", show_default=False)],
    target: Annotated[str, typer.Argument(help="HANDLE/PATH, or a file or folder here.", show_default=False)],
) -> None:
    """Copy one file from or to a run; verified by SHA-256, and resumes an interrupted copy."""
    if bool(_HANDLE.match(source)) == bool(_HANDLE.match(target)):
        raise ConfigError(
            "cp needs one file here and one of a run",
            remedy="maskfleet cp HANDLE/log.txt . or maskfleet cp notes.txt HANDLE/notes.txt",
        )
    if _HANDLE.match(source):
        here = Path(target)
        here = here / _name_of(source) if here.is_dir() else here
        if not here.parent.is_dir():
            raise ConfigError(f"there is no folder {here.parent}", remedy="make it first")
        with _files(source, is_file=True) as files:
            done = files.get(here)
        out.print(f"{here}: {'was there already' if done.unchanged else f'{here.stat().st_size} bytes'}", markup=False)
        return
    here = Path(source)
    if not here.is_file():
        raise ConfigError(f"{here} is not a file", remedy="cp copies single files")
    there = f"{target}{here.name}" if target.endswith("/") else target
    with _files(there, writable=True, is_file=True) as files:
        sent = files.put(here)
    out.print(f"{there}: {sent} bytes sent", markup=False)


def fetch(
    place: PlaceArgument,
    folder: Annotated[
        Path | None, typer.Argument(help="Folder here. Default: the last name of the handle.", show_default=False)
    ] = None,
) -> None:
    """Copy the folder of a run, or a folder in it; a repeated fetch transfers only what is new."""
    target = folder or Path(_name_of(place))
    with _files(place) as files:
        done = files.fetch(target, _tell)
    for left_out in done.left_out:
        err.print(f"left out: {left_out}", markup=False)
    out.print(
        f"{target}: {done.files} files, {done.bytes_read} bytes; {done.unchanged} were there already", markup=False
    )


def _tell(text: str) -> None:
    err.print(text, markup=False)


def _files(place: str, *, writable: bool = False, is_file: bool = False) -> AbstractContextManager[RunFiles]:
    from maskfleet.launch.backend import backend_of, parse_handle

    handle = parse_handle(place)
    return backend_of(handle).files(handle, writable=writable, is_file=is_file, report=_tell)


def _name_of(place: str) -> str:
    from maskfleet.launch.backend import parse_handle

    return parse_handle(place).path.rstrip("/").rpartition("/")[2]


def _line(one: FileEntry, place: str) -> str:
    made = datetime.fromtimestamp(one.mtime_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M")
    size = f"{one.size:>14}" if one.kind == "file" else f"{'-' if one.kind == 'folder' else one.kind:>14}"
    return f"{size}  {made}  {one.path or _name_of(place)}{'/' if one.kind == 'folder' else ''}"
