"""Parts of launching on hosts that need no host: what is sent, who is alive, what the doctor makes of facts."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import re
import shlex
import subprocess
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from beats import other_beat, own_beat
from hypothesis import given
from hypothesis import strategies as st

from maskfleet.cli.launch import launch_config
from maskfleet.config.launch import SshLaunch
from maskfleet.config.recipes import recipe
from maskfleet.errors import ConfigError
from maskfleet.launch.address import bare_address
from maskfleet.launch.findings import Verdict
from maskfleet.launch.job import JobState
from maskfleet.launch.ssh.backend import SshBackend
from maskfleet.launch.ssh.doctor import Facts, judge_host, judge_together
from maskfleet.launch.ssh.probe import takes_locks
from maskfleet.launch.supervise import supervisor
from maskfleet.launch.supervise.child import normalized, write_line
from maskfleet.launch.supervise.commands import rank_environments
from maskfleet.launch.supervise.connectivity import CUT_S, Connectivity, ssh_target
from maskfleet.launch.supervise.job_files import Endpoint, Heartbeat, Host, Job, JobFolder, event_line
from maskfleet.launch.supervise.lost_hosts import GRACE_S, LOST_S, HostMonitor
from maskfleet.launch.supervise.prepare import refuse_running
from maskfleet.launch.supervise.state.kept_lines import KeptLines
from maskfleet.launch.supervise.status import log_lines, status_of
from maskfleet.launch.supervise.supervisor import ALREADY_SUPERVISED, Supervisor, supervise
from maskfleet.launch.wheel import built_wheel
from maskfleet.system.lock import NoLocksError
from maskfleet.system.process import remote_line
from maskfleet.system.rank_variables import ATTEMPT, STORE_FILE, named_rank

GOLDEN = Path(__file__).parents[1] / "golden"
LAUNCH = SshLaunch(
    hosts=("node1=2", "me@node2:2222=4"), min_nodes=1, run_root="/efs/my fleet", environment="/opt/env", max_restarts=2
)
TEXT = st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)))


@given(st.lists(TEXT, min_size=1))
def test_a_remote_shell_reads_back_the_same_arguments(argv: list[str]) -> None:
    assert shlex.split(remote_line(["x", *argv])[2:]) == argv


def test_a_real_shell_does_no_harm_with_any_argument(tmp_path: Path) -> None:
    nasty = [
        "a b",
        "$(touch harm)",
        "`touch harm`",
        "'",
        '"',
        "\n",
        ";touch harm",
        "*",
        "~",
        "~root",
        "~/a b$(touch harm)",
    ]
    line = remote_line(["printf", "%s\\0", *nasty])
    done = subprocess.run(
        ["sh", "-c", line],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={"HOME": "/h", "PATH": "/usr/bin:/bin"},
    )
    assert done.stdout.split("\0")[:-1] == [*nasty[:-1], "/h/a b$(touch harm)"]
    assert not list(tmp_path.iterdir())


def test_what_is_sent_to_hosts_is_as_recorded() -> None:
    backend = SshBackend(LAUNCH)
    rendered = backend.render(backend.job(recipe("demo"), name="golden"))
    files = {name: content for name, content in rendered.files.items() if "run.yaml" not in name}
    sent = {"files": files, "commands": [list(command) for command in rendered.commands]}
    assert sent == json.loads((GOLDEN / "ssh.json").read_text())


def test_rendering_twice_gives_the_same_bytes_even_with_a_wheel() -> None:
    backend = SshBackend(SshLaunch(hosts=("a",)))
    first, second = (backend.render(backend.job(recipe("demo"), name="x")) for _ in range(2))
    assert first == second
    assert first.text() == second.text()


def test_the_wheel_has_every_file_and_a_true_record() -> None:
    _, name, content = built_wheel()
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        names = archive.namelist()
        record = next(one for one in names if one.endswith("RECORD"))
        listed = [line.split(",")[0] for line in archive.read(record).decode().splitlines()]
    assert name.startswith("maskfleet-")
    assert sorted(listed) == sorted(names)
    assert "maskfleet/launch/supervise/supervisor.py" in names
    assert not any("__pycache__" in one for one in names)


@pytest.mark.parametrize(
    ("address", "bare", "target"),
    [
        ("node1", "node1", ["--", "node1"]),
        ("me@node1", "node1", ["--", "me@node1"]),
        ("me@node1:2222", "node1", ["-p", "2222", "--", "me@node1"]),
        ("me@[fe80::1]:22", "fe80::1", ["-p", "22", "--", "me@fe80::1"]),
    ],
)
def test_addresses_are_taken_apart(address: str, bare: str, target: list[str]) -> None:
    assert bare_address(address) == bare
    assert ssh_target(address) == target


def job(hosts: int = 2) -> Job:
    return Job("a", "supervisor", tuple(Host(f"h{i}", 8) for i in range(hosts)), 1, 3, 0, "~", {})


def test_the_ranks_of_each_host_follow_those_of_the_hosts_before_it_and_know_where_to_meet(tmp_path: Path) -> None:
    endpoint = Endpoint(17, 2, "10.0.0.3", 40001, [2, 0])
    plan = Job("a", "supervisor", (Host("h0", 2), Host("h1", 8), Host("me@h2:22", 3)), 1, 3, 0, "~", {"A": "b"})
    ranks = rank_environments(plan, tmp_path, index=0, endpoint=endpoint, base={}, store=tmp_path / "store")
    assert [(env["RANK"], env["LOCAL_RANK"]) for env in ranks] == [("3", "0"), ("4", "1")]
    for env in ranks:
        assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], env["A"]) == ("5", "2", "b")
        assert (env["MASTER_ADDR"], env["MASTER_PORT"], env[ATTEMPT]) == ("10.0.0.3", "40001", "17")
        assert STORE_FILE not in env
        assert [named_rank(rank, env) for rank in (2, 3)] == ["rank 2 on h2", "rank 3 on h0"]


def test_ranks_that_share_a_host_meet_in_a_file_and_not_on_a_port(tmp_path: Path) -> None:
    [env] = rank_environments(
        Job("a", "supervisor", (Host("h0", 1), Host("h1", 1)), 1, 3, 0, "~", {}),
        tmp_path,
        index=1,
        endpoint=Endpoint(0, 1, "10.0.0.2", 0, [1]),
        base={},
        store=tmp_path / "store",
    )
    assert env[STORE_FILE] == str(tmp_path / "store")
    assert not {"MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"} & env.keys()


def test_the_old_name_of_what_starts_the_ranks_leads_to_the_new_one() -> None:
    with pytest.raises(ConfigError, match="write starter: supervisor"):
        launch_config(None, "ssh", {"hosts": ("a",), "starter": "torchrun"}, [])
    assert launch_config(None, "ssh", {"hosts": ("a",)}, ["starter=supervisor"]) == SshLaunch(hosts=("a",))


def beat(count: int) -> Heartbeat:
    return Heartbeat(count, 1, "running", 0, 0, 0.0, "10.0.0.2", [])


def test_a_host_is_lost_only_after_many_missed_beats_and_back_with_the_next(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    folder.host(1).mkdir(parents=True)
    folder.write_heartbeat(1, beat(41))  # of an earlier life
    now = [0.0]
    monitor = HostMonitor(folder, job(), 0, clock=lambda: now[0])
    assert monitor.poll() == ([], [])
    now[0] = GRACE_S - 1
    assert monitor.poll() == ([], []), "hosts may take their time to begin"
    folder.write_heartbeat(1, beat(1))
    assert monitor.poll() == ([], [])
    now[0] += LOST_S
    assert monitor.poll() == ([], [])
    now[0] += 1
    assert monitor.poll() == ([1], [])
    assert monitor.poll() == ([], []), "it is lost once"
    assert monitor.alive() == [0]
    folder.write_heartbeat(1, beat(2))
    assert monitor.poll() == ([], [1])
    assert monitor.alive() == [0, 1]


def test_a_host_that_never_begins_is_lost_after_the_grace(tmp_path: Path) -> None:
    now = [0.0]
    monitor = HostMonitor(JobFolder(tmp_path), job(), 0, clock=lambda: now[0])
    now[0] = GRACE_S + 1
    assert monitor.poll() == ([1], [])


def test_a_job_that_nobody_begins_is_not_waited_for_without_end(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    folder.path.mkdir()
    (folder.path / "job.json").write_text(job().to_json())
    written_at = (folder.path / "job.json").stat().st_mtime
    assert status_of(tmp_path, now=written_at + 10).state is JobState.PENDING
    assert status_of(tmp_path, now=written_at + 1000).state is JobState.LOST


def test_a_host_that_others_miss_is_lost_in_the_status(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    for index in range(2):
        folder.host(index).mkdir(parents=True)
    (folder.path / "job.json").write_text(job().to_json())
    folder.write_heartbeat(0, own_beat(lost=[1]))
    folder.write_heartbeat(1, other_beat())
    status = status_of(tmp_path)
    assert [host.state for host in status.hosts] == ["running", "lost"]
    assert (status.state, status.detail) == (JobState.RUNNING, "continues with 1 of 2 hosts")


def test_who_follows_a_log_gets_the_last_line_of_every_host_that_is_alive(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    for index in range(2):
        folder.host(index).mkdir(parents=True)
    (folder.path / "job.json").write_text(job().to_json())
    folder.write_heartbeat(0, own_beat(lost=[1]))
    folder.write_heartbeat(1, other_beat())  # died, and will never say so
    write_line(KeptLines(folder.host(0) / "output.log"), "supervisor is up")
    folder.write_outcome("done", 0)
    lines = log_lines(tmp_path, follow=True)
    assert next(lines) == "[launch]: supervisor is up"
    threading.Timer(1.0, close_host, (folder,)).start()  # the outcome is there for a second before the last line
    assert list(lines) == ["[launch]: the run is done"]
    assert list(log_lines(tmp_path, follow=True)) == ["[launch]: supervisor is up", "[launch]: the run is done"]


def test_the_last_beat_of_a_supervisor_tells_its_last_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = JobFolder(tmp_path)
    folder.host(0).mkdir(parents=True)
    (folder.path / "job.json").write_text(job(1).to_json())
    writes, may_write = threading.Event(), threading.Event()
    write_heartbeat = JobFolder.write_heartbeat

    def slowly(self: JobFolder, index: int, beat: Heartbeat) -> None:
        if beat.state == "starting":
            writes.set()
            assert may_write.wait(120)
        write_heartbeat(self, index, beat)

    monkeypatch.setattr(JobFolder, "write_heartbeat", slowly)
    supervisor = Supervisor(tmp_path, 0)
    earlier, later = (threading.Thread(target=supervisor.heartbeats.send) for _ in range(2))
    earlier.start()
    assert writes.wait(120)
    supervisor.state = "done"
    later.start()
    later.join(0.2)  # it has to wait for the earlier one
    may_write.set()
    earlier.join()
    later.join()
    beat = folder.heartbeat(0)
    assert beat is not None
    assert (beat.state, beat.count) == ("done", 2)


def test_hosts_that_end_at_once_agree_on_one_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, link, others = JobFolder(tmp_path), os.link, [("failed", 1)]
    folder.path.mkdir()

    def overtaken(source: Path, target: Path) -> None:
        if others:  # another host, whose process has the same number, is as far at the same moment
            folder.write_outcome(*others.pop())
        link(source, target)

    monkeypatch.setattr(os, "link", overtaken)
    folder.write_outcome("done", 0)
    outcome = folder.outcome()
    assert outcome is not None
    assert outcome.state == "failed"
    assert [file.name for file in folder.path.iterdir()] == ["outcome.json"]


def test_an_event_that_is_just_being_written_is_not_told_yet(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    folder.host(0).mkdir(parents=True)
    KeptLines(folder.host(0) / "events.jsonl").add(event_line("first"))
    with (folder.host(0) / "events.jsonl").open("a") as file:
        file.write('{"time": "2026-11-15T10:00')
    assert [event.what for event in folder.events()] == ["first"]


def test_a_run_that_is_launched_again_at_once_waits_for_its_last_supervisor(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    folder.host(0).mkdir(parents=True)
    (folder.path / "job.json").write_text(job(1).to_json())
    folder.write_heartbeat(0, own_beat())
    folder.write_outcome("done", 0)
    threading.Timer(1.0, close_host, (folder,)).start()
    refuse_running(tmp_path)
    last = folder.heartbeat(0)
    assert last is not None
    assert last.state == "done"


def test_a_second_supervisor_waits_for_a_while_then_tells_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = JobFolder(tmp_path)
    folder.host(0).mkdir(parents=True)
    (folder.path / "job.json").write_text(job(1).to_json())
    runs: list[int] = []
    monkeypatch.setattr(supervisor.Supervisor, "run", lambda self: runs.append(self.index) or 7)
    monkeypatch.setattr(supervisor.signal, "signal", lambda number, handler: None)
    with (folder.host(0) / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert supervise(tmp_path, 0, lock_s=0.3) == ALREADY_SUPERVISED
        assert runs == []
        assert re.search(r"host 0 has a supervisor since 20\S+: another process", capsys.readouterr().err)
        threading.Timer(0.5, other.close).start()
        assert supervise(tmp_path, 0, lock_s=60) == 7
    assert runs == [0]


def close_host(folder: JobFolder) -> None:
    write_line(KeptLines(folder.host(0) / "output.log"), "the run is done")
    folder.write_heartbeat(0, own_beat(2, "done", lost=[1]))


@pytest.mark.parametrize(
    ("line", "tidy"),
    [
        (b"[rank1]: step: 3\n", b"[rank1]: step: 3"),
        (b"[rank1]: error: [rank1]: there is no folder\r\n", b"[rank1]: error: there is no folder"),
        (b"[rank1]: [rank1]: Traceback\n", b"[rank1]: Traceback"),
        (b"[rank1]: lost [rank0]: gone\n", b"[rank1]: lost [rank0]: gone"),
        (b"[1,3]<stderr>:[rank3]: Traceback\n", b"[rank3]: Traceback"),
        (b"W1115 mpirun: [rank1]: x\n", b"W1115 mpirun: [rank1]: x"),
    ],
)
def test_a_line_tells_its_rank_once(line: bytes, tidy: bytes) -> None:
    assert normalized(line) == tidy


def test_restarts_are_counted_from_the_last_launch(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    generations = [folder.host(0) / f"ranks-{number}" for number in range(3)]
    for generation in generations:
        (generation / "store").mkdir(parents=True)
    (folder.path / "job.json").write_text(job(1).to_json())
    folder.write_heartbeat(0, own_beat())
    launched_at = time.time() - 50
    os.utime(folder.path / "job.json", (launched_at, launched_at))
    assert status_of(tmp_path).restarts == 2
    for restarts, generation in zip((1, 0, 0), generations, strict=True):
        os.utime(generation, (launched_at - 9, launched_at - 9))  # of an earlier launch into the same folder
        assert status_of(tmp_path).restarts == restarts


def test_only_an_answer_that_was_there_before_can_be_missed(tmp_path: Path) -> None:
    now = [0.0]
    connectivity = Connectivity(JobFolder(tmp_path), job(3), 0, clock=lambda: now[0])
    now[0] = 1000
    connectivity.record(False)
    assert not connectivity.is_cut_off(leads=False), "a firewall that never let anything through says nothing"
    connectivity.record(True)
    now[0] += CUT_S
    assert not connectivity.is_cut_off(leads=True)
    now[0] += 1
    assert connectivity.is_cut_off(leads=True)
    assert connectivity.is_cut_off(leads=False)
    connectivity.record(True)
    assert not connectivity.is_cut_off(leads=False)


def test_of_two_hosts_the_leading_one_continues(tmp_path: Path) -> None:
    now = [0.0]
    connectivity = Connectivity(JobFolder(tmp_path), job(2), 0, clock=lambda: now[0])
    connectivity.record(True)
    now[0] = CUT_S + 1
    assert not connectivity.is_cut_off(leads=True)
    assert connectivity.is_cut_off(leads=False)


def said(**changes: Any) -> dict[str, Any]:
    gpu = ["0", "A100", "3", "40960", "0", "0", "550.1"]
    facts: dict[str, Any] = {"python": "3.11.7", "torch": "2.13.0", "maskfleet": None, "gpus": [gpu], "shm_free": 2**34}
    facts |= {
        "disk_free": 2**40,
        "write_mib_per_s": 500.0,
        "locks": True,
        "port_free": True,
        "address": "10.0.0.1",
        "open_sockets": [],
        "unreachable": [],
        "data": "abc",
    }
    return facts | changes


@pytest.mark.parametrize(
    ("changes", "skew_s", "name", "verdict"),
    [
        ({}, 0, None, Verdict.OK),
        ({"python": "3.9.2"}, 0, "python", Verdict.FAIL),
        ({"torch": None}, 0, "torch", Verdict.FAIL),
        ({}, 8, "clock", Verdict.FAIL),
        ({"port_free": False}, 0, "port", Verdict.WARN),
        ({"address": "54.1.2.3"}, 0, "open port", Verdict.WARN),
        ({"open_sockets": ["0.0.0.0 port 29400"]}, 0, "open port", Verdict.WARN),
        ({"unreachable": ["h1"]}, 0, "reach", Verdict.FAIL),
        ({"disk_free": 2**30}, 0, "disk", Verdict.WARN),
        ({"write_mib_per_s": 3.0}, 0, "write speed", Verdict.WARN),
        ({"locks": False}, 0, "locks", Verdict.FAIL),
        ({"shm_free": 2**26}, 0, "shared memory", Verdict.WARN),
        ({"data": None}, 0, "data", Verdict.FAIL),
        ({"gpus": []}, 0, "gpu", Verdict.WARN),
        ({"gpus": [["0", "A100", "3", "40960", "0", "2", "550.1"]]}, 0, "gpu 0", Verdict.FAIL),
        ({"gpus": [["0", "A100", "9000", "40960", "97", "0", "550.1"]]}, 0, "gpu 0", Verdict.WARN),
    ],
)
def test_each_fault_of_a_host_is_found_with_a_remedy(
    changes: dict[str, Any], skew_s: float, name: str | None, verdict: Verdict
) -> None:
    findings = judge_host(Facts(Host("h0", 1), said(**changes), skew_s), needs_data=True)
    bad = [finding for finding in findings if finding.verdict is not Verdict.OK]
    assert [(finding.name, finding.verdict) for finding in bad] == ([(name, verdict)] if name else [])
    assert all(finding.remedy for finding in bad)


def test_a_file_system_without_locks_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: object, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")  # as Lustre does without the option flock

    assert takes_locks(tmp_path)
    monkeypatch.setattr(fcntl, "flock", flock)
    assert not takes_locks(tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(NoLocksError, match="file system without locks") as caught:
        supervise(tmp_path, 0)
    assert "option flock" in caught.value.remedy


def test_fewer_gpus_than_slots_fail() -> None:
    findings = judge_host(Facts(Host("h0", 8), said(), 0), needs_data=True)
    assert [finding.name for finding in findings if finding.verdict is Verdict.FAIL] == ["gpus"]


def test_hosts_that_differ_are_found_with_their_names() -> None:
    facts = [Facts(Host("h0", 1), said(), 0), Facts(Host("h1", 1), said(torch="2.12.0", data="xyz"), 0)]
    bad = {finding.name: finding.found for finding in judge_together(facts) if finding.verdict is Verdict.FAIL}
    assert set(bad) == {"same torch", "same data"}
    assert bad["same torch"] == "h0: 2.13.0, h1: 2.12.0"
