"""Who leads, who takes part, and how ranks ended."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from maskfleet.launch.supervise import membership
from maskfleet.launch.supervise.job_files import Endpoint, Heartbeat, Host, Job, JobFolder
from maskfleet.launch.supervise.lost_hosts import GRACE_S, HostMonitor
from maskfleet.launch.supervise.membership import (
    Exit,
    Hosts,
    Leadership,
    exits,
    first_failure,
    persistently,
    write_exit,
)
from maskfleet.launch.supervise.prepare import write_job_files
from maskfleet.launch.supervise.state.heartbeat import Heartbeats
from maskfleet.launch.supervise.supervisor import Supervisor


def job(min_nodes: int = 1) -> Job:
    return Job("a", "supervisor", tuple(Host(f"h{index}", 2) for index in range(3)), min_nodes, 3, 0, "~", {})


def beat(folder: JobFolder, host: int, state: str = "running", count: int = 1) -> None:
    folder.host(host).mkdir(parents=True, exist_ok=True)
    folder.write_heartbeat(host, Heartbeat(count, 1, state, 0, 0, 0.0, f"10.0.0.{host}", []))


class View:
    """Three hosts as the first one sees them, with a clock of its own."""

    def __init__(self, run_dir: Path, index: int = 0, min_nodes: int = 1) -> None:
        self.now, self.folder, self.events = 0.0, JobFolder(run_dir), list[str]()
        self.monitor = HostMonitor(self.folder, job(), index, clock=lambda: self.now)
        self.hosts = Hosts(self.folder, job(min_nodes), self.monitor, index, f"10.0.0.{index}")
        self.leadership = Leadership(self.hosts, log=self.events.append, give_up=lambda: False)


def test_a_generation_begins_when_every_host_that_is_not_lost_has_started(tmp_path: Path) -> None:
    view = View(tmp_path, min_nodes=2)
    view.monitor.poll()
    assert not view.hosts.are_complete()
    beat(view.folder, 1)
    assert not view.hosts.are_complete(), "the third may still start"
    view.now = GRACE_S - 1
    view.monitor.poll()
    view.now = GRACE_S + 1
    view.monitor.poll()
    assert view.hosts.reachable() == {0: "10.0.0.0", 1: "10.0.0.1"}
    assert view.hosts.are_complete()
    beat(view.folder, 1, "left", count=2)
    assert not view.hosts.are_complete(), "one host is too few"


def test_a_host_that_has_left_is_not_waited_for(tmp_path: Path) -> None:
    view = View(tmp_path)
    beat(view.folder, 1)
    beat(view.folder, 2, "left")
    view.monitor.poll()
    assert view.hosts.are_complete()
    assert list(view.hosts.reachable()) == [0, 1]


def test_the_first_host_alive_leads_when_the_leader_is_lost(tmp_path: Path) -> None:
    view = View(tmp_path, index=1)
    view.folder.path.mkdir()
    assert not view.leadership.is_settled(), "the first host has still to start"
    view.folder.write_endpoint(Endpoint(4, 0, "10.0.0.0", 5000, [0, 1, 2]))
    assert view.leadership.is_settled()
    assert (view.leadership.generation, view.leadership.is_own(), view.leadership.is_superseded()) == (4, False, False)
    view.now = GRACE_S + 1
    view.monitor.poll()
    assert view.leadership.is_superseded()
    assert view.leadership.is_settled()
    assert view.folder.endpoint() == Endpoint(5, 1, "10.0.0.1", 0, [])
    assert view.events == ["host 1 is the new leader, instead of host 0"]


def test_the_first_failure_is_the_one_that_the_others_only_noticed(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    for host in (0, 1):
        folder.host(host).mkdir(parents=True)
    write_exit(folder, 0, 3, Exit(2, 0, 10.0))
    write_exit(folder, 1, 3, Exit(137, 5, 11.0))
    assert first_failure(exits(folder, [0, 1, 2], 3)) == (1, Exit(137, 5, 11.0))
    write_exit(folder, 1, 3, Exit(2, 5, 9.0))
    assert first_failure(exits(folder, [0, 1, 2], 3)) == (1, Exit(2, 5, 9.0))
    write_exit(folder, 0, 4, Exit(0, None, 10.0))
    assert first_failure(exits(folder, [0, 1], 4)) is None


def test_a_job_that_is_launched_again_forgets_how_its_ranks_ended(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    folder.host(0).mkdir(parents=True)
    write_exit(folder, 0, 0, Exit(2, 0, 10.0))
    write_job_files(tmp_path, {"launch/job.json": job().to_json()})
    assert exits(folder, [0], 0) == {}


@pytest.mark.parametrize(("index", "generation"), [(0, 8), (1, 7), (2, 7)])
def test_a_supervisor_that_replaces_a_dead_one_asks_for_the_next_generation(
    tmp_path: Path, index: int, generation: int
) -> None:
    """Its ranks died with the one before it, and the others must not wait for them."""
    write_job_files(tmp_path, {"launch/job.json": job().to_json()})
    folder = JobFolder(tmp_path)
    folder.host(index).mkdir(parents=True, exist_ok=True)
    folder.write_endpoint(Endpoint(7, 0, "10.0.0.0", 5000, [0, 1]))
    Supervisor(tmp_path, index)._take_over(folder.endpoint())
    known = folder.endpoint()
    assert known is not None
    assert known.generation == generation
    assert [end.code for end in exits(folder, [index], 7).values()] == ([137] if index == 1 else [])


def test_a_new_supervisor_that_the_leader_chooses_at_once_replaces_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader may see its first heartbeat and begin a generation with it before it has looked at anything."""
    write_job_files(tmp_path, {"launch/job.json": job().to_json()})
    folder = JobFolder(tmp_path)
    folder.host(1).mkdir(parents=True)
    monkeypatch.setattr(
        Heartbeats, "start", lambda self: folder.write_endpoint(Endpoint(0, 0, "10.0.0.0", 5000, [0, 1]))
    )
    supervisor = Supervisor(tmp_path, 1)
    supervisor.stop_requested = True
    assert supervisor.run() == 143
    assert exits(folder, [1], 0) == {}


def test_a_leader_that_has_left_is_replaced_at_once(tmp_path: Path) -> None:
    view = View(tmp_path, index=1)
    write_job_files(tmp_path, {"launch/job.json": job().to_json()})
    view.folder.write_endpoint(Endpoint(3, 0, "10.0.0.0", 5000, [0, 1]))
    beat(view.folder, 0)
    view.monitor.poll()
    assert view.leadership.is_settled()
    assert not view.leadership.is_own()
    beat(view.folder, 0, "left", count=2)
    assert view.leadership.is_superseded()
    assert view.leadership.is_settled()
    assert (view.leadership.is_own(), view.leadership.generation) == (True, 4)
    assert view.events == ["host 1 is the new leader, instead of host 0"]


def test_a_full_disk_is_tried_again_until_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "RETRY_WRITE_S", 0)
    failures = [OSError(errno.ENOSPC, "full"), OSError(errno.EROFS, "read-only")]
    written = []

    def write() -> None:
        if failures:
            raise failures.pop()
        written.append(json.dumps({}))

    persistently(write, give_up=lambda: False)
    assert len(written) == 1
    failures = [OSError(errno.ENOSPC, "full")]
    persistently(write, give_up=lambda: True)
    assert len(written) == 1
    failures = [FileNotFoundError(errno.ENOENT, "the run was deleted")]
    with pytest.raises(FileNotFoundError):
        persistently(write, give_up=lambda: False)
