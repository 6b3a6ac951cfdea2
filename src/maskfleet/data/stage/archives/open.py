"""Opens an archive by its content."""

from __future__ import annotations

from pathlib import Path

from maskfleet.data.stage.archives.tar_file import TarSource
from maskfleet.data.stage.archives.zip_file import ZipSource
from maskfleet.data.stage.folder import folder_errors
from maskfleet.errors import DataError

_ZIP = (b"PK\x03\x04", b"PK\x05\x06")
_GZIP = b"\x1f\x8b"
_TAR, _TAR_AT = b"ustar", 257


def open_archive(path: Path) -> ZipSource | TarSource:
    """The archive `path`: zip, tar, or tar compressed with gzip, whatever its name is."""
    with folder_errors(str(path)), path.open("rb") as file:
        start = file.read(512)
    if start.startswith(_ZIP):
        return ZipSource(path)
    if start.startswith(_GZIP):
        return TarSource(path, compressed=True)
    if start[_TAR_AT:].startswith(_TAR):
        return TarSource(path, compressed=False)
    raise DataError(
        f"{path} is neither a folder nor a zip, tar or tar.gz archive",
        remedy="give the folder that contains annotations/ and the images, or such an archive",
    )
