"""Where the files that are no Python are: `deploy/` with charts and Terraform, which also work alone, and notebooks."""

from __future__ import annotations

from pathlib import Path

from maskfleet.errors import MaskfleetError

_PACKAGE = Path(__file__).resolve().parent.parent


def deploy_path(*parts: str) -> Path:
    """A file or folder under `deploy/`: of the checkout where there is one, else of the installed package."""
    return _shipped("deploy", *parts)


def notebooks_path() -> Path:
    """The folder of notebooks, found likewise."""
    return _shipped("notebooks")


def _shipped(folder: str, *parts: str) -> Path:
    for root in (_PACKAGE.parent.parent / folder, _PACKAGE / folder):
        found = root.joinpath(*parts)
        if found.exists():
            return found
    name = "/".join((folder, *parts))
    raise MaskfleetError(f"{name} is missing", remedy="install maskfleet again; its files are not complete")
