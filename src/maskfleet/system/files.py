"""Files that other processes and hosts may read at any moment: they see the old content or the new, never a part.

One policy for all of maskfleet:

- New content goes into a temporary file, which is then renamed to its target. Its name begins with a dot, ends with
  `.tmp` and has a random part, because threads, processes and hosts may all write to one shared folder.
- The content is synced to disk before the rename and the folder after it: a power cut leaves the old file or the new
  one, and once the call has returned it is the new one. `durable=False` skips both, for files that nobody needs after a
  power cut (heartbeats) and for those that the caller syncs later, all at once.
- Permissions follow the umask. `private` files are readable by their owner only (0600), from the first byte.
- A write that fails raises OSError naming the target, keeps the old file and removes the temporary one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from maskfleet.errors import MaskfleetError

_TEMPORARIES = (".*.tmp", ".tmp*")  # ours, and those of safetensors
_NAME_CHARACTERS = 40  # of the target's name in the temporary one: a file name has at most 255 bytes
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)  # writing raises them without a file name
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)  # some FUSE and network file systems; Windows


def write_atomically(path: Path, content: str | bytes, *, private: bool = False, durable: bool = True) -> None:
    """Replace the content of `path`, or create it; its folder must exist."""
    with replacing(path, private=private, durable=durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(
    path: Path, *, private: bool = False, durable: bool = True, temporary_in: Path | None = None
) -> Iterator[BinaryIO]:
    """An open file to write; it takes the place of `path` when the block ends, unless the block raises.

    `temporary_in` is another folder of the same file system for the temporary file.
    """
    with _temporary(path, temporary_in or path.parent) as temporary:
        with _new_file(temporary, private=private, durable=durable) as file:
            yield file
        temporary.replace(path)
        if durable:
            _sync_folder(path.parent)


@contextmanager
def replacing_by_path(path: Path) -> Iterator[Path]:
    """The same for code that writes to a path instead of an open file."""
    with _temporary(path, path.parent) as temporary:
        with _new_file(temporary, durable=False) as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        yield temporary
        if stat.S_IMODE(temporary.stat().st_mode) != mode:  # safetensors renames a 0600 file of its own to it
            temporary.chmod(mode)
        move_into_place(temporary, path)


def expect_new_file(folder: Path) -> None:
    """Raise OSError unless a file can be created in `folder`."""
    with _temporary(folder / "file", folder) as temporary:
        with _new_file(temporary, durable=False):
            pass
        temporary.unlink()


def write_once(path: Path, content: str) -> bool:
    """Create `path` with all of its content; False, and no change, if it exists: the first of several writers wins."""
    with _temporary(path, path.parent) as temporary:
        with _new_file(temporary) as file:
            file.write(content.encode())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
    _sync_folder(path.parent)
    return True


def sync_open_file(descriptor: int, path: Path, *, is_new: bool) -> None:
    """Sync what was appended to `path` to disk and, if the file is new, its entry in the folder."""
    os.fsync(descriptor)
    if is_new:
        _sync_folder(path.parent)


def move_into_place(temporary: Path, path: Path) -> None:
    """Rename a file that is completely written to `path`, on the same file system."""
    with temporary.open("r+b") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
    _sync_folder(path.parent)


def remove_temporaries(folder: Path) -> None:
    """Delete the temporary files that killed writers left in `folder`, where nobody else may be writing now."""
    for pattern in _TEMPORARIES:
        for left in folder.glob(pattern):
            left.unlink(missing_ok=True)


@contextmanager
def building_folder(path: Path) -> Iterator[Path]:
    """A new folder to fill; it becomes `path`, which must be absent or empty, when the block ends without an error.

    Nothing is synced: such a folder holds many files, and the caller can create them again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    building = _temporary_path(path, path.parent)
    building.mkdir()
    try:
        yield building
        building.replace(path)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


@contextmanager
def set_aside(path: Path) -> Iterator[None]:
    """Rename the folder `path` while the block runs, then delete it; if the block raises, rename it back instead."""
    aside = _temporary_path(path, path.parent)
    path.rename(aside)
    try:
        yield
    except BaseException:
        aside.rename(path)
        raise
    shutil.rmtree(aside)


def cache_folder(kind: str, env: Mapping[str, str] = os.environ) -> Path:
    """The user's folder for files that can be made or fetched again.

    It is below MASKFLEET_CACHE, else below XDG_CACHE_HOME; in the temporary folder for a user without a home folder.
    """
    own = env.get("MASKFLEET_CACHE")
    if own:
        return Path(own).expanduser() / kind
    base = Path(env.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        try:
            base = Path.home() / ".cache"
        except RuntimeError:  # containers run with user ids that have no account
            base = Path(tempfile.gettempdir()) / f"cache-{os.getuid()}"
    return base / "maskfleet" / kind


def sha256(path: Path) -> str:
    """SHA-256 of a file, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_private_json(path: Path, data: object) -> None:
    """Write `data` as JSON that only its owner can read, and so its folder if that is new."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(path, f"{json.dumps(data, indent=2, sort_keys=True)}\n", private=True)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; an empty one if there is no such file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise _damaged(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise _damaged(f"{path} does not hold a JSON object")
    return data


def _damaged(what: str) -> MaskfleetError:
    return MaskfleetError(what, remedy="fix the file, or delete it to start over")


def _temporary_path(path: Path, folder: Path) -> Path:
    return folder / f".{path.name[:_NAME_CHARACTERS]}.{secrets.token_hex(6)}.tmp"


@contextmanager
def _temporary(path: Path, folder: Path) -> Iterator[Path]:
    """A temporary path for the new content of `path`, removed if the block raises."""
    temporary = _temporary_path(path, folder)
    try:
        yield temporary
    except BaseException as error:
        with suppress(OSError):  # what went wrong first matters more
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and (
            str(error.filename) == str(temporary) or (error.filename is None and error.errno in FULL_DISK)
        ):
            error.filename = str(path)
            del error.filename2  # that of a rename is the target, too
        raise


@contextmanager
def _new_file(path: Path, *, private: bool = False, durable: bool = True) -> Iterator[BinaryIO]:
    mode = 0o600 if private else 0o666
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        yield file
        file.flush()
        if durable:
            os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
