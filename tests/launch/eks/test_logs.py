"""`maskfleet logs` on EKS: over attempts of the launcher, restarts of the API and pods that go away."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from eks_world import helm_record, launcher, mpijob, ready_worker

from maskfleet.errors import LaunchError
from maskfleet.launch.backend import backend_of
from maskfleet.launch.eks.jobs import following as eks_following
from maskfleet.launch.eks.jobs.objects import split_stamp
from maskfleet.launch.eks.logs import job_lines
from maskfleet.launch.job import JobHandle
from maskfleet.system.kube import client as kube
from maskfleet.system.kube.client import ApiError, Kube
from maskfleet.system.kube.fake import FakeKube
from ports import free_port

HANDLE = JobHandle("eks", "kubeflow", "r50")
LONG_S = 120  # that long nothing takes, however busy the machine


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKube]:
    fake = FakeKube(tmp_path, port=free_port())
    monkeypatch.setenv("KUBECONFIG", str(fake.kubeconfig))
    monkeypatch.setattr(eks_following, "POLL_S", 0.05)
    monkeypatch.setattr(eks_following, "EXPLAIN_S", 0.05)
    yield fake
    fake.stop()


class Following:
    """`logs -f` in the background, and what it has shown."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            for line in backend_of(HANDLE).logs(HANDLE, follow=True):
                self.lines.append(line)
        except Exception as error:
            self.error = error

    def until(self, is_true: Callable[[list[str]], bool]) -> None:
        deadline = time.monotonic() + LONG_S
        while not is_true(self.lines):
            assert time.monotonic() < deadline, self.lines
            assert self.error is None, self.error
            time.sleep(0.01)

    def shows(self, text: str) -> None:
        self.until(lambda lines: any(text in line for line in lines))

    def end(self) -> list[str]:
        self._thread.join(LONG_S)
        assert not self._thread.is_alive(), self.lines
        assert self.error is None, self.error
        return self.lines

    def of_ranks(self) -> list[str]:
        return [line for line in self.lines if not line.startswith("[launch]")]


def test_lines_of_all_attempts_come_oldest_first_by_rank(api: FakeKube) -> None:
    api.add(
        mpijob("Created", "Failed", completed=True),
        launcher(2, code=1, phase="Failed"),
        launcher(1, code=1, phase="Failed"),
    )
    api.append_log("r50-launcher-1", "[1,0]<stdout>:first", "[1,3]<stderr>:oops", "mpirun noticed something")
    api.append_log("r50-launcher-2", "[prterun-a-17@1,0]<stdout>: second")
    backend = backend_of(HANDLE)
    assert list(backend.logs(HANDLE)) == [
        "[rank0]: first",
        "[rank3]: oops",
        "mpirun noticed something",
        "[rank0]: second",
    ]
    assert list(backend.logs(HANDLE, rank=3)) == ["[rank3]: oops"]
    assert list(backend.logs(HANDLE, rank=7)) == []


def test_a_launcher_started_again_in_its_pod_has_an_earlier_log(api: FakeKube) -> None:
    api.add(mpijob("Created", "Running"), launcher(1, restarts=1))
    api.append_log("r50-launcher-1/previous", "before")
    api.append_log("r50-launcher-1", "after")
    assert list(backend_of(HANDLE).logs(HANDLE)) == ["before", "after"]


def test_follow_continues_after_a_killed_launcher(api: FakeKube) -> None:
    api.add(mpijob("Created", "Running"), launcher(1))
    api.open_logs.add("r50-launcher-1")
    api.append_log("r50-launcher-1", "one")
    following = Following()
    following.shows("one")
    api.append_log("r50-launcher-1", "two")
    api.add(launcher(1, phase="Failed", code=137))
    api.open_logs.remove("r50-launcher-1")
    following.shows("ended with code 137")
    api.add(launcher(2))
    api.open_logs.add("r50-launcher-2")
    api.append_log("r50-launcher-2", "three")
    following.shows("three")
    api.add(mpijob("Created", "Succeeded", completed=True), launcher(2, phase="Succeeded", code=0))
    api.append_log("r50-launcher-2", "four")
    api.open_logs.remove("r50-launcher-2")
    lines = following.end()
    assert following.of_ranks() == ["one", "two", "three", "four"]
    assert "[launch]: attempt 2 of the launcher, pod r50-launcher-2" in lines


