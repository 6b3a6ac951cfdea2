"""Why a run failed: the first failing rank, its error, one cause and one next step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from maskfleet.launch.causes import CAUSES, Cause
from maskfleet.launch.job import JobState
from maskfleet.launch.supervise.status import log_lines, status_of

MAX_TRACE_LINES = 40
MAX_LINE = 500  # characters of a line that are shown
MAX_BLOCK = 5000  # lines in which the end of a traceback is looked for
_RANK = re.compile(r"^\[rank(\d{1,6})\]: ?")
_STARTS = re.compile(r"^Traceback \(most recent call last\)|^error: |^Fatal Python error")
_REMEDY = "  → "  # begins the last line of an error of ours
_NOTICED = re.compile(r"lost another rank|Connection (?:closed|reset) by peer|Broken pipe")
SYMPTOMS = ("lost rank", "killed", "rendezvous")  # symptoms: they do not say why it happened
_KILLED = re.compile(r"^\[launch\]: rank (\d+) on host .* ended with code (?!130|143)1[2-9]\d$")  # by a signal
_TORCHRUN = re.compile(r"^(?:[EWI]\d{4} |traceback : |\s*File .*/torch/distributed/(?:run|launcher|elastic))")


@dataclass(frozen=True, slots=True)
class Explanation:
    """One cause with its evidence; `cause` is None if no known cause matches."""

    cause: Cause | None
    evidence: str = ""
    rank: int | None = None
    trace: tuple[str, ...] = ()

    def render(self) -> str:
        """The explanation as text."""
        parts = []
        if self.trace:
            who = f"rank {self.rank}" if self.rank is not None else "the launcher"
            parts.append(f"First to fail was {who}:\n" + "\n".join(f"    {_clipped(line)}" for line in self.trace))
        if self.cause is None:
            parts.append("cause: not known\n  → read the lines above, or all of them with `maskfleet logs HANDLE`")
        else:
            parts.append(f"cause: {self.cause.name}. {self.cause.meaning}\n  → {self.cause.next_step}")
            parts.append(f"seen in: {_clipped(self.evidence.strip())}")
        return "\n\n".join(parts)


def explain_lines(lines: Iterable[str]) -> Explanation:
    """The cause found in the lines of all ranks, which are oldest first."""
    lines = _without_aftermath(lines)
    rank, trace = first_failure(lines)
    texts = ("\n".join(trace), "\n".join(_RANK.sub("", line) for line in lines))
    # The error of the first rank that failed counts more than what the others report about it.
    found = [cause for cause in map(_first_cause, texts) if cause is not None]
    own_reasons = [one for one in found if one[0].name not in SYMPTOMS]
    # What the kernel reports about a GPU explains whatever the rank saw of it.
    own_reasons.sort(key=lambda one: one[0].name != "gpu broken")
    for cause, evidence in own_reasons or found:
        return Explanation(cause, evidence, rank, trace)
    return Explanation(None, rank=rank, trace=trace)


def first_failure(lines: Sequence[str]) -> tuple[int | None, tuple[str, ...]]:
    """(rank, traceback or error message) of the first rank that did not fail because of another one."""
    noticed: tuple[int | None, tuple[str, ...]] = (None, ())
    for number, line in enumerate(lines):
        match = _RANK.match(line)
        own = line[match.end() :] if match else line
        if not _STARTS.match(own) or (match is None and _TORCHRUN.match(own)):
            continue
        rank = int(match[1]) if match else None
        block = _block(lines[number : number + MAX_BLOCK], rank)
        if match is None and any("torch.distributed.elastic.multiprocessing.errors" in text for text in block):
            continue  # torchrun's summary of the ranks' own errors
        if not any(_NOTICED.search(text) for text in block):
            return rank, block
        noticed = noticed if noticed[1] else (rank, block)
    return _root_cause(lines) or noticed


def explain_job(run_dir: Path) -> str:
    """What `maskfleet explain` prints about the job in `run_dir`, whatever its state."""
    status = status_of(run_dir)
    match status.state:
        case JobState.DONE:
            return "The run is done; there is nothing to explain."
        case JobState.CANCELLED:
            return "The run was cancelled.\n  → launch it again to resume from its last checkpoint"
        case JobState.RUNNING | JobState.PENDING:
            lines = [f"The run is {status.state}{f' at step {status.step}' if status.step is not None else ''}."]
            lines += [f"host {host.address}: {host.state} {host.detail}".rstrip() for host in status.hosts]
            return "\n".join([*lines, *status.events[-5:]])
        case _:
            head = f"The run is {status.state}{f': {status.detail}' if status.detail else ''}."
            return f"{head}\n\n{explain_lines(log_lines(run_dir)).render()}"


def _root_cause(lines: Sequence[str]) -> tuple[int, tuple[str, ...]] | None:
    """The rank that a supervisor or torchrun reports as killed, for ranks that died without output."""
    for number, line in enumerate(lines):
        if killed := _KILLED.match(line):
            return int(killed[1]), (line.removeprefix("[launch]: "),)
        if line.startswith("Root Cause"):
            block = [own.strip() for own in lines[number + 1 : number + 8]]
            rank = next((match for own in block if (match := re.match(r"rank\s*: (\d+)", own))), None)
            if rank is not None:
                return int(rank[1]), tuple(own for own in block if own.startswith(("time", "host", "rank", "exitcode")))
    return None


def _without_aftermath(lines: Iterable[str]) -> list[str]:
    """`lines` without torchrun's report of ranks that it terminated because another one had failed."""
    kept, aftermath = [], False
    for line in lines:
        if line.startswith(("Failures:", "Other Failures:")):
            aftermath = True
        elif line.startswith(("Root Cause", "------", "======")):
            aftermath = False
        if not aftermath:
            kept.append(line)
    return kept


def _block(lines: Sequence[str], rank: int | None) -> tuple[str, ...]:
    """The lines of `rank` from the beginning of a traceback to its last line, or of an error of ours to its remedy."""
    block: list[str] = []
    for line in lines:
        match = _RANK.match(line)
        if (int(match[1]) if match else None) != rank:
            continue
        own = line[match.end() :] if match else line
        block.append(own)
        if block[0].startswith("error: "):
            if own.startswith(_REMEDY):
                return tuple(block)
            if len(block) == MAX_TRACE_LINES:
                break
        elif len(block) > 1 and own and not own.startswith((" ", "Traceback", "The above", "During handling")):
            break
    if block and block[0].startswith("error: "):
        return tuple(block[:2])  # another program's, which has no remedy
    if len(block) > MAX_TRACE_LINES:
        return (*block[:5], "…", *block[-(MAX_TRACE_LINES - 6) :])
    return tuple(block)


def _first_cause(text: str) -> tuple[Cause, str] | None:
    for cause in CAUSES:
        match = cause.pattern.search(text)
        if match:
            start, end = text.rfind("\n", 0, match[0]) + 1, text.find("\n", match[1])
            return cause, text[start : end if end >= 0 else len(text)]
    return None


def _clipped(line: str) -> str:
    return line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - 100]} … {line[-100:]}"
