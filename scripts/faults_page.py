"""Write docs/run-anywhere/faults.md from benchmarks/results/{chaos,soak}.json: python scripts/faults_page.py"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "chaos.json"
KILLS = ROOT / "benchmarks" / "results" / "soak.json"
PAGE = ROOT / "docs" / "run-anywhere" / "faults.md"

OPENING = """\
# Faults and outcomes

`make chaos` trains on three hosts in network namespaces of one machine, with `--min-nodes 2`, and lets one fault happen
in each run. It asks `maskfleet status` the whole time and compares every answer with what was done to the hosts and
with the files of the run. A run is complete if it ended by itself, has every step once, and trained on every image of
every epoch.

"Time lost" is from the last step before the fault to the first one after it, including the time to notice it; a host
that comes back costs a second interruption. The runs are tiny and share the machine's cores, so most of the time lost
is starting Python and torch again.
"""


RANDOM_KILLS = """
## Random kills

`make soak` trains for {steps} steps on 1, 2 and 3 ranks of one machine, saves every few steps, and sends SIGKILL,
SIGTERM or SIGINT to a rank, to the supervisor, or to all process groups of the run, at random moments, a quarter of
them while it starts. Some kills come with damage to the newest checkpoint: it is cut off, a bit is flipped, or its
manifest is emptied. The run is started again until it is done. The losses logged up to each kill, those of the finished
run, and its weights must be bit-for-bit those of an undisturbed run, and no process or temporary file may be left.
"""


def page(results: Mapping[str, Any], kills: Mapping[str, Any]) -> str:
    """The whole page."""
    where = _where(results)
    rows = ["| fault | run | steps | time lost | true answers of `status` |", "|---|---|---|---|---|"]
    rows += [_row(fault) for fault in results["faults"]]
    untrue = [f"* {fault['name']}: {problem}" for fault in results["faults"] for problem in fault.get("untrue", ())]
    parts = [OPENING, *rows, "", f"Measured on {where}; this page is generated from `benchmarks/results/chaos.json`."]
    if untrue:
        parts += ["", "Answers that were not true:", "", *untrue]
    return "\n".join(parts) + "\n" + _random_kills(kills)


def _random_kills(kills: Mapping[str, Any]) -> str:
    rows = ["| ranks | kills of a rank | of the supervisor | of all groups | runs | bit-equal |"]
    rows += ["|---|---|---|---|---|---|"]
    for of_ranks in sorted(kills["results"], key=lambda result: result["ranks"]):
        hit = " | ".join(str(of_ranks.get(target, 0)) for target in ("rank", "supervisor", "group"))
        equal = "all" if of_ranks["bit_equal"] else "no"
        rows.append(f"| {of_ranks['ranks']} | {hit} | {of_ranks['runs']} | {equal} |")
    damaged = sum(count for kind, count in kills["kills_by"]["damage"].items() if kind != "None")
    total = sum(of_ranks["kills"] for of_ranks in kills["results"])
    facts = f"{total} kills in {kills['minutes']:.0f} minutes, {damaged} with a damaged checkpoint."
    measured = f"{facts} Measured on {_where(kills)}, from `benchmarks/results/soak.json`."
    return "\n".join([RANDOM_KILLS.format(steps=kills["steps_per_run"]), *rows, "", measured]) + "\n"


def _where(results: Mapping[str, Any]) -> str:
    machine = results["machine"]
    return f"{machine['cpu']}, {machine['cores']} cores, commit {results['commit']}, seed {results['seed']}"


def _row(fault: Mapping[str, Any]) -> str:
    if "not_tried" in fault:
        return f"| {fault['what']} | not tried: {fault['not_tried']} | | | |"
    run = fault["outcome"] if fault["complete"] else f"{fault['outcome']}, steps are missing"
    true = fault["answers"] - len(fault["untrue"])
    return f"| {fault['what']} | {run} | {fault['steps']} | {fault['lost_s']:.0f} s | {true} of {fault['answers']} |"


if __name__ == "__main__":
    chaos, soak = (json.loads(path.read_text(encoding="utf-8")) for path in (RESULTS, KILLS))
    PAGE.write_text(page(chaos, soak), encoding="utf-8")
