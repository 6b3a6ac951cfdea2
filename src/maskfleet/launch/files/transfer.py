"""Lists, fetches and sends files of a run through agent.py; transfers are verified and resume after a break."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import json
import os
import shutil
import struct
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from maskfleet.errors import ConfigError, ConnectionBrokenError, LaunchError
from maskfleet.launch.files import agent
from maskfleet.launch.files.agent import CHUNK, DRAFT
from maskfleet.system.files import move_into_place

BATCH = 200  # files per request
TRIES = 5  # attempts in a row without progress
AGENT = ("-I", "-c", inspect.getsource(agent))


Report = Callable[[str], None]  # gets a line about the progress


def ignore(text: str) -> None:
    """A Report that prints nothing."""


class Stream(Protocol):
    """Standard input and output of an agent."""

    async def read(self) -> bytes:
        """Some bytes; none at the end."""

    async def write(self, data: bytes) -> None:
        """All of `data`."""


class Pipes:
    """The Stream of an agent with a pipe for its standard input and another for its output, of asyncio or asyncssh."""

    def __init__(self, stdin: Any, stdout: Any) -> None:
        self._stdin, self._stdout = stdin, stdout

    async def read(self) -> bytes:
        data = await self._stdout.read(CHUNK)
        assert isinstance(data, bytes)
        return data

    async def write(self, data: bytes) -> None:
        self._stdin.write(data)
        await self._stdin.drain()


Opener = Callable[[], AbstractAsyncContextManager[Stream]]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file, folder, link or other entry of a volume."""

    path: str
    kind: str
    size: int
    mtime_ns: int


@dataclass
class Fetched:
    """What a fetch did."""

    files: int = 0
    bytes_read: int = 0  # over the network
    unchanged: int = 0
    left_out: list[str] = field(default_factory=list)  # with the reason


class RunFiles:
    """What a handle refers to: a run directory, or something in it; `run` drives the coroutines of `volume`."""

    def __init__(
        self, volume: Volume, run: Callable[[Coroutine[Any, Any, Any]], Any], *, folder: Path | None = None
    ) -> None:
        self._volume, self._run, self._folder = volume, run, folder

    def entries(self) -> list[FileEntry]:
        """What is there; for a file, one entry without a name."""
        found: list[FileEntry] = self._run(self._volume.entries())
        return found

    def fetch(self, folder: Path, report: Report = ignore) -> Fetched:
        """Copy all of it into `folder`, verified; resumes an earlier fetch."""
        if self._folder is not None and folder.resolve() == self._folder.resolve():
            raise ConfigError(f"{folder} is the run itself", remedy="name another folder")
        done: Fetched = self._run(self._volume.fetch(folder, report))
        return done

    def get(self, target: Path) -> Fetched:
        """Copy the file that the handle names to `target`."""
        done: Fetched = self._run(self._volume.get(target))
        return done

    def put(self, source: Path) -> int:
        """Send `source` to the path of the handle; returns the number of bytes sent."""
        sent: int = self._run(self._volume.put(source))
        return sent


