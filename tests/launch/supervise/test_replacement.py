"""Which new host takes the place of a lost one, and how its supervisor is started there."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from maskfleet.launch.supervise.connectivity import (
    Connectivity,
    HostStarter,
    replacement_for,
    restart_lost_host,
)
from maskfleet.launch.supervise.job_files import Host, Job, JobFolder, Scheduler

SCHEDULER = Scheduler("uid", 900)
HOSTS = (Host("me@10.0.0.1", 8), Host("me@10.0.0.2", 8))


def job(command: str = "") -> Job:
    return Job("a", "supervisor", HOSTS, 1, 3, 0, "~", hosts_command=command)


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ([Host("10.0.0.1", 8), Host("10.0.0.3", 8)], Host("me@10.0.0.3", 8)),
        ([Host("10.0.0.1", 8), Host("10.0.0.2", 8), Host("10.0.0.3", 8)], None),  # it may only reboot
        ([Host("10.0.0.1", 8), Host("10.0.0.3", 4)], None),  # with fewer GPUs
        ([Host("10.0.0.1", 8)], None),
        ([], None),
    ],
)
def test_a_new_host_with_as_many_slots_takes_the_place(listed: list[Host], expected: Host | None) -> None:
    assert replacement_for(job(), 1, listed) == expected


def programs(folder: Path, monkeypatch: pytest.MonkeyPatch, listing: str) -> str:
    """An ssh that records its arguments, and a program that prints `listing`."""
    (folder / "bin").mkdir()
    for name, text in (("ssh", f'printf "%s\\n" "$@" > {folder}/argv'), ("list", f"cat {folder}/listing")):
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    (folder / "listing").write_text(listing)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return str(folder / "bin" / "list")


def made(run_dir: Path, command: str) -> JobFolder:
    folder = JobFolder(run_dir)
    folder.host(1).mkdir(parents=True)
    folder.write_job(job(command))
    return folder


def test_the_new_host_is_written_into_the_job_and_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = "10.0.0.1 slots=8\n-oProxyCommand=x slots=8\nnonsense\nroot@10.0.0.9 slots=8\n10.0.0.3 slots=8\n"
    folder = made(tmp_path / "run", programs(tmp_path, monkeypatch, listing))
    assert restart_lost_host(folder, 1) == 0
    assert [host.address for host in folder.job().hosts] == ["me@10.0.0.1", "me@10.0.0.3"]
    assert [event.what for event in folder.events()] == ["host 1 (me@10.0.0.2) is replaced by me@10.0.0.3"]
    argv = (tmp_path / "argv").read_text().splitlines()
    assert argv[-2:] == ["me@10.0.0.3", f"sh {folder.path}/remote start 1"]


def test_without_a_new_host_the_old_one_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(tmp_path / "run", programs(tmp_path, monkeypatch, "10.0.0.1 slots=8\n"))
    before = json.loads((folder.path / "job.json").read_text())
    assert restart_lost_host(folder, 1) == 0
    assert json.loads((folder.path / "job.json").read_text()) == before
    assert "me@10.0.0.2" in (tmp_path / "argv").read_text()


def test_two_lost_hosts_do_not_get_the_same_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(tmp_path / "run", programs(tmp_path, monkeypatch, "10.0.0.3 slots=8\n"))
    folder.host(0).mkdir()
    for host in (1, 0):
        assert restart_lost_host(folder, host) == 0
    assert [host.address for host in folder.job().hosts] == ["me@10.0.0.1", "me@10.0.0.3"]


def test_the_starter_asks_for_a_replacement_only_where_hosts_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("maskfleet.launch.supervise.connectivity.start", lambda argv: started.append(argv))
    folder = made(tmp_path / "run", "/bin/list")
    HostStarter(folder, job("/bin/list")).start(1)
    HostStarter(folder, job()).start(1)
    assert started[0] == ["sh", f"{folder.path}/remote", "restart", "1"]
    assert started[1][0] == "ssh"


def test_a_new_host_that_answers_shows_that_the_network_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = programs(tmp_path, monkeypatch, "10.0.0.1 slots=8\n10.0.0.3 slots=8\n")
    up: set[str] = set()
    asked: list[str] = []

    def is_up(address: str, port: int) -> bool:
        asked.append(address)
        return address in up

    monkeypatch.setattr("maskfleet.launch.supervise.connectivity._is_up", is_up)
    connectivity = Connectivity(made(tmp_path / "run", command), job(command), 1)
    assert not connectivity._new_host_answers()
    up.add("10.0.0.3")
    assert connectivity._new_host_answers()
    assert asked == ["10.0.0.3", "10.0.0.3"]  # the hosts of the job are asked elsewhere
    assert not Connectivity(connectivity._folder, job(), 1)._new_host_answers()
    assert not Connectivity(connectivity._folder, job("/no/such/program"), 1)._new_host_answers()


def test_where_kubernetes_starts_supervisors_ssh_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("maskfleet.launch.supervise.connectivity.start", lambda argv: started.append(argv))
    HostStarter(made(tmp_path / "run", ""), replace(job(), scheduler=SCHEDULER)).start(1)
    assert started == []


@pytest.mark.parametrize(
    ("scheduler", "hears_others", "answers", "last"),
    [
        (SCHEDULER, False, True, True),
        (SCHEDULER, True, True, False),  # they write heartbeats: this host is cut off from them
        (SCHEDULER, False, False, False),  # nobody answers: this host is cut off from all
        (None, False, True, False),
    ],
)
def test_a_host_is_the_last_if_the_others_are_silent_and_kubernetes_answers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scheduler: Scheduler | None,
    hears_others: bool,
    answers: bool,
    last: bool,
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "172.20.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    known = ("172.20.0.1", 443) if answers else None
    monkeypatch.setattr("maskfleet.launch.supervise.connectivity._is_up", lambda *where: where == known)
    lone = replace(job(), scheduler=scheduler)
    connectivity = Connectivity(made(tmp_path / "run", ""), lone, 1, hears_others=lambda: hears_others)
    assert connectivity._is_the_last() is last