def test_follow_survives_an_api_that_restarts_and_repeats_no_line(api: FakeKube) -> None:
    api.add(mpijob("Created", "Running"), launcher(1))
    api.open_logs.add("r50-launcher-1")
    api.append_log("r50-launcher-1", *(f"line {number}" for number in range(50)))
    following = Following()
    following.shows("line 49")
    api.stop()
    following.shows("cannot be reached")
    # In the same second as those before.
    api.append_log("r50-launcher-1", *(f"line {number}" for number in range(50, 100)))
    api.start()
    following.shows("answers again")
    following.shows("line 99")
    api.append_log("r50-launcher-1", "last", second=5)
    api.add(mpijob("Created", "Succeeded", completed=True), launcher(1, phase="Succeeded", code=0))
    api.open_logs.clear()
    following.end()
    assert following.of_ranks() == [*(f"line {number}" for number in range(100)), "last"]


def test_lines_with_one_stamp_are_told_apart_by_their_number(api: FakeKube) -> None:
    api.add(mpijob("Created", "Running"), launcher(1))
    stamp = "2026-11-15T10:00:00.5Z"
    api.logs["r50-launcher-1"] = [(stamp, "a"), (stamp, "a")]
    api.open_logs.add("r50-launcher-1")
    following = Following()
    following.until(lambda lines: lines.count("a") == 2)
    api.stop()
    api.logs["r50-launcher-1"] += [(stamp, "a"), ("2026-11-15T10:00:00.50001Z", "b")]
    api.start()
    following.shows("b")
    api.add(mpijob("Created", "Succeeded", completed=True), launcher(1, phase="Succeeded", code=0))
    api.open_logs.clear()
    following.end()
    assert following.of_ranks() == ["a", "a", "a", "b"]


def test_ranks_that_are_silent_for_long_cause_no_alarm(api: FakeKube, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube, "SILENCE_S", 1.5)  # longer than a busy API takes to begin its answer
    api.add(mpijob("Created", "Running"), launcher(1))
    api.open_logs.add("r50-launcher-1")
    api.append_log("r50-launcher-1", "one")
    following = Following()
    following.shows("one")
    asked = len(api.requests)
    while len([one for one in api.requests[asked:] if "/log?" in one[1]]) < 3:
        time.sleep(0.02)
    api.append_log("r50-launcher-1", "two", second=9)
    following.shows("two")
    api.add(mpijob("Created", "Succeeded", completed=True), launcher(1, phase="Succeeded", code=0))
    api.open_logs.clear()
    assert following.end() == ["one", "two"]


def test_follow_says_what_a_waiting_job_waits_for_and_then_shows_it(api: FakeKube) -> None:
    api.add(mpijob("Created"))
    following = Following()
    following.shows("[launch]: pending: 0 of 2 workers are ready")
    api.add(launcher(1, phase="Pending"), *(ready_worker(index) for index in range(2)))
    following.shows("[launch]: pending: starts")
    api.append_log("r50-launcher-1", "all")  # in the order in which it happens: who follows looks at any moment
    api.add(launcher(1, phase="Succeeded", code=0))
    api.add(mpijob("Created", "Succeeded", completed=True))
    assert "all" in following.end()


def test_follow_ends_when_the_job_is_cancelled_and_says_so(api: FakeKube) -> None:
    job, pod = mpijob("Created", "Running"), launcher(1)
    api.add(job, pod, helm_record("r50", {}))
    api.open_logs.add("r50-launcher-1")
    api.append_log("r50-launcher-1", "one")
    following = Following()
    following.shows("one")
    api.remove(job)
    api.remove(pod)
    api.open_logs.clear()
    assert following.end()[-1] == "[launch]: pod r50-launcher-1 of the launcher was deleted"


def test_follow_says_that_a_log_on_a_dead_node_cannot_be_read(api: FakeKube) -> None:
    api.add(mpijob("Created", "Running"), launcher(1))
    api.broken["/api/v1/namespaces/kubeflow/pods/r50-launcher-1/log"] = 502
    following = Following()
    following.shows("the log of pod r50-launcher-1 cannot be read")
    api.remove(launcher(1))
    api.append_log("r50-launcher-2", "two")
    api.add(launcher(2, phase="Succeeded", code=0))
    following.shows("two")
    api.add(mpijob("Created", "Succeeded", completed=True))
    lines = following.end()
    assert sum("cannot be read" in line for line in lines) == 1


