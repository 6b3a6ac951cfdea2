"""Create .venv with the pinned versions and this package, with uv if it is installed and pip otherwise.

Needs only the standard library. Does nothing if the pins, pyproject.toml and this file have not changed. A torch in
.venv that is new enough is kept, so you can install a CPU-only or special build there first.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
STAMP = VENV / ".maskfleet-setup"
INPUTS = (ROOT / "requirements.txt", ROOT / "pyproject.toml", Path(__file__))
MIN_TORCH = (2, 11)


def main() -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 - older Pythons run this file too, to print the message
        print(f"maskfleet needs Python 3.11 or newer, this is {sys.version.split()[0]}.", file=sys.stderr)
        print("  → make PYTHON=python3.12 demo   (with the name of a newer Python)", file=sys.stderr)
        return 2
    wanted = fingerprint()
    if PYTHON.exists() and STAMP.exists() and STAMP.read_text() == wanted:
        return 0
    uv = shutil.which("uv")
    if not PYTHON.exists():
        print("setup: creating .venv", flush=True)
        run([uv, "venv", "--python", sys.executable, str(VENV)] if uv else [sys.executable, "-m", "venv", str(VENV)])
    install = [uv, "pip", "install", "--python", str(PYTHON)] if uv else [str(PYTHON), "-m", "pip", "install", "-q"]
    pins = VENV / "pins.txt"
    pins.write_text(pins_to_install())
    print("setup: installing the pinned packages (a minute with a CPU build of torch, more with CUDA)", flush=True)
    run([*install, "-r", str(pins)])
    run([*install, "--no-deps", "--no-build-isolation", "-e", str(ROOT)])
    STAMP.write_text(wanted)
    return 0


def fingerprint() -> str:
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in INPUTS)).hexdigest()


def pins_to_install() -> str:
    """The pins, without that of torch if .venv has one that is new enough."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    if torch_present():
        lines = [line for line in lines if not line.startswith("torch==")]
    return "\n".join(lines) + "\n"


def torch_present() -> bool:
    probe = "import importlib.metadata as m; print(m.version('torch'))"
    found = subprocess.run([str(PYTHON), "-c", probe], capture_output=True, text=True, check=False)
    if found.returncode != 0:
        return False
    return tuple(int(part) for part in found.stdout.split("+")[0].split(".")[:2]) >= MIN_TORCH


def run(command: list[str]) -> None:
    done = subprocess.run(command, check=False)
    if done.returncode != 0:
        print(f"setup: failed: {' '.join(command)}", file=sys.stderr)
        print("  → check the network and the package index of pip or uv, then run make again", file=sys.stderr)
        raise SystemExit(done.returncode)


if __name__ == "__main__":
    raise SystemExit(main())
