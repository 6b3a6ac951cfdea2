"""Amazon's EFA installer, which brings libfabric and aws-ofi-nccl: downloaded once and checked."""

from __future__ import annotations

import hashlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from maskfleet.errors import InfraError
from maskfleet.system.files import replacing, sha256

_CHUNK = 1 << 20
_TIMEOUT_S = 60
_OFFLINE = "check the network; or name a copy with --efa-installer FILE, or build without EFA with --no-efa"


@dataclass(frozen=True, slots=True)
class EfaRelease:
    """One version of the installer."""

    version: str
    sha256: str
    url: str

    @property
    def name(self) -> str:
        """The name of the file."""
        return f"aws-efa-installer-{self.version}.tar.gz"


# The version of AWS's own images for PyTorch 2.13. The checksum is the one that several public Dockerfiles pin; nobody
# here has compared it with Amazon's list ("Verify the EFA installer using a checksum" in the EC2 user guide).
PINNED = EfaRelease(
    "1.49.0",
    "cf2e9281a2328a243c76f911a490faed43ca0fecfe4733c25e34b2e92a32c309",
    "https://efa-installer.amazonaws.com/aws-efa-installer-1.49.0.tar.gz",
)


def installer(cache: Path, say: Callable[[str], None], release: EfaRelease = PINNED) -> Path:
    """The installer in the folder `cache`, downloaded if it is not there; its checksum is verified either way."""
    path = cache / release.name
    if path.exists():
        if sha256(path) == release.sha256:
            return path
        say(f"{path} is damaged; downloading it again")
    say(f"downloading {release.url} (700 MB)")
    cache.mkdir(parents=True, exist_ok=True)
    try:
        _download(release, path)
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", None) or error
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it is an open answer, too
        raise InfraError(f"cannot download {release.url}: {reason}", remedy=_OFFLINE) from error
    except OSError as error:
        raise InfraError(
            f"cannot write {path}: {error.strerror or error}",
            remedy="free space there, or set XDG_CACHE_HOME to a folder that can be written",
        ) from error
    return path


def checked_installer(path: Path) -> tuple[Path, str]:
    """A copy that the user named, and its checksum, which must be the pinned one if it is that version."""
    if not path.is_file():
        raise InfraError(f"there is no file {path}", remedy="name Amazon's aws-efa-installer-VERSION.tar.gz")
    found = sha256(path)
    if path.name == PINNED.name and found != PINNED.sha256:
        raise InfraError(
            f"{path} has the SHA-256 {found}, but that of {PINNED.name} is {PINNED.sha256}",
            remedy=f"download {PINNED.url} again",
        )
    return path, found


def _download(release: EfaRelease, path: Path) -> None:
    request = urllib.request.Request(release.url, headers={"User-Agent": "maskfleet"})  # noqa: S310 - a constant
    digest = hashlib.sha256()
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer, replacing(path) as file:  # noqa: S310
        while chunk := answer.read(_CHUNK):
            digest.update(chunk)
            file.write(chunk)
        if digest.hexdigest() != release.sha256:
            raise InfraError(
                f"{release.url} gave a file with another SHA-256 than expected: {digest.hexdigest()}",
                remedy="download it without the proxy in between, and name it with --efa-installer FILE",
            )
