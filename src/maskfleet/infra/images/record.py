"""What was built and pushed from this machine, so that `push` and `launch` find it again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from maskfleet.errors import InfraError
from maskfleet.system.files import read_json, write_private_json
from maskfleet.system.lock import locked

_LOCK_WAIT_S = 30
_REMEMBERED = 100  # pushed images


@dataclass(frozen=True, slots=True)
class BuiltImage:
    """An image on this machine."""

    kind: str  # train or notebook
    name: str
    image_id: str
    tag: str
    tool: str
    gpu: bool


@dataclass(frozen=True, slots=True)
class PushedImage:
    """An image in a registry."""

    kind: str
    repository: str
    tag: str
    digest: str
    gpu: bool
    pushed_at: str  # UTC, ISO 8601

    @property
    def reference(self) -> str:
        """The image by its digest; the tag is there for people, and for the name of the notebook image."""
        return f"{self.repository}:{self.tag}@{self.digest}"


class ImageJournal:
    """The file that remembers images, in the state folder of the user."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.folder = _base(env, "XDG_STATE_HOME", ".local/state") / "maskfleet" / "images"
        self.cache = _base(env, "XDG_CACHE_HOME", ".cache") / "maskfleet" / "images"
        self.path = self.folder / "images.json"

    def built(self, kind: str) -> BuiltImage | None:
        """The image of this kind that was built last."""
        found = self._read().get("built", {}).get(kind)
        return BuiltImage(**found) if found else None

    def pushed(self) -> list[PushedImage]:
        """All images that were pushed from here, oldest first."""
        return [PushedImage(**one) for one in self._read().get("pushed", [])]

    def add_built(self, image: BuiltImage) -> None:
        """Remember `image` instead of the one of its kind before."""
        with self._changing() as data:
            data.setdefault("built", {})[image.kind] = asdict(image)

    def add_pushed(self, image: PushedImage) -> None:
        """Remember `image` as the newest one."""
        with self._changing() as data:
            entry = asdict(image)
            others = [
                one
                for one in data.get("pushed", [])
                if (one["repository"], one["digest"], one["tag"]) != (image.repository, image.digest, image.tag)
            ]
            data["pushed"] = [*others, entry][-_REMEMBERED:]

    def _read(self) -> dict[str, Any]:
        data = read_json(self.path)
        try:
            for one in data.get("built", {}).values():
                BuiltImage(**one)
            for one in data.get("pushed", []):
                PushedImage(**one)
        except (TypeError, AttributeError) as error:
            raise InfraError(f"{self.path} is not a record of images: {error}", remedy="delete the file") from error
        return data

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Any]]:
        """The content, which is written back when the block ends; two commands at once do not lose an entry."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(self.folder / "lock", "recording an image", wait_s=_LOCK_WAIT_S):
            data = self._read()
            yield data
            write_private_json(self.path, data)


def _base(env: Mapping[str, str], variable: str, otherwise: str) -> Path:
    given = Path(env.get(variable, ""))
    return given if given.is_absolute() else Path.home() / otherwise
