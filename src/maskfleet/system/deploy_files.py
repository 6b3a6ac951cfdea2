"""Where the files of the package are that are not Python: `deploy/` (charts, Terraform) and `notebooks/`."""

from __future__ import annotations

from pathlib import Path

from maskfleet.errors import MaskfleetError

_PACKAGE = Path(__file__).resolve().parent.parent


def deploy_path(*parts: str) -> Path:
    """A file or folder under `deploy/`: that of the checkout if there is one, else of the installed package."""
    return _shipped("deploy", *parts)


def notebooks_path() -> Path:
    """The folder of notebooks, found in the same way."""
    return _shipped("notebooks")


def _shipped(folder: str, *parts: str) -> Path:
    for root in (_PACKAGE.parent.parent / folder, _PACKAGE / folder):
        found = root.joinpath(*parts)
        if found.exists():
            return found
    name = "/".join((folder, *parts))
    raise MaskfleetError(f"{name} is missing", remedy="reinstall maskfleet: its files are not complete")
