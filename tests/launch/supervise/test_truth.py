"""`status` tells what is true: whatever the clocks say, and whoever asks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from beats import other_beat, own_beat
from typer.testing import CliRunner

from maskfleet.cli.main import app
from maskfleet.launch.job import JobState, LostTime
from maskfleet.launch.supervise.job_files import Heartbeat, Host, Job, JobFolder, event_line
from maskfleet.launch.supervise.lost_hosts import LOST_S, HostMonitor
from maskfleet.launch.supervise.state.heartbeat import Heartbeats, HostReport, report_second_supervisor
from maskfleet.launch.supervise.state.kept_lines import KeptLines
from maskfleet.launch.supervise.state.liveness import WATCH_S, HostView, Liveness
from maskfleet.launch.supervise.status import status_of, step_age_s
from maskfleet.system.machine import boot_clock


class Watched:
    """A job of three hosts whose time passes only while somebody watches its heartbeats."""

    def __init__(self, run_dir: Path, *, min_nodes: int = 2, hosts: int = 3) -> None:
        self.folder, self.now = JobFolder(run_dir), 0.0
        self.on_poll: Callable[[], None] = lambda: None
        for index in range(hosts):
            self.folder.host(index).mkdir(parents=True)
        names = tuple(Host(f"node{index + 1}", 1) for index in range(hosts))
        (self.folder.path / "job.json").write_text(Job("a", "torchrun", names, min_nodes, 0, 0, "/").to_json())
        self.liveness = Liveness(self.folder, clock=lambda: self.now, sleep=self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self.on_poll()

    def write(self, *heartbeats: Heartbeat | None) -> None:
        for index, heartbeat in enumerate(heartbeats):
            if heartbeat is not None:
                self.folder.write_heartbeat(index, heartbeat)

    def states(self) -> list[str]:
        return [host.state for host in status_of(self.folder.run_dir, liveness=self.liveness).hosts]


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


@pytest.mark.parametrize("step_s", [-300.0, 0.0, 300.0])
def test_a_step_of_the_clock_changes_no_verdict(watched: Watched, step_s: float) -> None:
    first = other_beat()
    watched.write(*(replace(first, time=first.time + step_s) for _ in range(3)))
    counts = [1, 1]

    def beat_on() -> None:  # hosts 0 and 1 live, host 2 is dead
        for index in range(2):
            counts[index] += 1
            watched.folder.write_heartbeat(index, replace(first, count=counts[index], time=first.time + step_s))

    watched.on_poll = beat_on
    assert watched.states() == ["running", "running", "lost"]
    assert watched.now <= WATCH_S + 1


def test_a_dead_job_is_lost_even_if_its_heartbeats_look_fresh(watched: Watched) -> None:
    watched.write(other_beat(), other_beat(), other_beat())
    status = status_of(watched.folder.run_dir, liveness=watched.liveness)
    assert status.state is JobState.LOST
    assert watched.now >= LOST_S, "nobody was alive to ask: it takes as long as the supervisors take"


def test_a_supervisor_on_the_machine_that_asks_knows_at_once(watched: Watched) -> None:
    watched.write(own_beat(silent_s={1: 1.0, 2: 1.5}), other_beat(), other_beat())
    assert watched.states() == ["running", "running", "running"]
    watched.write(own_beat(2, silent_s={1: 1.0, 2: 15.9}, lost=[1]))
    assert watched.states() == ["running", "lost", "running"]
    assert watched.now == 0.0, "nothing had to be watched"


def test_what_a_supervisor_said_long_ago_proves_nobody_lost(watched: Watched) -> None:
    """It cannot write for 15 s, as with a read-only mount; those that it heard until then live on."""
    old = replace(own_beat(silent_s={1: 1.5, 2: 1.5}), uptime_s=boot_clock() - 15)
    watched.write(old, other_beat(), other_beat())
    watched.on_poll = lambda: watched.folder.write_heartbeat(1, other_beat(2))
    assert watched.states() == ["running", "running", "lost"], "one was seen to change while it was watched"
    assert watched.now <= WATCH_S + 1


def test_a_dead_process_on_this_machine_is_lost_at_once_and_its_number_may_be_used_again(watched: Watched) -> None:
    folder = watched.folder
    for started in (own_beat().started + 1, 0):
        for index in range(3):
            folder.write_heartbeat(index, replace(own_beat(), started=started))
        assert watched.states() == ["lost", "lost", "lost"]


def test_a_process_that_lives_without_writing_is_silent_and_not_lost(watched: Watched) -> None:
    silent = replace(own_beat(), uptime_s=boot_clock() - 100)
    watched.write(silent, silent, silent)
    status = status_of(watched.folder.run_dir, liveness=watched.liveness)
    assert status.state is JobState.RUNNING, "launching it again would start a second one beside it"
    assert [host.state for host in status.hosts] == ["silent"] * 3
    assert f"process {os.getpid()}) runs" in status.hosts[0].detail


@pytest.mark.parametrize(
    ("alive", "age_s", "detail"),
    [
        (3, 5.0, ""),
        (2, 5.0, "continues with 2 of 3 hosts"),
        (1, 5.0, "waits for hosts: 1 of 3 are alive, and it needs 2"),
        (3, 75.0, "no progress for 75 s"),
        (1, 75.0, "waits for hosts: 1 of 3 are alive, and it needs 2; no progress for 75 s"),
    ],
)
def test_the_detail_tells_hosts_against_the_fewest_and_the_age_of_the_last_step(
    watched: Watched, alive: int, age_s: float, detail: str
) -> None:
    lost = list(range(alive, 3))
    for index in range(3):
        watched.folder.write_heartbeat(index, own_beat(step=7, step_age_s=age_s) if index < alive else other_beat())
    watched.folder.write_heartbeat(0, own_beat(step=7, step_age_s=age_s, lost=lost))
    status = status_of(watched.folder.run_dir, liveness=watched.liveness)
    assert (status.state, status.detail, status.min_nodes) == (JobState.RUNNING, detail, 2)
    assert status.step_age_s == pytest.approx(age_s, abs=2)


def test_what_failures_cost_is_in_the_status_and_its_json(tmp_path: Path) -> None:
    folder = Watched(tmp_path, hosts=1, min_nodes=1).folder
    failure = LostTime("host node2 lost", 310, 300, 41.0)
    KeptLines(folder.host(0) / "events.jsonl").add(event_line(str(failure), failure))
    folder.write_heartbeat(0, own_beat(step=320, step_age_s=4.0))
    (tmp_path / "metrics.jsonl").write_text('{"step": 320}\n')
    shown = CliRunner().invoke(app, ["status", f"local://{tmp_path}"]).output
    assert re.search(r"running at step 320, \d+ s ago", shown)
    assert "host node2 lost at step 310, resumed from 300 after 41 s" in shown
    assert "41 s were lost to 1 interruption:" in shown
    as_json = CliRunner().invoke(app, ["status", f"local://{tmp_path}", "--json"]).output
    for part in ('"at_step": 310', '"lost_s": 41.0', '"min_nodes": 1', '"step_age_s": '):
        assert part in as_json


def heartbeats(folder: JobFolder, said: list[str]) -> Heartbeats:
    return Heartbeats(
        folder,
        0,
        HostMonitor(folder, folder.job(), 0),
        report=lambda: HostReport("running", 0, 0, "a", leads=True),
        withheld=lambda: True,
        say=lambda what, failure: said.append(what),
    )


def test_a_supervisor_that_replaces_another_says_so(tmp_path: Path) -> None:
    folder, said = Watched(tmp_path, hosts=1).folder, list[str]()
    heartbeats(folder, said).start()
    assert said == [], "the first one replaces nobody"
    folder.write_heartbeat(0, replace(own_beat(41, "left"), pid=12))
    heartbeats(folder, said).start()
    assert said == [], "that one has said that it leaves"
    folder.write_heartbeat(0, replace(own_beat(41), pid=12))
    later = heartbeats(folder, said)
    later.start()
    assert [f"process {os.getpid()}) replaces process 12, which ended without notice" in line for line in said] == [
        True
    ]
    later.send()
    beat = folder.heartbeat(0)
    assert beat is not None
    assert beat.count == 42, "the count goes up, so that everybody sees a change"


def test_a_second_supervisor_is_reported_once(tmp_path: Path) -> None:
    folder = Watched(tmp_path, hosts=1).folder
    (folder.host(0) / "lock").touch()
    for _ in range(3):
        report_second_supervisor(folder, 0, "another process is supervising a (process 12 on node1)")
    (event,) = folder.events()
    assert "another supervisor of host 0 was started, and exits" in event.what
    assert "process 12 on node1" in event.what


@pytest.mark.parametrize(
    ("seen", "age_s"),
    [
        ([(47, 60.0), (47, 0.5)], 60.0),  # the second supervisor has just started
        ([(47, 3.0), (48, 0.5)], 0.5),  # the first has not seen the step yet
        ([(46, 9.0), (47, 4.0)], 4.0),  # none has
    ],
)
def test_the_age_of_the_last_step_is_that_of_who_saw_it(seen: list[tuple[int, float]], age_s: float) -> None:
    beats = [own_beat(step=step, step_age_s=age) for step, age in seen]
    views = [HostView(beat, silent_s=0.0, is_alive=True) for beat in beats]
    newest = {60.0: 47, 0.5: 48, 4.0: 48}[age_s]
    assert step_age_s(views, newest) == age_s
