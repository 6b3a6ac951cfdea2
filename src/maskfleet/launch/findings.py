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
    refusal: str = ""  # why a launch is refused for it; empty if it is not

    def as_json(self) -> dict[str, str]:
        left_out = ("refusal",) if self.host else ("refusal", "host")
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in left_out}


def judged(host: str, name: str, good: bool, found: str, remedy: str, bad: Verdict = Verdict.FAIL) -> Finding:
    """A finding that is OK and needs no remedy if `good`, else `bad`."""
    return Finding(host, name, Verdict.OK, found) if good else Finding(host, name, bad, found, remedy)
