"""Where the files of `deploy/` are: charts, Terraform and CloudFormation that also work without Python."""

from __future__ import annotations

from pathlib import Path

from maskfleet.errors import MaskfleetError

_PACKAGE = Path(__file__).resolve().parent


def deploy_path(*parts: str) -> Path:
    """A file or folder under `deploy/`: of the checkout where there is one, else of the installed package."""
    for root in (_PACKAGE.parent.parent / "deploy", _PACKAGE / "deploy"):
        if root.is_dir():
            found = root.joinpath(*parts)
            if found.exists():
                return found
            raise MaskfleetError(f"{found} is missing", remedy="install maskfleet again; its files are not complete")
    raise MaskfleetError("the deploy folder is missing", remedy="install maskfleet again; its files are not complete")
