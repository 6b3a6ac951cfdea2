"""One run with one fault: inflicts it, asks for the status all the time, and tells what came out."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from client import Client, run_dir_of
from faults import ALIVE, GONE, Fault, Target, leader_of
from truth import Phase, Witness, summary

from maskfleet.launch.supervise.job_files import JobFolder
from maskfleet.training.output.metrics import read_metrics

HOSTS, MIN_NODES = 3, 2
IMAGES = 12  # of the training set
LIMIT_S = 900.0
BUSY, ENDED = frozenset({"pending", "running"}), frozenset({"done", "failed"})
SET = ("-s", "eval.every_epochs=0", "-s", "checkpoint.every_epochs=5")


def outcome_of(
    fault: Fault, client: Client, choice: random.Random, epochs: int, *, keep: Path | None = None
) -> dict[str, Any]:
    """Run once with `fault`; returns what came out. The logs are copied to the folder `keep`."""
    print(f"{fault.name}: {fault.what}", flush=True)
    about = {"name": fault.name, "what": fault.what}
    if fault.needs and not Path(fault.needs).exists():
        return {**about, "not_tried": f"{fault.needs} is missing"}
    target = Target(client.cluster, JobFolder(Path()), choice.randint(1, HOSTS))
    fault.prepare(target)
    at_step, began = choice.randint(20, 60), time.monotonic()
    name = f"chaos-{fault.name.replace(' ', '-')}"
    options = ["--name", name, "--min-nodes", str(MIN_NODES), "--max-restarts", "10"]
    handle = client.launched(*options, *SET, "-s", f"train.epoch_schedule=[[{epochs}, null]]")
    target.folder = JobFolder(run_dir_of(handle))
    everywhere = (ALIVE,) * HOSTS
    with Witness(target.folder.run_dir, lambda: client.status(handle), Phase("before", BUSY, everywhere)) as witness:
        ended = _until(lambda: (target.folder.last_step() or 0) >= at_step)
        if ended and not fault.is_none:
            target.host = leader_of(target.folder) if fault.on_leader else target.host
            _inflict(fault, target, witness)
        witness.enter(Phase("after", BUSY | ENDED, _hosts(target, fault, ALIVE | GONE | ENDED | fault.states, ENDED)))
        ended = _until(lambda: target.folder.outcome() is not None)
        outcome = target.folder.outcome()
        state = outcome.state if outcome is not None else "running"
        witness.enter(Phase("over", frozenset({state}), (ALIVE | GONE | ENDED | {"silent"},) * HOSTS))
        time.sleep(5)
    if not ended:
        client("cancel", handle)
    fault.clean_up(target)
    if keep is not None:
        shutil.copytree(target.folder.path, keep / name, dirs_exist_ok=True)
    result = {**about, "host": f"node{target.host}", "at_step": at_step, "took_s": round(time.monotonic() - began)}
    return {**result, **_facts(target.folder, witness, epochs)}


def _inflict(fault: Fault, target: Target, witness: Witness) -> None:
    witness.enter(Phase("noticing", BUSY, _hosts(target, fault, ALIVE | fault.states)))
    fault.begin(target)
    if fault.hold_s:
        time.sleep(min(fault.hold_s, 25))
        witness.enter(Phase("fault", BUSY, _hosts(target, fault, fault.states)))
        time.sleep(max(0.0, fault.hold_s - 25))
    fault.end(target)


def _hosts(
    target: Target, fault: Fault, states: frozenset[str], more: frozenset[str] = frozenset()
) -> tuple[frozenset[str], ...]:
    """States that each host may have: `states` for the target, those of the fault and `more` for the others."""
    return tuple(states if number == target.host else fault.others | more for number in range(1, HOSTS + 1))


def _facts(folder: JobFolder, witness: Witness, epochs: int) -> dict[str, Any]:
    """What the files of a run show about it."""
    outcome, records = folder.outcome(), read_metrics(folder.run_dir)
    steps = [record["step"] for record in records]
    images = sum(record["ranks"] for record in records)
    failures = [event.failure for event in folder.events() if event.failure is not None]
    complete = steps == list(range(1, len(steps) + 1)) and abs(images - epochs * IMAGES) <= HOSTS * HOSTS
    facts = {
        "outcome": outcome.state if outcome is not None else "did not end",
        "steps": len(steps),
        "complete": complete,  # every step once, and every image of every epoch but for the last batch
        "interruptions": [str(failure) for failure in failures],
        "lost_s": round(sum(failure.lost_s for failure in failures), 1),
        **summary(witness.answers),
    }
    facts["passed"] = facts["outcome"] == "done" and complete and not facts["untrue"]
    print(f"  {json.dumps(facts)}", flush=True)
    return facts


def _until(condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True
