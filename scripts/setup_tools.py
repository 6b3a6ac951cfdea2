"""Create .tools: one environment per list of pins in scripts/tools, for tests that run these programs.

Needs only the standard library. An environment is updated only when its pins have changed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "scripts" / "tools"


def main() -> int:
    failed = [pins.stem for pins in sorted(PINS.glob("*.txt")) if not installed(pins)]
    for name in failed:
        print(f"tools: {name} could not be installed; the tests that need it will be skipped", file=sys.stderr)
    return 1 if failed else 0


def installed(pins: Path) -> bool:
    """Create the environment of `pins` unless it is up to date; whether it is now."""
    folder = ROOT / ".tools" / pins.stem
    stamp = folder / ".pins"
    if stamp.exists() and stamp.read_bytes() == pins.read_bytes():
        return True
    print(f"tools: installing {pins.stem}", flush=True)
    python = folder / "bin" / "python"
    commands = [[sys.executable, "-m", "venv", str(folder)]] if not python.exists() else []
    commands.append([str(python), "-m", "pip", "install", "-q", "-r", str(pins)])
    if any(subprocess.run(command, check=False).returncode for command in commands):
        return False
    stamp.write_bytes(pins.read_bytes())
    return True


if __name__ == "__main__":
    raise SystemExit(main())
