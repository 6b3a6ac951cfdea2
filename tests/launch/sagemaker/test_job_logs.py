"""Lines of a job in CloudWatch: pages, several hosts, throttling, late lines and restarts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
from sagemaker_world import REGION, Refusal, World, launch

from maskfleet.config.recipes import recipe
from maskfleet.errors import LaunchError
from maskfleet.launch.job import JobHandle
from maskfleet.launch.sagemaker.backend import SageMakerBackend
from maskfleet.launch.sagemaker.logs import GIVE_UP_S, LATE_S, POLL_S, LogReader, job_lines
from maskfleet.launch.sagemaker.services import Services

FIRST, SECOND = "r50/algo-1-1794830400", "r50/algo-2-1794830400"


class Clock:
    """Time that passes only in sleeps; `events` happen after as many of them."""

    def __init__(self) -> None:
        self.now, self.slept = 0.0, 0
        self.events: dict[int, Callable[[], None]] = {}

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += 1
        self.events.pop(self.slept, lambda: None)()
        assert self.slept < 1000, "it never ends"

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(world: World) -> Clock:
    backend = SageMakerBackend(launch(nodes=2))
    backend.submit(backend.render(backend.job(recipe("demo"), name="r50")))
    return Clock()


def lines(region: Services, clock: Clock, *, follow: bool = False, rank: int | None = None) -> list[str]:
    return list(job_lines(region, "r50", follow=follow, rank=rank, sleep=clock.sleep, clock=clock))


def own(found: list[str]) -> list[str]:
    return [line for line in found if not line.startswith("[sagemaker]")]


def test_lines_of_all_hosts_are_merged_by_time_over_all_pages(world: World, region: Services, clock: Clock) -> None:
    world.write(FIRST, *(f"step: {number}" for number in range(10)))
    world.write(SECOND, *(f"[rank4]: line {number}" for number in range(10)), "plain", at_ms=500)
    world.write("r50-2/algo-1-1", "of another job")
    found = lines(region, clock)
    assert found == [one for n in range(10) for one in (f"step: {n}", f"[rank4]: line {n}")] + ["[algo-2]: plain"]


def test_lines_of_one_rank(world: World, region: Services, clock: Clock) -> None:
    world.write(FIRST, "step: 1", "[rank1]: a", "[rank10]: b")
    world.write(SECOND, "[rank4]: c", "d")
    assert lines(region, clock, rank=0) == ["step: 1"]
    assert lines(region, clock, rank=1) == ["[rank1]: a"]
    assert lines(region, clock, rank=4) == ["[rank4]: c"]


def test_no_line_yet(region: Services, clock: Clock) -> None:
    assert lines(region, clock) == ["[sagemaker]: no line has arrived yet; the job is pending"]


def test_the_last_lines_are_found_behind_empty_and_short_pages(world: World, region: Services, clock: Clock) -> None:
    world.write(FIRST, *(f"line {number}" for number in range(30)))
    reader = LogReader(region, "r50", sleep=clock.sleep, clock=clock)
    assert [text for _, text in reader.tail(FIRST, limit=10)] == [f"line {number}" for number in range(20, 30)]
    assert len(reader.tail(FIRST)) == 30
    world.move("r50", "Training")
    world.write(FIRST, "step: 7", *(f"a warning {number}" for number in range(9)))
    status = SageMakerBackend(launch(nodes=2)).status(JobHandle("sagemaker", REGION, "r50"))
    assert status.step == 7


def test_an_unknown_job(region: Services) -> None:
    with pytest.raises(LaunchError, match="there is no job other"):
        list(job_lines(region, "other"))


def test_follow_gives_every_line_once_until_the_job_is_over(world: World, region: Services, clock: Clock) -> None:
    def training() -> None:
        world.move("r50", "Training", "Training image download completed")
        world.write(FIRST, "a1", "a2", "a3", "a4", at_ms=0)

    clock.events[1] = training
    clock.events[2] = lambda: world.write(SECOND, "b1", at_ms=2500)
    clock.events[3] = lambda: world.write(FIRST, "a5", at_ms=9000)
    clock.events[5] = lambda: world.move("r50", "Completed", "", "Completed")
    clock.events[7] = lambda: world.write(FIRST, "late", at_ms=9500)
    found = lines(region, clock, follow=True)
    assert own(found) == ["a1", "a2", "a3", "[algo-2]: b1", "a4", "a5", "late"]
    assert found[0].endswith("Starting: Launching requested ML instances")
    assert any("Training image download completed" in line for line in found)
    assert clock.now >= 7 * POLL_S + LATE_S


def test_a_line_that_arrives_very_late_is_not_lost(world: World, region: Services, clock: Clock) -> None:
    world.write(FIRST, "a", at_ms=60_000)
    clock.events[4] = lambda: world.write(SECOND, "[rank4]: from before", at_ms=1000)
    clock.events[5] = lambda: world.move("r50", "Completed", "", "Completed")
    assert own(lines(region, clock, follow=True)) == ["a", "[rank4]: from before"]


def test_a_restarted_host_has_another_stream(world: World, region: Services, clock: Clock) -> None:
    world.write(FIRST, "before", at_ms=0)
    clock.events[2] = lambda: world.write("r50/algo-1-1794834000", "after", at_ms=50_000)
    clock.events[3] = lambda: world.move("r50", "Completed", "", "Completed")
    assert own(lines(region, clock, follow=True)) == ["before", "after"]


def test_following_survives_throttling_of_the_job_itself(world: World, region: Services, clock: Clock) -> None:
    world.write(FIRST, "a")

    def busy() -> None:
        world.failing["DescribeTrainingJob"] = deque(Refusal("ThrottlingException") for _ in range(3))
        world.move("r50", "Completed", "", "Completed")

    clock.events[2] = busy
    assert own(lines(region, clock, follow=True)) == ["a"]
    assert not world.failing["DescribeTrainingJob"]


@pytest.mark.parametrize("operation", ["GetLogEvents", "DescribeLogStreams"])
def test_throttling_delays_lines_and_loses_none(world: World, region: Services, clock: Clock, operation: str) -> None:
    world.write(FIRST, *(f"line {number}" for number in range(7)))
    world.failing[operation] = deque(Refusal("ThrottlingException", "Rate exceeded") for _ in range(4))
    assert lines(region, clock) == [f"line {number}" for number in range(7)]
    assert clock.now >= 4 * POLL_S


def test_a_service_that_stays_busy_is_given_up(world: World, region: Services, clock: Clock) -> None:
    world.write(FIRST, "a")
    world.failing["GetLogEvents"] = deque(Refusal("ServiceUnavailableException") for _ in range(100))
    with pytest.raises(LaunchError, match="read the log of r50"):
        lines(region, clock)
    assert clock.now > GIVE_UP_S


def test_without_permission_it_is_named(world: World, region: Services, clock: Clock) -> None:
    world.write(FIRST, "a")
    world.user_denies = {"GetLogEvents"}
    with pytest.raises(LaunchError, match="not allowed") as caught:
        lines(region, clock)
    assert "logs:GetLogEvents" in caught.value.remedy