def test_follow_gives_up_on_a_cluster_that_stays_away(api: FakeKube) -> None:
    api.add(mpijob("Created", "Running"), launcher(1, phase="Pending"))
    clock = iter(range(0, 100_000, 100))
    with Kube(context=None, namespace="kubeflow") as cluster:
        lines = job_lines(cluster, HANDLE, follow=True, sleep=lambda _: None, clock=lambda: float(next(clock)))
        assert next(lines) == "[launch]: running: starts"
        api.stop()
        assert "cannot be reached" in next(lines)
        with pytest.raises(ApiError, match="cannot be reached"):
            next(lines)
    api.start()


def test_follow_does_not_wait_for_a_cluster_that_never_answered(api: FakeKube) -> None:
    api.stop()
    with pytest.raises(ApiError, match="cannot be reached"):
        list(backend_of(HANDLE).logs(HANDLE, follow=True))
    api.start()


def test_a_right_that_is_taken_away_ends_following(api: FakeKube) -> None:
    api.add(mpijob("Created", "Running"), launcher(1))
    api.forbidden.add("/api/v1/namespaces/kubeflow/pods")
    with pytest.raises(ApiError, match="forbidden"):
        list(backend_of(HANDLE).logs(HANDLE, follow=True))


def test_after_the_pods_are_gone_the_error_says_where_the_log_is(api: FakeKube) -> None:
    api.add(helm_record("r50", {"image": "i"}, status="uninstalled"))
    with pytest.raises(LaunchError, match="pods of eks://kubeflow/r50 are deleted") as caught:
        list(backend_of(HANDLE).logs(HANDLE))
    assert "maskfleet cp eks://kubeflow/r50/log.txt" in caught.value.remedy


@pytest.mark.parametrize("follow", [False, True])
def test_a_job_that_nobody_knows_has_no_log(follow: bool, api: FakeKube) -> None:
    with pytest.raises(LaunchError, match="knows no job r50"):
        list(backend_of(HANDLE).logs(HANDLE, follow=follow))


def test_stamps_grow_whatever_their_digits_and_zone() -> None:
    lines = ["2026-11-15T10:00:00Z a", "2026-11-15T10:00:00.12Z b", "2026-11-15T10:00:00.123456789Z c",
             "2026-11-15T12:00:00.2+02:00 d", "2026-11-15T10:00:01+00:00 e f"]  # fmt: skip
    stamps = [split_stamp(line)[0] for line in lines]
    assert stamps == sorted(stamps)
    assert stamps[3] == "2026-11-15T10:00:00.200000000"
    assert [split_stamp(line)[1] for line in lines] == ["a", "b", "c", "d", "e f"]
    assert split_stamp("no stamp") == ("", "no stamp")


def test_one_attempt_on_a_dead_node_does_not_hide_the_others(api: FakeKube) -> None:
    api.add(mpijob("Created", "Running"), launcher(1, phase="Failed", code=1), launcher(2))
    api.append_log("r50-launcher-2", "[rank0]: step: 7")
    api.broken["/api/v1/namespaces/kubeflow/pods/r50-launcher-1/log"] = 502
    lines = list(backend_of(HANDLE).logs(HANDLE))
    assert lines == [
        "[launch]: the log of pod r50-launcher-1 cannot be read: the cluster refused: it is broken",
        "[rank0]: step: 7",
    ]


def test_following_ends_with_the_launchers_job_while_the_operator_is_down(api: FakeKube) -> None:
    end = {"conditions": [{"type": "Complete", "status": "True"}]}
    job = {"kind": "Job", "metadata": {"name": "r50-launcher", "namespace": "kubeflow"}, "status": end}
    api.add(mpijob("Created", "Running"), launcher(phase="Succeeded", code=0), job)
    api.append_log("r50-launcher-1", "[rank0]: training is done")
    assert list(backend_of(HANDLE).logs(HANDLE, follow=True)) == ["[rank0]: training is done"]
