"""What a fabric test (bench/fabric.py) printed, beside what the instance type should reach."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from maskfleet.launch.findings import Finding, Verdict, judged
from maskfleet.launch.instances import Bandwidth
from maskfleet.log import FABRIC_MARK

ENOUGH = 0.7  # of what is expected: below that something is wrong, not only noisy
ALL = "all"
_UNITS = ("B", "KiB", "MiB", "GiB")
_REMEDY = (
    "see which transport NCCL uses; the nodes should be in one cluster placement group, all EFA devices requested, and "
    "nothing else running on them; run it on pairs of nodes to find a slow one"
)


@dataclass(slots=True)
class FabricTest:
    """The lines of a test, as they arrive."""

    transport: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)  # smallest size first

    def read(self, line: str) -> bool:
        """Take a line of the log; False if it is not one of the test."""
        _, mark, text = line.partition(FABRIC_MARK)
        if not mark:
            return False
        try:
            found = json.loads(text)
        except ValueError:
            return False
        if "transport" in found:
            self.transport = str(found["transport"])
        else:
            self.rows.append(found)
        return True

    def findings(self, expected: Bandwidth | None) -> list[Finding]:
        """A finding for each size; the largest is compared with what is expected."""
        result = [Finding(ALL, "transport", Verdict.OK, self.transport)] if self.transport else []
        for row in self.rows[:-1]:
            result.append(Finding(ALL, f"all-reduce {size_text(row['bytes'])}", Verdict.OK, _row_text(row)))
        return [*result, *(self._judged(row, expected) for row in self.rows[-1:])]

    def _judged(self, row: dict[str, Any], expected: Bandwidth | None) -> Finding:
        name = f"all-reduce {size_text(row['bytes'])}"
        where = f"{row['ranks']} ranks on {row['hosts']} host{'s' if row['hosts'] > 1 else ''}"
        if expected is None:
            found = f"{_row_text(row)}, {where}; nothing is known about what it should reach"
            return Finding(ALL, name, Verdict.OK, found)
        found = f"{_row_text(row)}, {where}; should reach {expected.gb_per_s:g} GB/s ({expected.source})"
        return judged(ALL, name, row["bus_gb_per_s"] >= ENOUGH * expected.gb_per_s, found, _REMEDY, Verdict.WARN)


def size_text(size: int) -> str:
    """A power of two in the largest unit that fits: 8 B, 512 KiB, 1 GiB."""
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size // 1024, unit + 1
    return f"{size} {_UNITS[unit]}"


def _row_text(row: dict[str, Any]) -> str:
    return f"{row['bus_gb_per_s']:.3g} GB/s, {row['time_us']:,.0f} us"
