"""A slow disk: shows a folder at another path, and waits before each read and write as long as a file says.

Run by Debian's own Python, with the packages python3-fusepy and libfuse2: slow_disk.py FOLDER MOUNT_POINT DELAY_FILE
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

from fusepy import FUSE, FuseOSError, Operations  # type: ignore[import-not-found]


class SlowDisk(Operations):  # type: ignore[misc]
    """Passes every operation on to `folder`."""

    def __init__(self, folder: str, delay_file: str) -> None:
        self._folder, self._delay_file = folder, Path(delay_file)

    def __call__(self, operation: str, path: str, *arguments: Any) -> Any:
        if operation in ("read", "write", "fsync", "create", "rename", "open"):
            time.sleep(float(self._delay_file.read_text() or 0))
        try:
            return super().__call__(operation, self._folder + path, *arguments)
        except OSError as error:
            raise FuseOSError(error.errno or errno.EIO) from error

    def access(self, path: str, mode: int) -> None:
        if not os.access(path, mode):
            raise FuseOSError(errno.EACCES)

    def getattr(self, path: str, handle: int | None = None) -> dict[str, Any]:
        found = os.lstat(path)
        names = ("atime", "ctime", "gid", "ino", "mode", "mtime", "nlink", "size", "uid")
        return {f"st_{name}": getattr(found, f"st_{name}") for name in names}

    def readdir(self, path: str, handle: int) -> list[str]:
        return [".", "..", *os.listdir(path)]

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(path)
        names = ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_favail", "f_ffree", "f_files", "f_frsize")
        return {name: getattr(found, name) for name in names}

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags & ~os.O_APPEND)  # the kernel gives the offset of each write

    def create(self, path: str, mode: int, info: Any = None) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT, mode)

    def read(self, path: str, size: int, offset: int, handle: int) -> bytes:
        return os.pread(handle, size, offset)

    def write(self, path: str, data: bytes, offset: int, handle: int) -> int:
        return os.pwrite(handle, data, offset)

    def truncate(self, path: str, length: int, handle: int | None = None) -> None:
        os.truncate(path, length)

    def fsync(self, path: str, data_only: int, handle: int) -> None:
        os.fsync(handle)

    def release(self, path: str, handle: int) -> None:
        os.close(handle)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, self._folder + new)

    def link(self, target: str, source: str) -> None:
        os.link(self._folder + source, target)

    def symlink(self, target: str, source: str) -> None:
        os.symlink(source, target)

    def readlink(self, path: str) -> str:
        return os.readlink(path)

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(path, mode)

    def chown(self, path: str, uid: int, gid: int) -> None:
        os.chown(path, uid, gid)

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(path, mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def utimens(self, path: str, times: tuple[float, float] | None = None) -> None:
        os.utime(path, times)


if __name__ == "__main__":
    # libfuse 2 mounts over a folder with files in it only if it is told to.
    options = {"foreground": True, "nonempty": True, "use_ino": True, "attr_timeout": 0, "entry_timeout": 0}
    FUSE(SlowDisk(sys.argv[1], sys.argv[3]), sys.argv[2], **options)
