"""A shared folder that cannot be written for a while ends neither heartbeats nor events nor the log."""

from __future__ import annotations

import errno
import io
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from mounts import full, read_only, small_disk

from maskfleet.launch.job import LostTime
from maskfleet.launch.supervise.child import _writer
from maskfleet.launch.supervise.job_files import Heartbeat, Host, Job, JobFolder, event_line
from maskfleet.launch.supervise.lost_hosts import LOST_S, HostMonitor
from maskfleet.launch.supervise.state import heartbeat as heartbeat_file
from maskfleet.launch.supervise.state.heartbeat import Heartbeats, HostReport
from maskfleet.launch.supervise.state.kept_lines import KeptLines

JOB = Job("a", "supervisor", (Host("a", 1), Host("b", 1)), 1, 0, 0, "/")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk") as path:
        JobFolder(path).host(0).mkdir(parents=True)
        yield path


def heartbeats_of(
    run_dir: Path, *, clock: Callable[[], float] = time.monotonic
) -> tuple[Heartbeats, list[str], KeptLines]:
    """Heartbeats of host 0, what they say, and its events."""
    folder, said = JobFolder(run_dir), list[str]()
    events = KeptLines(folder.host(0) / "events.jsonl", durable=True)

    def say(what: str, failure: LostTime | None) -> None:
        said.append(what)
        events.add(event_line(what))

    beats = Heartbeats(
        folder,
        0,
        HostMonitor(folder, JOB, 0, clock=clock),
        report=lambda: HostReport("running", 0, 0, "a", leads=True),
        withheld=lambda: False,
        say=say,
        kept=(events,),
    )
    return beats, said, events


def count_of(run_dir: Path) -> int:
    beat = JobFolder(run_dir).heartbeat(0)
    assert beat is not None
    return beat.count


@pytest.mark.parametrize(("failure", "why"), [(full, errno.ENOSPC), (read_only, errno.EROFS)])
def test_heartbeats_and_events_outlive_a_failure_of_the_disk(
    disk: Path, failure: Callable[[Path], AbstractContextManager[None]], why: int
) -> None:
    beats, said, events = heartbeats_of(disk)
    assert beats.send() is None
    with failure(disk):
        for _ in range(3):
            error = beats.send()
            assert error is not None
            assert error.errno == why
        events.add(event_line("something happened"))
        assert count_of(disk) == 1
    assert beats.send() is None
    assert count_of(disk) == 2
    assert [os.strerror(why) in line or "can write again, after" in line for line in said] == [True, True]
    told = [event.what for event in JobFolder(disk).events()]
    assert told == [said[0], "something happened", said[1]], "nothing is missing, and all is in order"


def test_the_log_is_complete_after_the_disk_was_full(disk: Path) -> None:
    log = KeptLines(JobFolder(disk).host(0) / "output.log")
    lines = [f"[rank0]: line {number} {'x' * 500}\n".encode() for number in range(200)]
    _writer(io.BytesIO(b"".join(lines[:60])), log).join()
    with full(disk):
        _writer(io.BytesIO(b"".join(lines[60:])), log).join()
        error = log.flush()
        assert error is not None
        assert error.errno == errno.ENOSPC
    assert log.flush() is None
    written = log.path.read_text().splitlines()
    assert [int(line.split()[3]) for line in written] == list(range(200))
    assert all(len(line.split()) == 5 for line in written)


def test_a_line_that_a_killed_writer_left_incomplete_is_ended_first(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_bytes(b"first\ncut sho")
    KeptLines(path).add(b"second\n")
    assert path.read_bytes() == b"first\ncut sho\nsecond\n"


def test_a_line_that_fits_only_in_part_is_continued_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, write, space = KeptLines(tmp_path / "log"), os.write, [4]

    def fills_up(descriptor: int, data: bytearray) -> int:
        if space[0] <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(descriptor, data[: space[0]])
        space[0] -= written
        return written

    monkeypatch.setattr(os, "write", fills_up)
    lines.add(b"first\n")
    lines.add(b"second\n")
    assert lines.path.read_bytes() == b"firs"
    space[0] = 100
    assert lines.flush() is None
    assert lines.path.read_bytes() == b"first\nsecond\n"


def test_what_is_kept_in_memory_is_limited_to_the_newest_lines(tmp_path: Path) -> None:
    lines = KeptLines(tmp_path / "no folder" / "log", limit=30)
    for number in range(100):
        lines.add(b"line %d\n" % number)
    lines.path.parent.mkdir()
    assert lines.flush() is None
    assert lines.path.read_bytes() == b"line 96\nline 97\nline 98\nline 99\n"[-24:]


def test_nobody_is_lost_while_this_host_cannot_write_either(tmp_path: Path) -> None:
    folder, now = JobFolder(tmp_path), [0.0]
    folder.host(1).mkdir(parents=True)
    monitor = HostMonitor(folder, JOB, 0, clock=lambda: now[0])
    folder.write_heartbeat(1, Heartbeat(1, 1, "running", 0, 0, 0.0, "b", []))
    monitor.poll()
    monitor.can_write = False
    now[0] = 10 * LOST_S
    assert monitor.poll() == ([], [])
    monitor.can_write = True
    now[0] += LOST_S - 1
    assert monitor.poll() == ([], []), "the others get the same time to write again"
    now[0] += 2
    assert monitor.poll() == ([1], [])


def test_a_host_that_cannot_write_is_missed_only_by_others_that_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(heartbeat_file.time, "monotonic", lambda: now[0])
    folder = JobFolder(tmp_path)
    for index in range(2):
        folder.host(index).mkdir(parents=True)
    beats, _, _ = heartbeats_of(tmp_path, clock=lambda: now[0])
    monitor = beats._monitor
    folder.write_heartbeat(1, Heartbeat(1, 1, "running", 0, 0, 0.0, "b", []))
    monitor.poll()
    now[0] = LOST_S + 1
    assert not beats.are_missed(), "the other one is as silent: the folder has failed for all"
    folder.write_heartbeat(1, Heartbeat(2, 1, "running", 0, 0, 0.0, "b", []))
    monitor.poll()
    assert beats.are_missed()
    assert beats.send() is None
    assert not beats.are_missed()


def test_the_last_heartbeat_is_tried_until_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beats, _, _ = heartbeats_of(tmp_path)  # its folder does not exist yet
    waits = []

    def create(seconds: float) -> None:
        waits.append(seconds)
        JobFolder(tmp_path).host(0).mkdir(parents=True)

    monkeypatch.setattr(heartbeat_file.time, "sleep", create)
    beats.send_last()
    assert len(waits) == 1
    assert json.loads((JobFolder(tmp_path).host(0) / "beat.json").read_text())["state"] == "running"


def test_ranks_that_failed_while_the_folder_did_are_restarted_when_it_works_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats, _, _ = heartbeats_of(tmp_path)  # its folder does not exist yet
    assert not beats.await_recovery(lambda: False), "nothing has failed"
    assert beats.send() is not None

    def create(seconds: float) -> None:
        JobFolder(tmp_path).host(0).mkdir(parents=True)
        assert beats.send() is None

    monkeypatch.setattr(heartbeat_file.time, "sleep", create)
    assert beats.await_recovery(lambda: False)
