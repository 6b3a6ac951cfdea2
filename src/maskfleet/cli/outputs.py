"""Where a command writes its result, tried before the work: afterwards, minutes of work would be lost."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from maskfleet.errors import MaskfleetError
from maskfleet.system.files import expect_new_file


def expect_writable(path: Path, *, option: str) -> None:
    """Raise MaskfleetError unless `path`, which `option` names, can be created or replaced; changes nothing."""
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        expect_new_file(folder)
    except OSError as error:
        raise MaskfleetError(
            f"{path} cannot be written: {error.strerror}", remedy=f"choose another place with {option}"
        ) from error
