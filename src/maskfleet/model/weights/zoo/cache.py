"""Published weights on this machine: fetched once, verified at every use.

The cache has the files, and `pins.json` with the SHA-256 that each file had when it was first fetched. A file that is
fetched again must have the same one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from maskfleet.errors import WeightsError
from maskfleet.log import logger
from maskfleet.model.weights.archives import check_npz
from maskfleet.model.weights.zoo.catalogue import ZooFile
from maskfleet.system.files import cache_folder, read_json, replacing, sha256, write_atomically
from maskfleet.system.lock import locked
from maskfleet.system.web.download import download
from maskfleet.system.web.ranges import WebError, shown

OFFLINE_VARIABLE = "MASKFLEET_OFFLINE"
_WAIT_S = 3600.0  # for another process that fetches the same file


def cached(file: ZooFile) -> Path | None:
    """The file in the cache if it is there and as it was when it was fetched, else None."""
    path = _folder() / file.file_name
    try:
        pin = _pins().get(file.file_name)
        return path if path.is_file() and pin is not None and sha256(path) == pin else None
    except OSError:
        return None  # a cache of another user; fetching says what is wrong with it


def fetch(
    file: ZooFile,
    *,
    mirror: str | None = None,
    from_file: Path | None = None,
    repin: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """The file in the cache, downloaded or copied from `from_file` first unless it is there.

    `repin` accepts a file that differs from the one that was fetched first.
    """
    with _cache_errors():
        _folder().mkdir(parents=True, exist_ok=True)
        with locked(_folder() / f".{file.file_name}.lock", f"fetching {file.file_name}", wait_s=_WAIT_S):
            found = cached(file)
            if found is not None and from_file is None and not repin:
                return found
            target = _folder() / file.file_name
            if from_file is not None:
                _copy(file, from_file, target, repin=repin)
            else:
                _download(file, target, mirror=mirror, repin=repin, progress=progress)
            _pin(file, sha256(target))
            return target


def _download(
    file: ZooFile, target: Path, *, mirror: str | None, repin: bool, progress: Callable[[int, int], None]
) -> None:
    if os.environ.get(OFFLINE_VARIABLE):
        raise _unavailable(file, f"{OFFLINE_VARIABLE} is set, so nothing is downloaded")
    try:
        found = download(
            file.urls(mirror),
            target,
            size=file.size,
            check=lambda path: _check(file, path, repin=repin),
            progress=progress,
        )
    except WebError as error:
        raise _unavailable(file, error.what) from error
    if found.url.startswith("http:"):
        logger.warning(
            "%s was fetched without encryption, from %s: compare its SHA-256, %s, with another copy if that matters",
            file.file_name,
            shown(found.url),
            sha256(target),
        )


def _copy(file: ZooFile, source: Path, target: Path, *, repin: bool) -> None:
    if not source.is_file():
        raise WeightsError(f"{source} does not exist", remedy="check the path")
    if file.size is not None and source.stat().st_size != file.size:
        raise WeightsError(
            f"{source} has {source.stat().st_size:,} bytes, but {file.name} has {file.size:,}",
            remedy=f"download it again from {file.urls(None)[-1]}",
        )
    _check(file, source, repin=repin)
    with source.open("rb") as opened, replacing(target) as out:
        shutil.copyfileobj(opened, out, 1 << 20)


def _check(file: ZooFile, path: Path, *, repin: bool) -> None:
    """WeightsError unless the file is readable weights, and those that are known or were fetched before."""
    try:
        check_npz(path)
    except WeightsError:
        raise
    except Exception as error:  # a zip reader raises nearly anything for a damaged archive
        raise WeightsError(
            f"the file that was fetched as {file.name} is damaged: {error}",
            remedy=f"download {file.urls(None)[-1]} by other means, then `maskfleet weights get {file.name} "
            "--from FILE`",
        ) from error
    expected = file.sha256 or (None if repin else _pins().get(file.file_name))
    found = sha256(path)
    if expected not in (None, found):
        raise WeightsError(
            f"{file.name} has SHA-256 {found}, but {expected} when it was first fetched to {_folder()}",
            remedy=f"do not trust it before you know why; `maskfleet weights get {file.name} --repin` accepts it",
        )


def _pin(file: ZooFile, digest: str) -> None:
    """Record a digest; under a lock of its own, because other files may be fetched at the same time."""
    with locked(_folder() / ".pins.lock", f"changing {_pins_path()}", wait_s=_WAIT_S):
        pins = _pins()
        if pins.get(file.file_name) != digest:
            write_atomically(_pins_path(), json.dumps(pins | {file.file_name: digest}, indent=2, sort_keys=True))


def _pins() -> dict[str, str]:
    return read_json(_pins_path())


def _folder() -> Path:
    return cache_folder("weights")


def _pins_path() -> Path:
    return _folder() / "pins.json"


def _unavailable(file: ZooFile, why: str) -> WeightsError:
    return WeightsError(
        f"{file.file_name} cannot be fetched: {why}",
        remedy=f"on a machine with a connection download {file.urls(None)[-1]}, bring it here, and run `maskfleet "
        f"weights get {file.name} --from FILE`; or give a path, or train from random weights with --recipe scratch",
    )


@contextmanager
def _cache_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WeightsError(
            f"the cache {_folder()} cannot be used: {error.strerror or error}",
            remedy="set MASKFLEET_CACHE to a folder with free space that this user may write",
        ) from error
