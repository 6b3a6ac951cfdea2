"""The rules by which `make chaos` judges the answers of `status`, and the table that it writes."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from truth import Answer, Phase, summary, untruths

ROOT = Path(__file__).parents[3]
PHASE = Phase("fault", frozenset({"running"}), (frozenset({"running"}), frozenset({"lost"})))
TRUE = {
    "state": "running",
    "detail": "continues with 1 of 2 hosts",
    "step": 7,
    "step_age_s": 20.0,
    "hosts": [
        {"address": "node1", "state": "running", "detail": ""},
        {"address": "node2", "state": "lost", "detail": "no heartbeat for 20 s"},
    ],
}


def answer(**changes: Any) -> Answer:
    return Answer(0.0, 2.0, {**TRUE, **changes}, (PHASE,), (7, 8), (18.0, 22.0))


def test_a_true_answer_has_no_faults() -> None:
    assert untruths(answer()) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"state": "lost"}, "the run is not lost"),
        ({"step": 9}, "the last step was 7 to 8, not 9"),
        ({"step": None}, "not None"),
        ({"step_age_s": 90.0}, "not 90 s"),
        ({"step_age_s": 1.0}, "not 1 s"),
        ({"detail": ""}, "1 hosts are alive"),
        ({"hosts": [TRUE["hosts"][1], TRUE["hosts"][1]]}, "node2 is not lost"),
        ({"error": "TimeoutExpired"}, "no answer"),
    ],
)
def test_each_untruth_is_found(changes: dict[str, Any], problem: str) -> None:
    found = untruths(answer(**changes))
    assert any(problem in one for one in found), found


def test_an_answer_given_while_the_phase_changes_may_fit_either() -> None:
    later = replace(PHASE, name="after", hosts=(frozenset({"running"}), frozenset({"running"})))
    both = replace(answer(), phases=(later, PHASE))
    assert untruths(both) == []
    assert summary([both, replace(both, phases=(later,))])["untrue"] == [
        "after: node2 is not lost (no heartbeat for 20 s)"
    ]


def test_the_page_in_the_documentation_is_that_of_the_committed_results() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "faults_page.py"))
    if not script["RESULTS"].exists():
        pytest.skip("NOT TESTED: docs/run-anywhere/faults.md: run `make chaos` and scripts/faults_page.py")
    results, kills = (json.loads(script[name].read_text()) for name in ("RESULTS", "KILLS"))
    page = script["page"](results, kills)
    assert script["PAGE"].read_text() == page, "run: python scripts/faults_page.py"
    assert results["faults"]
    for fault in results["faults"]:
        assert fault["what"] in page
    assert [result["ranks"] for result in kills["results"] if f"| {result['ranks']} | {result['rank']} |" in page]
