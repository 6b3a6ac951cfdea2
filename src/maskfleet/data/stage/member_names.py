"""Which members of a zip or tar archive may become files: an archive is never trusted to name its own targets."""

from __future__ import annotations

import stat
import tarfile
import unicodedata
import zipfile
from typing import Literal

from maskfleet.data.stage.manifest import Item, is_own_file, why_refused

Kind = Literal["file", "folder", "link", "device"]

MAX_EXPANSION = 200  # unpacked bytes per byte of an archive; JSON of COCO's kind packs to about a fifth
FREE_BYTES = 1 << 26  # that an archive may unpack to in any case
_UNIX = 3  # the system, in a zip archive, whose file modes are in `external_attr`


class MemberNames:
    """Judges the members of one destination in any order; remembers names, so that no member replaces another."""

    def __init__(self) -> None:
        self._files: dict[str, str] = {}  # name without case -> name
        self._folders: dict[str, str] = {}  # the same for every folder above a file

    def why_refused(self, name: str, kind: Kind, num_bytes: int) -> str | None:
        """Why a member must not be stored, or None; a folder is never stored: files create the folders they need."""
        if kind in ("link", "device"):
            return f"is a {kind}, and only regular files are stored"
        path = name.removesuffix("/") if kind == "folder" else name
        why = why_refused(Item(path, num_bytes))
        if why is not None:
            return why
        if "\\" in path or ":" in path.split("/")[0] or any(unicodedata.category(one) == "Cc" for one in path):
            return "contains a backslash, a drive or a control character"
        if is_own_file(_caseless(path)):
            return "is a name that staging itself uses"
        return None if kind == "folder" else self._why_taken(path)

    def _why_taken(self, path: str) -> str | None:
        key = _caseless(path)
        if key in self._files:
            other = self._files[key]
            return "occurs twice" if other == path else f"differs from {other!r} only by case or accents' encoding"
        if key in self._folders:
            return f"is both a file and a folder ({self._folders[key]!r})"
        above = path.split("/")[:-1]
        folders = ["/".join(above[: depth + 1]) for depth in range(len(above))]
        for folder in folders:
            if _caseless(folder) in self._files:
                return f"is below {self._files[_caseless(folder)]!r}, which is a file"
        self._files[key] = path
        self._folders.update((_caseless(folder), folder) for folder in folders)
        return None


def zip_kind(entry: zipfile.ZipInfo) -> Kind:
    """What a member of a zip archive is; its mode counts only where Unix wrote it."""
    mode = entry.external_attr >> 16 if entry.create_system == _UNIX else 0
    if stat.S_ISLNK(mode):
        return "link"
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "device"
    return "folder" if entry.is_dir() or stat.S_ISDIR(mode) else "file"


def tar_kind(entry: tarfile.TarInfo) -> Kind:
    """What a member of a tar archive is."""
    if entry.issym() or entry.islnk():
        return "link"
    return "file" if entry.isreg() else "folder" if entry.isdir() else "device"


def why_bomb(archive_bytes: int, unpacked_bytes: int) -> str | None:
    """Why an archive of this size must not unpack to that many bytes, or None."""
    if unpacked_bytes <= FREE_BYTES + MAX_EXPANSION * archive_bytes:
        return None
    return f"its {archive_bytes:,} bytes would unpack to {unpacked_bytes:,}"


def _caseless(path: str) -> str:
    """The same for names that a file system without case, or one that normalizes Unicode, takes for one."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())
