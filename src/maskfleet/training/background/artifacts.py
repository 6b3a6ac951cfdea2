"""Compiled code of a run in one file, for other machines with the same GPU and the same versions.

A file has a header in JSON and, for each canvas, what `torch.compiler.save_cache_artifacts` returned: pickles and
machine code. Loading it runs what somebody else compiled, so a file is code: only one that nobody else can change is
loaded. Layout: 8 bytes length of the header, header, parts.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from maskfleet.errors import MaskfleetError
from maskfleet.log import logger
from maskfleet.system.files import write_atomically
from maskfleet.training.background.child import CompileJob
from maskfleet.training.background.compiled_before import mark_compiled
from maskfleet.training.background.target import Target

FILE_NAME = "compiled.cache"  # in a run directory
JOBS_NAME = "compile-jobs.json"
_LENGTH_BYTES = 8
_MAX_HEADER = 1 << 20


@dataclass(frozen=True, slots=True)
class CompiledCanvas:
    """The compiled step for one canvas."""

    job: CompileJob
    content: bytes


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says about itself."""

    target: Target
    jobs: tuple[CompileJob, ...]  # of each part
    sizes: tuple[int, ...]  # in bytes, of each part
    sha256: str  # of all parts

    @property
    def canvases(self) -> tuple[tuple[int, int], ...]:
        return tuple(job.canvas for job in self.jobs)


def write_artifacts(path: Path, target: Target, parts: Sequence[CompiledCanvas]) -> None:
    """Write `parts` to `path`, readable by its owner only."""
    content = b"".join(part.content for part in parts)
    header = Header(
        target,
        tuple(part.job for part in parts),
        tuple(len(part.content) for part in parts),
        hashlib.sha256(content).hexdigest(),
    )
    text = json.dumps(asdict(header)).encode()
    write_atomically(path, len(text).to_bytes(_LENGTH_BYTES, "little") + text + content, private=True)


def read_header(path: Path) -> Header:
    """The header of the file, which anybody may have written: nothing of it is run."""
    return _read(path)[0]


def load_artifacts(path: Path, device: torch.device) -> Header:
    """Put the compiled code of `path` into the cache of this machine.

    Raises MaskfleetError if another user could have written it, if it is damaged or for another GPU or version.
    """
    expect_only_own(path)
    header, content = _read(path)
    expected = Target.of(device)
    different = [
        f"{name} {ours} instead of {asdict(header.target)[name]}"
        for name, ours in asdict(expected).items()
        if ours != asdict(header.target)[name]
    ]
    if different:
        raise MaskfleetError(
            f"{path} was compiled for another target; here is {', '.join(different)}",
            remedy="save it on a machine like this one: maskfleet cache save RUN_DIR FILE",
        )
    start = 0
    for job, size in zip(header.jobs, header.sizes, strict=True):
        if torch.compiler.load_cache_artifacts(content[start : start + size]) is not None:
            mark_compiled([job], target=expected)
        start += size
    return header


def load_if_there(path: Path, device: torch.device) -> bool:
    """Load `path` and return whether it was there and could be; what cannot be used is logged, and compiled again."""
    if not path.is_file():
        return False
    try:
        header = load_artifacts(path, device)
    except MaskfleetError as error:
        logger.warning("compiled code is not loaded: %s", error.what)
        return False
    logger.info("loaded compiled code for %d canvases from %s", len(header.canvases), path)
    return True


def expect_only_own(path: Path) -> None:
    """Raise if a user other than this one and root can write `path`, or replace it or a folder above it."""
    real = path.resolve()
    for place in (real, *real.parents):
        try:
            status = place.stat()
        except OSError as error:
            raise MaskfleetError(f"cannot read {place}: {error.strerror}", remedy="check the path") from error
        is_open = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
        if place != real and status.st_mode & stat.S_ISVTX:
            is_open = False  # as in /tmp: others can add files, but not replace them
        if status.st_uid not in (os.getuid(), 0) or is_open:
            raise MaskfleetError(
                f"other users can write {place}, and loading compiled code runs it",
                remedy=f"if you trust the file, copy it to a folder of yours, or: chmod go-w {place}",
            )


def _read(path: Path) -> tuple[Header, bytes]:
    try:
        data = path.read_bytes()
        length = int.from_bytes(data[:_LENGTH_BYTES], "little")
        if length > _MAX_HEADER:
            raise ValueError("the header is too long")
        fields: dict[str, Any] = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length])
        header = Header(
            Target(**fields["target"]),
            tuple(map(CompileJob.from_fields, fields["jobs"])),
            tuple(map(int, fields["sizes"])),
            str(fields["sha256"]),
        )
    except OSError as error:
        raise MaskfleetError(f"cannot read {path}: {error.strerror}", remedy="check the path") from error
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path) from error
    content = data[_LENGTH_BYTES + length :]
    if len(header.jobs) != len(header.sizes):
        raise _damaged(path)
    if sum(header.sizes) != len(content) or hashlib.sha256(content).hexdigest() != header.sha256:
        raise _damaged(path)
    return header, content


def _damaged(path: Path) -> MaskfleetError:
    return MaskfleetError(
        f"{path} is no file of compiled code, or damaged", remedy="write it again: maskfleet cache save RUN_DIR FILE"
    )