class Volume:
    """The files that an agent, opened by `opener`, sees at `where`: a root and a path, or a path inside a run."""

    def __init__(self, opener: Opener, where: dict[str, str], *, pause_s: float = 1.0) -> None:
        self._open, self._where, self._pause_s = opener, where, pause_s

    async def entries(self, *, deep: bool = False) -> list[FileEntry]:
        """What is there; for a file, one entry without a name."""
        async with self._open() as stream:
            lines = _Lines(stream)
            await lines.send({"op": "list", **self._where, "deep": deep})
            found = []
            while "end" not in (one := await lines.receive()):
                found.append(FileEntry(**one))
        return found

    async def fetch(self, folder: Path, report: Report = ignore) -> Fetched:
        """Copy all files into `folder`; files or parts that are there already are not sent again."""
        found = await self.entries(deep=True)
        if [one.path for one in found] == [""]:
            raise LaunchError("that is a file", remedy="copy it with `maskfleet cp`")
        done = Fetched(left_out=[f"{one.path}: a {one.kind}" for one in found if one.kind not in ("file", "folder")])
        folder.mkdir(parents=True, exist_ok=True)
        targets = [(one.path, _target(folder, one.path)) for one in found if one.kind == "file"]
        await self._fetch_all(targets, done, report)
        return done

    async def get(self, target: Path) -> Fetched:
        """Copy the one file that is there to `target`."""
        found = await self.entries()
        if [one.path for one in found] != [""]:
            raise LaunchError("that is a folder", remedy="copy it with `maskfleet fetch`")
        done = Fetched()
        await self._fetch_all([("", target)], done, ignore)
        if done.left_out:
            raise LaunchError(done.left_out[0], remedy="see what is there with `maskfleet ls`")
        return done

    async def put(self, source: Path) -> int:
        """Send the file `source`; returns the number of bytes sent."""
        size, digest = source.stat().st_size, _sum(source, None)
        request = {"op": "receive", **self._where, "size": size, "sha256": digest.hexdigest()}
        broken = 0
        while True:
            try:
                async with self._open() as stream:
                    lines = _Lines(stream)
                    await lines.send(request)
                    there = await lines.receive()
                    have = int(there["have"])
                    offset = have if _sum(source, have).hexdigest() == there["sha256"] else 0
                    await lines.send({"offset": offset})
                    for data in _chunks(source, offset):
                        await stream.write(data)
                    await lines.receive()
                    return size - offset
            except ConnectionBrokenError:
                broken += 1
                if broken >= TRIES:
                    raise
                await asyncio.sleep(self._pause_s)

    async def _fetch_all(self, left: list[tuple[str, Path]], done: Fetched, report: Report) -> None:
        broken = 0
        while left:
            before = _progress(left)
            try:
                await self._fetch_some(left, done, report)
            except ConnectionBrokenError as error:
                broken = broken + 1 if _progress(left) == before else 1
                if broken >= TRIES:
                    raise
                report(f"{error.what}; resuming")
                await asyncio.sleep(self._pause_s)

    async def _fetch_some(self, left: list[tuple[str, Path]], done: Fetched, report: Report) -> None:
        """Fetch one batch over one connection; removes complete files from `left`."""
        drafts = [_Draft(name, target) for name, target in left[:BATCH]]
        async with self._open() as stream:
            lines = _Lines(stream)
            files = [[draft.name, draft.offset, draft.digest.hexdigest()] for draft in drafts]
            await lines.send({"op": "send", **self._where, "files": files})
            for draft in drafts:
                header = await lines.receive(fatal=False)
                if "error" in header:
                    if "path" not in header:
                        raise _refusal(header)
                    done.left_out.append(str(header["error"]))
                else:
                    await _take(lines, draft, header, done)
                    report(draft.name)
                left.pop(0)


def _progress(left: list[tuple[str, Path]]) -> tuple[int, int]:
    """Changes with every byte received: the number of files left, and the size of the partial first one."""
    draft = left[0][1].with_name(left[0][1].name + DRAFT)
    return len(left), draft.stat().st_size if draft.is_file() else 0


class _Draft:
    """A file that is being fetched: the part that is here, and where the rest goes."""

    def __init__(self, name: str, target: Path) -> None:
        self.name, self.target = name, target
        self.path = target.with_name(target.name + DRAFT)
        if target.is_symlink() or self.path.is_symlink():
            raise LaunchError(f"{target} is a link", remedy="remove it, or fetch into another folder")
        self.source = next((one for one in (self.path, target) if one.is_file()), None)
        self.offset = self.source.stat().st_size if self.source is not None else 0
        self.digest = _sum(self.source, None) if self.source is not None else hashlib.sha256()


