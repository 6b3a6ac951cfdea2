"""The runs below a folder or an S3 prefix: found by their run.yaml, a few folders deep."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from maskfleet.config.load import METRICS_FILE, RUN_FILE
from maskfleet.errors import LaunchError
from maskfleet.launch.overview.summary import FILES, LOG_FILE, RunRecord, RunSummary, summary_of
from maskfleet.launch.supervise.status import status_of
from maskfleet.log import logger
from maskfleet.system.aws import aws_client, aws_error, aws_exceptions, aws_session, code_of
from maskfleet.system.lock import is_held_here

DEPTH = 3  # folders below the one given; a shared volume is too large to search completely
AT_A_TIME = 16  # runs; most of the time is spent waiting for a file server, S3 or a heartbeat
LOG_PART = 1 << 16  # bytes of the beginning and of the end of a log
MAX_PAGES = 5  # of 1000 names: a folder with more of them and no run.yaml holds images
_URL = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(.*))?", re.DOTALL)


def summaries(place: str) -> list[RunSummary]:
    """All runs in or below `place`, a folder or s3://bucket/prefix, the one that changed last first."""
    now = time.time()
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        if place.startswith("s3://"):
            bucket = S3Runs(place)
            found = list(pool.map(lambda listed: summary_of(bucket.files(*listed), now=now), bucket.folders()))
        else:
            folder = Path(place).expanduser()
            if not folder.is_dir():
                raise LaunchError(f"there is no folder {folder}", remedy="give a folder of runs, or s3://bucket/prefix")
            found = list(pool.map(lambda run_dir: _local(run_dir, now), _run_dirs(folder, DEPTH)))
    return sorted(found, key=lambda one: (one.age_s is None, one.age_s, one.run))


def _run_dirs(folder: Path, depth: int) -> Iterator[Path]:
    """Folders with a run.yaml; what is inside of a run is not searched, nor are links followed."""
    try:
        with os.scandir(folder) as entries:
            inside = sorted(
                (entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries if entry.name[0] != "."
            )
    except OSError as error:
        logger.warning("%s cannot be searched: %s", folder, error.strerror)
        return
    if (RUN_FILE, False) in inside:
        yield folder
    elif depth:
        for name, is_folder in inside:
            if is_folder:
                yield from _run_dirs(folder / name, depth - 1)


def _local(run_dir: Path, now: float) -> RunSummary:
    changed_at = {}
    for name in FILES:
        try:
            changed_at[name] = (run_dir / name).stat().st_mtime
        except OSError:
            continue  # the run has not written it yet
    files = RunRecord(
        str(run_dir),
        _content(run_dir / RUN_FILE).decode(errors="replace"),
        _content(run_dir / METRICS_FILE),
        _content(run_dir / LOG_FILE, ends=LOG_PART).decode(errors="replace"),
        changed_at,
    )
    try:
        job = status_of(run_dir).state
    except LaunchError as error:
        logger.warning("%s", error.what)
        job = None
    return summary_of(files, now=now, job=job, is_locked=is_held_here(run_dir / ".lock"))


def _content(path: Path, *, ends: int | None = None) -> bytes:
    """The content of a file, or its first and last `ends` bytes; nothing if it cannot be read."""
    try:
        with path.open("rb") as file:
            if ends is None:
                return file.read()
            first, size = file.read(ends), file.seek(0, os.SEEK_END)
            file.seek(max(len(first), size - ends))
            return first + b"\n" + file.read()
    except OSError:
        return b""


class S3Runs:
    """The runs below an S3 prefix, such as one that `maskfleet` or `aws s3 sync` copied runs to."""

    def __init__(self, url: str) -> None:
        match = _URL.fullmatch(url)
        if match is None:
            raise LaunchError(f"{url!r} is not an S3 URL", remedy="write s3://bucket/prefix")
        prefix = (match[2] or "").strip("/")
        self._bucket, self._prefix = match[1], f"{prefix}/" if prefix else ""
        self._client = aws_client(aws_session("runs in S3"), "s3", connections=AT_A_TIME)

    def folders(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Prefixes that hold a run.yaml, with what S3 lists of the run's files by name."""
        yield from self._below(self._prefix, DEPTH)

    def files(self, prefix: str, listed: dict[str, Any]) -> RunRecord:
        """What a summary needs of the run at `prefix`."""
        log = listed.get(LOG_FILE)
        log_text = b""
        if log is not None and log["Size"]:
            log_text = self._read(prefix + LOG_FILE, f"bytes=0-{LOG_PART - 1}")
            if log["Size"] > LOG_PART:
                log_text += b"\n" + self._read(prefix + LOG_FILE, f"bytes=-{LOG_PART}")
        return RunRecord(
            self._name(prefix).rstrip("/"),
            self._read(prefix + RUN_FILE).decode(errors="replace"),
            self._read(prefix + METRICS_FILE) if METRICS_FILE in listed else b"",
            log_text.decode(errors="replace"),
            {name: one["LastModified"].timestamp() for name, one in listed.items()},
        )

    def _below(self, prefix: str, depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
        listed: dict[str, Any] = {}
        inside: list[str] = []
        with self._errors("list", prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=prefix, Delimiter="/"
            )
            for number, page in enumerate(pages):
                if number == MAX_PAGES:
                    logger.warning("%s has more than %d000 names: not searched further", self._name(prefix), number)
                    break
                listed |= {one["Key"][len(prefix) :]: one for one in page.get("Contents", ())}
                inside += [one["Prefix"] for one in page.get("CommonPrefixes", ())]
        if RUN_FILE in listed:
            yield prefix, {name: listed[name] for name in FILES if name in listed}
        elif depth:
            for one in inside:
                yield from self._below(one, depth - 1)

    def _read(self, key: str, part: str | None = None) -> bytes:
        with self._errors("read", key):
            answer = self._client.get_object(Bucket=self._bucket, Key=key, **({"Range": part} if part else {}))
            return bytes(answer["Body"].read())

    def _name(self, key: str) -> str:
        return f"s3://{self._bucket}/{key}"

    @contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except aws_exceptions() as error:
            where = self._name(key)
            if code_of(error) == "NoSuchBucket":
                raise LaunchError(f"the bucket of {where} does not exist", remedy="check its name") from error
            needed = "s3:ListBucket on the bucket and s3:GetObject on the objects"
            raise aws_error(error, f"{verb} {where}", service="S3", permissions=needed, kind=LaunchError) from error
