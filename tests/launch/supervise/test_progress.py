"""What a failure cost is worked out from the steps that a supervisor sees."""

from __future__ import annotations

import pytest

from maskfleet.launch.job import LostTime
from maskfleet.launch.supervise.state.progress import Observation, StepWatch

NODE2 = frozenset({"node2"})


def failures(*seen: Observation) -> list[LostTime]:
    progress = StepWatch()
    return [failure for one in seen if (failure := progress.observe(one)) is not None]


def test_a_lost_host_costs_the_time_to_the_next_step_and_the_steps_since_the_checkpoint() -> None:
    (failure,) = failures(
        Observation(0, 300, 300),
        Observation(10, 310, 300),
        Observation(26, 310, 300, lost=NODE2),
        Observation(30, 310, 300, (1, 0), lost=NODE2),
        Observation(49, 300, 300, (1, 0), lost=NODE2),  # the ranks that resume drop later steps
        Observation(51, 301, 300, (1, 0), lost=NODE2),
        Observation(53, 302, 300, (1, 0), lost=NODE2),
    )
    assert failure == LostTime("host node2 lost", 310, 300, 41)
    assert str(failure) == "host node2 lost at step 310, resumed from 300 after 41 s"


def test_steps_that_resume_between_two_looks_are_seen_too() -> None:
    (failure,) = failures(Observation(0, 310, 300), Observation(2, 305, 300))
    assert failure == LostTime("ranks restarted", 310, 300, 2)


def test_a_run_without_a_checkpoint_resumes_from_the_beginning() -> None:
    (failure,) = failures(
        Observation(0, 7, 0),
        Observation(9, 7, 0, (0, 1)),
        Observation(12, None, 0, (0, 1)),
        Observation(14, 1, 0, (0, 1)),
    )
    assert failure == LostTime("ranks restarted", 7, 0, 14)


def test_a_host_that_comes_back_costs_the_restart() -> None:
    (failure,) = failures(
        Observation(0, 340, 300, (1, 0), lost=NODE2),
        Observation(2, 341, 300, (1, 0)),  # it is back, and the ranks still run
        Observation(4, 342, 300, (1, 0)),
        Observation(6, 342, 342, (2, 0)),  # they save, and start again
        Observation(16, 343, 342, (2, 0)),
    )
    assert failure == LostTime("host node2 back", 342, 342, 12)


@pytest.mark.parametrize("lost", [NODE2, frozenset[str]()])
def test_steps_that_never_stop_cost_nothing(lost: frozenset[str]) -> None:
    assert failures(*(Observation(at, 10 * at, 0, lost=lost if at > 2 else frozenset()) for at in range(6))) == []


def test_the_age_of_the_last_step_counts_from_when_it_appeared() -> None:
    progress = StepWatch()
    assert progress.step_age_s(5) is None
    for seen in (Observation(0, 5, 0), Observation(2, 6, 0), Observation(4, 6, 0), Observation(77, 6, 0)):
        progress.observe(seen)
    assert progress.step_age_s(77) == 75


def test_an_observer_that_was_away_counts_from_when_it_last_looked() -> None:
    progress = StepWatch()
    progress.continue_after(Observation(-20, 310, 300), "supervisor of host 0 replaced")
    assert progress.observe(Observation(5, 300, 300)) is None
    assert progress.observe(Observation(9, 301, 300)) == LostTime("supervisor of host 0 replaced", 310, 300, 29)
