"""Asks for the status of a run the whole time, and checks that every answer was true."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maskfleet.launch.supervise.job_files import JobFolder

NOTICE_S = 30.0  # until supervisors agree that a host is lost, and tell it
AGE_ERROR_S = 12.0  # of the age of the last step: two heartbeats, and a busy machine
ASK_S = 2.0


@dataclass(frozen=True)
class Phase:
    """What `status` may answer while it lasts."""

    name: str
    states: frozenset[str]  # of the job
    hosts: tuple[frozenset[str], ...]  # of each host


@dataclass(frozen=True)
class Answer:
    """An answer of `status`, with what the files showed while it was given."""

    asked_at: float
    answered_at: float
    status: dict[str, Any]
    phases: tuple[Phase, ...]  # those in which it was given
    steps: tuple[int, int]  # least and greatest last step in metrics.jsonl meanwhile
    ages_s: tuple[float, float]  # least and greatest age of the last step meanwhile


def untruths(answer: Answer) -> list[str]:
    """What is wrong with an answer."""
    status, found = answer.status, []
    if "error" in status:
        return [f"no answer: {status['error']}"]
    if not any(status["state"] in phase.states for phase in answer.phases):
        found.append(f"the run is not {status['state']} ({status['detail']})")
    for index, host in enumerate(status["hosts"]):
        if not any(host["state"] in phase.hosts[index] for phase in answer.phases):
            found.append(f"{host['address']} is not {host['state']} ({host['detail']})")
    alive = sum(host["state"] in ("starting", "running", "waiting") for host in status["hosts"])
    if status["state"] == "running" and alive < len(status["hosts"]) and f"{alive} of" not in status["detail"]:
        found.append(f"{alive} hosts are alive, but it says {status['detail']!r}")
    low, high = answer.steps
    if not low <= (status["step"] or 0) <= high:
        found.append(f"the last step was {low} to {high}, not {status['step']}")
    age_s = status.get("step_age_s")
    if age_s is not None and not answer.ages_s[0] - AGE_ERROR_S <= age_s <= answer.ages_s[1] + AGE_ERROR_S:
        found.append(f"the last step was {answer.ages_s[0]:.0f} to {answer.ages_s[1]:.0f} s ago, not {age_s:.0f} s")
    return found


@dataclass
class Witness:
    """Watches a run in the background: its steps several times per second, its status every few seconds."""

    run_dir: Path
    ask: Callable[[], dict[str, Any]]
    phase: Phase
    answers: list[Answer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._steps: list[tuple[float, int, float]] = []  # when, last step, and its age
        self._phases = [(time.monotonic(), self.phase)]
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=work) for work in (self._watch_steps, self._ask_forever)]

    def enter(self, phase: Phase) -> None:
        """From now on the run is in another phase."""
        self._phases.append((time.monotonic(), phase))
        print(f"  {time.strftime('%H:%M:%S')} {phase.name}", flush=True)

    def __enter__(self) -> Witness:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _watch_steps(self) -> None:
        folder, last, changed_at = JobFolder(self.run_dir), 0, time.monotonic()
        while not self._stopped.is_set():
            step, now = folder.last_step() or 0, time.monotonic()
            if step > last:
                changed_at = now
            last = step
            self._steps.append((now, step, now - changed_at))
            self._stopped.wait(0.1)

    def _ask_forever(self) -> None:
        while not self._stopped.is_set():
            asked_at = time.monotonic()
            try:
                status = self.ask()
            except (AssertionError, json.JSONDecodeError, OSError, subprocess.SubprocessError) as error:
                status = {"error": f"{type(error).__name__} {error}"[:500]}
            self._add(asked_at, time.monotonic(), status)
            self._stopped.wait(ASK_S)

    def _add(self, asked_at: float, answered_at: float, status: dict[str, Any]) -> None:
        seen = [one for one in self._steps if asked_at - 3 <= one[0]] or self._steps[-1:] or [(0.0, 0, 0.0)]
        starts = [*self._phases[1:], (float("inf"), None)]
        phases = tuple(
            phase
            for (begin, phase), (end, _) in zip(self._phases, starts, strict=True)
            if begin <= answered_at and end + NOTICE_S >= asked_at
        )
        steps = [step for _, step, _ in seen]
        ages = [age for *_, age in seen]
        answer = Answer(asked_at, answered_at, status, phases, (min(steps), max(steps)), (min(ages), max(ages) + ASK_S))
        self.answers.append(answer)
        for problem in untruths(answer):
            print(f"    UNTRUE: {problem}", flush=True)


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """How many answers there were, and what was wrong with them."""
    problems = [f"{answer.phases[-1].name}: {problem}" for answer in answers for problem in untruths(answer)]
    return {"answers": len(answers), "untrue": problems}
