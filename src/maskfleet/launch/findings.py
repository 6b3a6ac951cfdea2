"""What a doctor reports: one finding per check, each with a remedy."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check, on one host or on all of them together."""

    host: str  # `all` for a check across hosts; empty for this machine
    name: str
    verdict: Verdict
    found: str
    remedy: str = ""

    def as_json(self) -> dict[str, str]:
        data: dict[str, str] = dataclasses.asdict(self)
        return data if self.host else {name: value for name, value in data.items() if name != "host"}
