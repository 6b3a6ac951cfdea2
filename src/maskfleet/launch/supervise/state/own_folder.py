"""Whether a supervisor still has its folder: users delete a run that trains, and may launch it again at once."""

from __future__ import annotations

from pathlib import Path

from maskfleet.launch.supervise.job_files import JobFolder

FOLDER_GONE = 5  # exit code of a supervisor whose run was deleted


class OwnFolder:
    """The folder of host `index`, whose lock this process holds."""

    def __init__(self, folder: JobFolder, index: int) -> None:
        self._job, self._lock = folder.path / "job.json", folder.host(index) / "lock"
        self._device = _device_of(self._lock)
        self._holder = self._lock.read_bytes() if self._lock.exists() else b""

    def is_gone(self) -> bool:
        """Whether the run directory was deleted, or another supervisor has one of that name now.

        A file system that is not mounted for a while looks like deleted files, but for its device.
        """
        try:
            return self._lock.read_bytes() not in (self._holder, b"")  # empty: its name is being written
        except (FileNotFoundError, NotADirectoryError):
            return not self._job.exists() and _device_of(self._lock) == self._device
        except OSError:
            return False  # nobody knows now; it is read again


def _device_of(path: Path) -> int | None:
    """The device of `path`, or of the nearest folder above it that exists."""
    for place in (path, *path.parents):
        try:
            return place.stat().st_dev
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            break
    return None
