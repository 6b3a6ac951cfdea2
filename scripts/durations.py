"""Write tests/durations.json from JUnit files: seconds per test file, and the tests that take longest.

    .venv/bin/python -m pytest -n 2 --dist loadscope --junitxml=junit.xml
    python scripts/durations.py junit.xml

Use it to decide which tests get the marker `slow`. Measure on an idle machine. Needs only the standard library.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LONG_S = 4.0


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    (ROOT / "tests" / "durations.json").write_text(json.dumps(table(map(Path, sys.argv[1:])), indent=1) + "\n")
    return 0


def table(reports: Iterable[Path]) -> dict[str, dict[str, float]]:
    """Seconds, setup and teardown included, by file and by test; the longest first."""
    files: dict[str, float] = defaultdict(float)
    tests: dict[str, float] = defaultdict(float)
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314 - pytest wrote it on this machine
            file = case.attrib["classname"].replace(".", "/") + ".py"
            seconds = float(case.attrib["time"])
            files[file] += seconds
            tests[f"{file}::{case.attrib['name'].partition('[')[0]}"] += seconds
    longest = {name: seconds for name, seconds in tests.items() if seconds >= LONG_S}
    return {"files": _ordered(files), "tests": _ordered(longest)}


def _ordered(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(seconds[name], 1) for name in sorted(seconds, key=lambda name: -seconds[name])}


if __name__ == "__main__":
    raise SystemExit(main())
