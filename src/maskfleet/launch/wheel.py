"""Builds a wheel from the installed maskfleet without build tools; the same files give the same bytes."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import io
import zipfile
from pathlib import Path

import maskfleet
from maskfleet import __version__
from maskfleet.errors import LaunchError
from maskfleet.system.deploy_files import deploy_path, notebooks_path


def built_wheel() -> tuple[str, str, bytes]:
    """(digest, file name, content) of the wheel; the digest tells wheels of one version apart."""
    try:
        metadata = importlib.metadata.distribution("maskfleet").read_text("METADATA")
    except importlib.metadata.PackageNotFoundError:
        metadata = None
    if metadata is None:
        raise LaunchError("maskfleet is not installed here, so its wheel cannot be built", remedy="pip install -e .")
    package = Path(maskfleet.__file__).parent
    info = f"maskfleet-{__version__}.dist-info"
    files = {f"maskfleet/{path.relative_to(package).as_posix()}": path.read_bytes() for path in _sources(package)}
    for name, folder in (("deploy", deploy_path()), ("notebooks", notebooks_path())):
        for path in _sources(folder):  # in a checkout they are beside the package
            files[f"maskfleet/{name}/{path.relative_to(folder).as_posix()}"] = path.read_bytes()
    files[f"{info}/METADATA"] = metadata.encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: maskfleet\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = b"[console_scripts]\nmaskfleet = maskfleet.cli.main:main\n"
    record = "".join(f"{name},sha256={_digest(content)},{len(content)}\n" for name, content in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    digest = hashlib.sha256(b"".join(files.values())).hexdigest()[:12]
    return digest, f"maskfleet-{__version__}-py3-none-any.whl", packed.getvalue()


def _sources(package: Path) -> list[Path]:
    return sorted(
        path
        for path in package.rglob("*")
        if path.is_file()
        and not {"__pycache__", ".terraform"}.intersection(path.parts)
        and path.suffix not in (".pyc", ".part", ".tfstate")
    )


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
