"""Lists, sends and receives files of a run where they are: in a pod, on a host or here.

It is sent to that pod or host and runs there alone: standard library only. It is started as `python3 -I -c SOURCE` and
reads one line of JSON from standard input:

{"op": "list",    "root": R, "path": P, "deep": bool}          entries below R/P, one line of JSON each
{"op": "send",    "root": R, "path": P, "files": [[F, N, S]]}  files R/P/F, from byte N if the SHA-256 before it is S
{"op": "receive", "root": R, "path": P, "size": N, "sha256": S}  R/P gets N bytes from standard input

Instead of root and path, "inside" may name a path in a run directory, which is then the root. Nothing outside the root
is ever touched: `..` is refused, links are not followed. With the arguments `wait SECONDS` it is the main process of a
pod, and exits after that long without any other process.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

Thing = dict[str, Any]
CHUNK = 1 << 16
DRAFT = ".maskfleet-part"  # suffix of a file that is not complete yet


class RefusedError(Exception):
    """A request that is refused; the client gets the message."""


def parts_of(path: str) -> list[str]:
    parts = [part for part in path.split("/") if part]
    if any(part in (".", "..") or "\0" in part for part in parts):
        raise RefusedError(f"{path!r} leaves the folder")
    return parts


def open_below(root: str, parts: list[str], flags: int = os.O_RDONLY, mode: int = 0o644) -> int:
    """A descriptor of root/parts, opened folder by folder without following links."""
    here = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            wanted = flags | os.O_NONBLOCK if last else os.O_RDONLY | os.O_DIRECTORY
            step = os.open(part, wanted | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=here)
            os.close(here)
            here = step
    except OSError as error:
        os.close(here)
        path = "/".join(parts)
        if error.errno in (errno.ENOTDIR, errno.ELOOP) and has_link(root, parts):
            raise RefusedError(f"{path} goes through a link, and links are not followed") from error
        raise RefusedError(f"{path or root}: {error.strerror}") from error
    return here


def has_link(root: str, parts: list[str]) -> bool:
    return any(Path(root, *parts[: number + 1]).is_symlink() for number in range(len(parts)))


def kind_of(mode: int) -> str:
    kinds = ((stat.S_ISREG, "file"), (stat.S_ISDIR, "folder"), (stat.S_ISLNK, "link"))
    return next((name for test, name in kinds if test(mode)), "other")


def entry(path: str, info: os.stat_result) -> Thing:
    kind = kind_of(info.st_mode)
    return {"path": path, "kind": kind, "size": info.st_size if kind == "file" else 0, "mtime_ns": info.st_mtime_ns}


def walk(folder: int, prefix: str, deep: bool) -> Iterator[Thing]:
    """Entries of an open folder, by name."""
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda one: one.name)
    for one in entries:
        try:
            info = one.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue  # a running job removes old checkpoints
        yield entry(prefix + one.name, info)
        if deep and stat.S_ISDIR(info.st_mode):
            try:
                below = os.open(one.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            except OSError:
                continue  # deleted, replaced by a link, or not readable: it is listed without its content
            try:
                yield from walk(below, prefix + one.name + "/", deep)
            finally:
                os.close(below)


def list_(root: str, parts: list[str], asked: Thing, out: BinaryIO) -> None:
    here = open_below(root, parts)
    try:
        info = os.fstat(here)
        if stat.S_ISDIR(info.st_mode):
            for one in walk(here, "", asked.get("deep", False)):
                say(out, one)
        else:
            say(out, entry("", info))
    finally:
        os.close(here)
    say(out, {"end": True})


def send(root: str, parts: list[str], asked: Thing, out: BinaryIO) -> None:
    for path, offset, known in asked["files"]:
        try:
            with os.fdopen(open_below(root, parts + parts_of(path)), "rb") as file:
                send_one(file, path, offset, known, out)
        except RefusedError as error:
            say(out, {"path": path, "error": str(error)})
    say(out, {"end": True})


def send_one(file: BinaryIO, path: str, offset: int, known: str, out: BinaryIO) -> None:
    """Send a header, chunks with their length before them, an empty chunk, and the SHA-256 of the whole file."""
    info = os.fstat(file.fileno())
    if not stat.S_ISREG(info.st_mode):
        raise RefusedError(f"{path} is not a file")
    digest, start = hashlib.sha256(), 0
    if 0 < offset <= info.st_size:
        took = copy(file, offset, digest.update)
        if took == offset and digest.hexdigest() == known:
            start = offset
        else:
            file.seek(0)
            digest = hashlib.sha256()
    say(out, {"path": path, "start": start, "size": info.st_size, "mtime_ns": info.st_mtime_ns})

    def forward(data: bytes) -> None:
        digest.update(data)
        out.write(struct.pack(">I", len(data)) + data)

    copy(file, info.st_size - start, forward)
    out.write(struct.pack(">I", 0))
    say(out, {"sha256": digest.hexdigest()})


def copy(source: BinaryIO, size: int, take: Callable[[bytes], object]) -> int:
    """Pass up to `size` bytes to `take`; returns how many there were."""
    left = size
    while left > 0:
        data = source.read(min(CHUNK, left))
        if not data:
            break
        take(data)
        left -= len(data)
    return size - left


def receive(root: str, parts: list[str], asked: Thing, source: BinaryIO, out: BinaryIO) -> None:
    """Receive a file, resuming an earlier attempt with the same content; it appears atomically."""
    if not parts:
        raise RefusedError("name the file to write")
    make_folders(root, parts[:-1])
    folder = open_below(root, parts[:-1])
    name = parts[-1]
    try:
        if is_folder(name, folder):
            raise RefusedError("/".join(parts) + " is a folder")
        draft = open_below(root, [*parts[:-1], name + DRAFT], os.O_RDWR | os.O_CREAT)
        with os.fdopen(draft, "r+b") as file:
            digest = hashlib.sha256()
            have = copy(file, asked["size"], digest.update)
            say(out, {"have": have, "sha256": digest.hexdigest()})
            offset = json.loads(source.readline())["offset"]
            if offset != have:
                offset, digest = 0, hashlib.sha256()
            file.seek(offset)
            file.truncate()

            def keep(data: bytes) -> None:
                digest.update(data)
                file.write(data)

            copy(source, asked["size"] - offset, keep)
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != asked["sha256"]:
            raise RefusedError("what arrived is not what was sent; nothing was changed")
        os.replace(name + DRAFT, name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.close(folder)
    say(out, {"end": True})


def is_folder(name: str, folder: int) -> bool:
    try:
        info = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(info.st_mode)


def make_folders(root: str, parts: list[str]) -> None:
    for number in range(len(parts)):
        above = open_below(root, parts[:number])
        try:
            os.mkdir(parts[number], dir_fd=above)
        except FileExistsError:
            continue
        except OSError as error:
            raise RefusedError("/".join(parts[: number + 1]) + f": {error.strerror}") from error
        finally:
            os.close(above)


def location(asked: Thing) -> tuple[str, list[str]]:
    """(root, parts below it) of a request."""
    if "inside" not in asked:
        return str(asked["root"]), parts_of(asked["path"])
    whole = str(Path(asked["inside"]).expanduser())
    parts = parts_of(whole)
    for number in range(len(parts), 0, -1):
        root = "/" + "/".join(parts[:number])
        if Path(root, "launch", "job.json").exists():
            return root, parts[number:]
    raise RefusedError(f"there is no run in {whole}")


def say(out: BinaryIO, thing: Thing) -> None:
    out.write(json.dumps(thing).encode() + b"\n")
    out.flush()


def wait(idle_s: float) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    last = time.monotonic()
    while time.monotonic() - last < idle_s:
        if any(one.name.isdigit() and int(one.name) not in (1, os.getpid()) for one in Path("/proc").iterdir()):
            last = time.monotonic()
        time.sleep(1)


def main() -> int:
    if sys.argv[1:2] == ["wait"]:
        wait(float(sys.argv[2]))
        return 0
    source, out = sys.stdin.buffer, sys.stdout.buffer
    try:
        asked = json.loads(source.readline())
        root, parts = location(asked)
        if asked["op"] == "list":
            list_(root, parts, asked, out)
        elif asked["op"] == "send":
            send(root, parts, asked, out)
        elif asked["op"] == "receive":
            receive(root, parts, asked, source, out)
    except RefusedError as error:
        say(out, {"error": str(error)})
    except OSError as error:
        say(out, {"error": f"{error.filename or 'the volume'}: {error.strerror}"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
