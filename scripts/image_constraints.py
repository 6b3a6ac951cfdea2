"""Write deploy/docker/constraints.txt: the pins of requirements.txt and of the notebook that the images need."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "deploy" / "docker" / "constraints.txt"
# torch needs it, and every environment has one: requirements.txt leaves it to them.
BESIDES = {"setuptools": "setuptools==84.2.1"}
HEADER = "# Versions in the images: scripts/image_constraints.py writes this file. pip uses its own index.\n"


def main() -> None:
    TARGET.write_text(text(), encoding="utf-8")


def text() -> str:
    """The whole file."""
    used = dependencies()
    ours = {name: line for name, line in pins(ROOT / "requirements.txt").items() if name in used}
    notebook = pins(ROOT / "scripts" / "tools" / "notebook.txt")
    lines = {**notebook, **ours, **BESIDES}
    return HEADER + "".join(f"{lines[name]}\n" for name in sorted(lines))


def pins(path: Path) -> dict[str, str]:
    """Each pin of a file by its normalized name, without its marker."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        pin = line.split("#")[0].split(";")[0].strip()
        if pin:
            found[canonicalize_name(re.split(r"[\[=]", pin)[0])] = pin
    return found


def dependencies() -> set[str]:
    """Normalized names of everything that `maskfleet[aws]` needs on Linux, by the metadata of what is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pending = [Requirement(one) for one in project["dependencies"] + project["optional-dependencies"]["aws"]]
    found: set[str] = {"triton"}  # the dependency of torch's builds for CUDA alone
    seen: set[str] = set()
    while pending:
        one = pending.pop()
        if str(one) in seen:
            continue
        seen.add(str(one))
        found.add(canonicalize_name(one.name))
        try:
            below = [Requirement(line) for line in requires(one.name) or []]
        except PackageNotFoundError:  # another package pins it exactly, or requirements.txt would have it
            continue
        environments = [{"extra": extra} for extra in ("", *one.extras)]
        pending += [
            two
            for two in below
            if two.marker is None or any(two.marker.evaluate(environment) for environment in environments)
        ]
    return found


if __name__ == "__main__":
    main()
