"""Whether a run makes progress, and how much time each failure cost, as a supervisor sees it by its own clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from maskfleet.launch.job import LostTime

RECENT_S = 60.0  # hosts that were lost or came back this long ago are the reason for a restart of the ranks


@dataclass(frozen=True, slots=True)
class Observation:
    """What a supervisor sees at one moment."""

    at: float  # its own clock
    step: int | None  # last step in metrics.jsonl
    checkpoint: int  # step of the newest checkpoint
    attempt: tuple[int, int] = (0, 0)  # generation and restarts: a change means that the ranks were started again
    lost: frozenset[str] = frozenset()  # addresses of lost hosts


@dataclass(slots=True)
class _Trouble:
    """A failure from which the run has not resumed yet."""

    what: list[str]
    at_step: int | None
    since: float  # when the last step before it appeared
    restarted: bool = False
    checkpoint: int = 0  # newest one before the run resumed


@dataclass(slots=True)
class StepWatch:
    """Follows the steps of a run.

    Ranks that resume drop the lines of later steps from metrics.jsonl, so the last step there first goes back to that
    of the checkpoint, and then forward.
    """

    changed_at: float | None = field(default=None, init=False)  # when the last step appeared
    _last: Observation | None = field(default=None, init=False)
    _trouble: _Trouble | None = field(default=None, init=False)
    _reason: tuple[float, str] | None = field(default=None, init=False)  # when, and which host was lost or came back

    def step_age_s(self, now: float) -> float | None:
        """Seconds since the last step, or since the first observation."""
        return None if self.changed_at is None else now - self.changed_at

    def continue_after(self, seen: Observation, what: str) -> None:
        """Begin with a failure, `what`: the observer itself was away, and saw the run last as `seen`."""
        self._last, self.changed_at = seen, seen.at
        self._add(seen, what).restarted = True

    def observe(self, seen: Observation) -> LostTime | None:
        """Take in an observation; returns the failure from which the run has just resumed."""
        last, self._last = self._last, seen
        if last is None or self.changed_at is None:
            self.changed_at = seen.at
            return None
        self._note_troubles(last, seen)
        before, after = last.step or 0, seen.step or 0
        if after == before:
            self._note_checkpoint(seen)
            return None
        resumed = after > before or after > seen.checkpoint  # else ranks that resume have dropped later steps
        if after < before:
            self._restarted(last, seen)
        if not resumed:
            self._note_checkpoint(seen)
            return None
        return self._resumed(seen)

    def _note_troubles(self, last: Observation, seen: Observation) -> None:
        changes = [f"host {address} lost" for address in sorted(seen.lost - last.lost)]
        changes += [f"host {address} back" for address in sorted(last.lost - seen.lost)]
        for what in changes:
            self._reason = seen.at, what
            self._add(last, what)
        if seen.attempt != last.attempt:
            self._restarted(last, seen)

    def _add(self, last: Observation, what: str) -> _Trouble:
        if self._trouble is None:
            assert self.changed_at is not None
            self._trouble = _Trouble([], last.step, self.changed_at, checkpoint=last.checkpoint)
        if what not in self._trouble.what:
            self._trouble.what.append(what)
        return self._trouble

    def _restarted(self, last: Observation, seen: Observation) -> None:
        if self._trouble is None:
            is_known = self._reason is not None and seen.at - self._reason[0] < RECENT_S
            self._add(last, self._reason[1] if is_known and self._reason is not None else "ranks restarted")
        assert self._trouble is not None
        self._trouble.restarted = True

    def _note_checkpoint(self, seen: Observation) -> None:
        if self._trouble is not None:
            self._trouble.checkpoint = max(self._trouble.checkpoint, seen.checkpoint)

    def _resumed(self, seen: Observation) -> LostTime | None:
        self.changed_at, trouble = seen.at, self._trouble
        self._trouble = None
        if trouble is None or not trouble.restarted:
            return None  # the steps never stopped
        return LostTime(", ".join(trouble.what), trouble.at_step, trouble.checkpoint, round(seen.at - trouble.since, 1))