async def _take(lines: _Lines, draft: _Draft, header: dict[str, Any], done: Fetched) -> None:
    start, size = int(header["start"]), int(header["size"])
    digest = draft.digest if start else hashlib.sha256()
    if start == size and draft.source == draft.target:
        await lines.chunk()
        _expect(digest.hexdigest(), await lines.receive(), draft)
        done.unchanged += 1
        return
    with _writing(draft.target):
        if start and draft.source == draft.target:
            shutil.copyfile(draft.target, draft.path)
        file = draft.path.open("r+b" if start else "wb")
    with file:
        file.seek(start)
        file.truncate()
        while data := await lines.chunk():
            with _writing(draft.target):
                file.write(data)
            digest.update(data)
            done.bytes_read += len(data)
        with _writing(draft.target):
            file.flush()
    _expect(digest.hexdigest(), await lines.receive(), draft)
    with _writing(draft.target):
        move_into_place(draft.path, draft.target)
    os.utime(draft.target, ns=(int(header["mtime_ns"]), int(header["mtime_ns"])))
    done.files += 1


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[None]:
    """Report a failing disk as such, so that it is not taken for a lost connection."""
    try:
        yield
    except OSError as error:
        raise LaunchError(
            f"cannot write {target}: {error.strerror}",
            remedy="free disk space, or fetch into another folder; then try again",
        ) from error


def _expect(digest: str, trailer: dict[str, Any], draft: _Draft) -> None:
    if digest != trailer["sha256"]:
        draft.path.unlink(missing_ok=True)
        raise LaunchError(f"{draft.target} arrived damaged and was discarded", remedy="fetch again")


def _target(folder: Path, name: str) -> Path:
    """The path of `name` in `folder`; raises if the name, or a link in it, leads outside."""
    parts = name.split("/")
    target = folder.joinpath(*parts)
    if any(part in ("", ".", "..") or "\0" in part or os.sep in part for part in parts):
        raise LaunchError(f"{name!r} leaves the folder", remedy="check the run's folder: someone has tampered with it")
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.parent.resolve().is_relative_to(folder.resolve()):
        raise LaunchError(f"{target.parent} is a link that leads elsewhere", remedy="fetch into another folder")
    return target


class _Lines:
    """The agent's protocol: JSON lines, and chunks with their length before them."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._buffer = stream, bytearray()

    async def send(self, thing: dict[str, Any]) -> None:
        await self._stream.write(json.dumps(thing).encode() + b"\n")

    async def receive(self, *, fatal: bool = True) -> dict[str, Any]:
        """The next line; raises if the agent refuses, unless `fatal` is false."""
        while (end := self._buffer.find(b"\n")) < 0:
            await self._more()
        line = bytes(self._buffer[: end + 1])
        del self._buffer[: end + 1]
        try:
            thing = json.loads(line)
        except ValueError as error:
            raise _damaged() from error
        if not isinstance(thing, dict):
            raise _damaged()
        if fatal and "error" in thing:
            raise _refusal(thing)
        return thing

    async def chunk(self) -> bytes:
        """The next chunk; an empty one is the last."""
        (size,) = struct.unpack(">I", await self._exactly(4))
        if size > CHUNK:
            raise _damaged()
        return await self._exactly(size)

    async def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            await self._more()
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    async def _more(self) -> None:
        data = await self._stream.read()
        if not data:
            raise ConnectionBrokenError("the connection ended too early", remedy="try again: it resumes")
        self._buffer += data


def _damaged() -> ConnectionBrokenError:
    return ConnectionBrokenError(
        "the agent's answer is damaged", remedy="try again; check the network between here and there"
    )


def _refusal(thing: dict[str, Any]) -> LaunchError:
    return LaunchError(str(thing["error"]), remedy="see what is there with `maskfleet ls`")


def _sum(path: Path, size: int | None) -> Any:
    """The SHA-256 of the first `size` bytes, or of all."""
    digest = hashlib.sha256()
    left = path.stat().st_size if size is None else size
    with path.open("rb") as file:
        while left > 0 and (data := file.read(min(CHUNK, left))):
            digest.update(data)
            left -= len(data)
    return digest


def _chunks(path: Path, offset: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(offset)
        while data := file.read(CHUNK // 2):
            yield data
