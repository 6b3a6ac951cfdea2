"""Specs, handles, hosts and instance facts: pure functions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskfleet.config.launch import EksLaunch, LocalLaunch, SageMakerLaunch, SshLaunch
from maskfleet.config.load import load
from maskfleet.config.recipes import recipe
from maskfleet.errors import LaunchError
from maskfleet.launch.instances import INSTANCES, instance_named, with_overrides
from maskfleet.launch.job import HostStatus, JobHandle, JobState, JobStatus, job_for
from maskfleet.launch.slots import hosts_of, slots_for


@given(place=st.text("abc.@-:,", min_size=1), path=st.text(min_size=1).filter(lambda text: text.strip("/")))
def test_a_handle_reads_back_whatever_the_path(place: str, path: str) -> None:
    if any(0xD800 <= ord(letter) <= 0xDFFF for letter in path):
        return
    handle = JobHandle("ssh", place, f"/{path.lstrip('/')}")
    assert JobHandle.parse(str(handle)) == handle
    assert len(str(handle).split()) == 1


@pytest.mark.parametrize("text", ["", "runs/a", "ftp://a/b", "local://", "ssh://host"])
def test_what_is_no_handle_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="not a job's handle"):
        JobHandle.parse(text)


def test_the_job_carries_the_whole_run_and_is_named_after_it(tmp_path: Path) -> None:
    run = recipe("demo")
    job = job_for(run, LocalLaunch(), slots=(2,))
    (tmp_path / "run.yaml").write_text(job.run_yaml)
    assert load(tmp_path / "run.yaml") == run
    assert job.name == job_for(run, LocalLaunch(), slots=(2,)).name
    assert job.name != job_for(recipe("standard"), LocalLaunch(), slots=(2,)).name


@pytest.mark.parametrize("name", ["A", "a b", "$(x)", "-a", "a" * 64, "a\nb", "../a", ""])
def test_names_that_could_do_harm_are_refused(name: str) -> None:
    with pytest.raises(LaunchError, match="cannot name a job"):
        job_for(recipe("demo"), LocalLaunch(), slots=(1,), name=name)


def test_ranks_follow_from_nodes_and_instance() -> None:
    for launch in (EksLaunch(nodes=2, instance="p4d.24xlarge"), SageMakerLaunch(nodes=2, instance="ml.p4d.24xlarge")):
        _, slots = slots_for(launch)
        assert job_for(recipe("demo"), launch, slots=slots).ranks == 16


def test_ranks_here_are_the_gpus_or_what_is_asked() -> None:
    assert slots_for(LocalLaunch(), count_gpus=lambda: 4)[1] == (4,)
    assert slots_for(LocalLaunch(), count_gpus=lambda: 0)[1] == (1,)
    assert slots_for(LocalLaunch(gpus=2), count_gpus=lambda: 4)[1] == (2,)
    assert slots_for(LocalLaunch(ranks=3), count_gpus=lambda: 0)[1] == (3,)


def test_hosts_come_from_the_command_line_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# the cluster\nnode1 slots=8\n\nme@node2:2222   slots=4  # older\nnode3\n")
    from_file = hosts_of(SshLaunch(hosts_file=str(file)))
    from_line = hosts_of(SshLaunch(hosts=("node1=8", "me@node2:2222=4", "node3")))
    assert from_file == from_line
    assert [host.slots for host in from_file] == [8, 4, 1]
    with_instance = hosts_of(SshLaunch(hosts=("node1", "node2=2"), instance="g5.12xlarge", user="ubuntu"))
    assert [(host.address, host.slots) for host in with_instance] == [("ubuntu@node1", 4), ("ubuntu@node2", 2)]


@pytest.mark.parametrize(
    "line", ["node1 slot=8", "node1 slots=0", "node1 slots=x", "node 1", "$(reboot)", "-oProxyCommand=x", "a;b", "a'b"]
)
def test_a_typo_in_a_hosts_file_is_named_with_its_line(line: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(f"good slots=1\n{line}\n")
    with pytest.raises(LaunchError, match=r"hosts:2"):
        hosts_of(SshLaunch(hosts_file=str(file)))


def test_a_host_named_twice_is_refused() -> None:
    with pytest.raises(LaunchError, match="named twice"):
        hosts_of(SshLaunch(hosts=("a", "b", "a")))


def test_more_nodes_or_survivors_than_hosts_are_refused() -> None:
    launch = SshLaunch(hosts=("a", "b"), min_nodes=3)
    with pytest.raises(LaunchError, match="only 2"):
        job_for(recipe("demo"), launch, slots=(1, 1))
    with pytest.raises(LaunchError, match="only 2 hosts"):
        slots_for(launch, nodes=3)


def test_the_instances_of_the_seeds_are_known() -> None:
    families = {name.split(".")[0] for name in INSTANCES}
    assert families == {"p3", "p3dn", "p4d", "p4de", "p5", "p5e", "p5en", "g4dn", "g5", "g6", "g6e"}
    big = instance_named("ml.p4d.24xlarge")
    assert (big.gpus, big.gpu_memory_gib, big.efa) == (8, 40, 4)
    assert instance_named("p3.16xlarge").gpus == 8
    with pytest.raises(LaunchError, match=r"p4d\.24xlarg") as caught:
        instance_named("p4d.24xlarg")
    assert "p4d.24xlarge" in caught.value.remedy


def test_a_file_changes_and_adds_instances(tmp_path: Path) -> None:
    file = tmp_path / "instances.json"
    new = {"gpus": 2, "gpu": "X", "gpu_memory_gib": 8, "vcpus": 4, "memory_gib": 16, "efa": 0}
    file.write_text(json.dumps({"p5.48xlarge": {"usd_per_hour": 40.5, "priced_at": "2026-11"}, "x1.big": new}))
    known = with_overrides(file)
    assert (known["p5.48xlarge"].usd_per_hour, known["p5.48xlarge"].gpus) == (40.5, 8)
    assert known["x1.big"].gpus == 2
    for bad in ({"p5.48xlarge": {"gpu_count": 8}}, {"p5.48xlarge": {"gpus": "8"}}, {"x": {"gpus": 1}}, [1]):
        file.write_text(json.dumps(bad))
        with pytest.raises(LaunchError):
            with_overrides(file)


def test_a_status_travels_as_json() -> None:
    status = JobStatus(JobState.RUNNING, "d", 3, None, 1, (HostStatus("h", "running"),), ("e",))
    assert JobStatus.from_json(json.loads(json.dumps(status.as_json()))) == status
