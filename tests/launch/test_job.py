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
from maskfleet.launch.backend import BACKENDS, backend_for, parse_handle
from maskfleet.launch.instances import INSTANCES, WITHOUT_TORCH, instance_named, with_overrides
from maskfleet.launch.job import HostStatus, JobHandle, JobState, JobStatus, job_for
from maskfleet.launch.local import backend as local_backend
from maskfleet.launch.ssh.hosts import cluster_of


@given(place=st.text("abc.@-:,", min_size=1), path=st.text(min_size=1).filter(lambda text: text.strip("/")))
def test_a_handle_reads_back_whatever_the_path(place: str, path: str) -> None:
    if "\0" in path or any(0xD800 <= ord(letter) <= 0xDFFF for letter in path):
        return  # no file can have such a name
    handle = JobHandle("ssh", place, f"/{path.lstrip('/')}")
    assert parse_handle(str(handle)) == handle
    assert len(str(handle).split()) == 1


@pytest.mark.parametrize("text", ["", "runs/a", "ftp://a/b", "local://", "ssh://host"])
def test_what_is_no_handle_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="not a job's handle"):
        parse_handle(text)


def test_the_job_carries_the_whole_run_and_is_named_after_it(tmp_path: Path) -> None:
    run = recipe("demo")
    job = job_for(run, slots=(2,))
    (tmp_path / "run.yaml").write_text(job.run_yaml)
    assert load(tmp_path / "run.yaml") == run
    assert job.name == job_for(run, slots=(2,)).name
    assert job.name != job_for(recipe("standard"), slots=(2,)).name


@pytest.mark.parametrize("name", ["A", "a b", "$(x)", "-a", "a" * 64, "a\nb", "../a", ""])
def test_names_that_could_do_harm_are_refused(name: str) -> None:
    with pytest.raises(LaunchError, match="cannot name a job"):
        job_for(recipe("demo"), slots=(1,), name=name)


def test_ranks_follow_from_nodes_and_instance() -> None:
    assert backend_for(EksLaunch(nodes=2, instance="p4d.24xlarge")).job(recipe("demo")).ranks == 16
    assert backend_for(EksLaunch(instance="p4d.24xlarge"), nodes=3).job(recipe("demo")).ranks == 24


def test_a_target_without_a_folder_is_refused_with_those_that_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(BACKENDS, "sagemaker")
    with pytest.raises(LaunchError, match="launching on sagemaker is not built yet") as caught:
        backend_for(SageMakerLaunch(nodes=2, instance="ml.p4d.24xlarge"))
    assert caught.value.remedy == "launch --on local, --on ssh or --on eks"


@pytest.mark.parametrize(
    ("launch", "gpus", "ranks"),
    [
        (LocalLaunch(), 4, 4),
        (LocalLaunch(), 0, 1),
        (LocalLaunch(gpus=2), 4, 2),
        (LocalLaunch(ranks=3), 0, 3),
    ],
)
def test_ranks_here_are_the_gpus_or_what_is_asked(
    launch: LocalLaunch, gpus: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_backend, "gpus_here", lambda: gpus)
    assert backend_for(launch).slots == (ranks,)


def test_hosts_come_from_the_command_line_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# the cluster\nnode1 slots=8\n\nme@node2:2222   slots=4  # older\nnode3\n")
    from_file = cluster_of(SshLaunch(hosts_file=str(file))).hosts
    from_line = cluster_of(SshLaunch(hosts=("node1=8", "me@node2:2222=4", "node3"))).hosts
    assert from_file == from_line
    assert [host.slots for host in from_file] == [8, 4, 1]
    with_instance = cluster_of(SshLaunch(hosts=("node1", "node2=2"), instance="g5.12xlarge", user="ubuntu")).hosts
    assert [(host.address, host.slots) for host in with_instance] == [("ubuntu@node1", 4), ("ubuntu@node2", 2)]


@pytest.mark.parametrize(
    "line", ["node1 slot=8", "node1 slots=0", "node1 slots=x", "node 1", "$(reboot)", "-oProxyCommand=x", "a;b", "a'b"]
)
def test_a_typo_in_a_hosts_file_is_named_with_its_line(line: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(f"good slots=1\n{line}\n")
    with pytest.raises(LaunchError, match=r"hosts:2"):
        cluster_of(SshLaunch(hosts_file=str(file)))


def test_a_host_named_twice_is_refused() -> None:
    with pytest.raises(LaunchError, match="named twice"):
        cluster_of(SshLaunch(hosts=("a", "b", "a")))


def test_more_nodes_or_survivors_than_hosts_are_refused() -> None:
    launch = SshLaunch(hosts=("a", "b"), min_nodes=3)
    with pytest.raises(LaunchError, match="only 2"):
        backend_for(launch).job(recipe("demo"))
    with pytest.raises(LaunchError, match="only 2 hosts"):
        backend_for(launch, nodes=3)


def test_the_instances_of_aws_samples_are_known() -> None:
    families = {name.split(".")[0] for name in INSTANCES}
    assert families == {"p4d", "p4de", "p5", "p5e", "p5en", "p6-b200", "g4dn", "g5", "g6", "g6e", "g7e"}
    big = instance_named("ml.p4d.24xlarge")
    assert (big.gpus, big.gpu_memory_gib, big.efa) == (8, 40, 4)
    with pytest.raises(LaunchError, match=r"p4d\.24xlarg") as caught:
        instance_named("p4d.24xlarg")
    assert "p4d.24xlarge" in caught.value.remedy


@pytest.mark.parametrize(("old", "new"), WITHOUT_TORCH.items())
def test_a_type_without_torch_is_refused_with_what_replaces_it(old: str, new: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="V100") as caught:
        instance_named(f"ml.{old}")
    assert new in caught.value.remedy
    assert new in INSTANCES
    page = (Path(__file__).parents[2] / "docs" / "run-anywhere" / "launch.md").read_text(encoding="utf-8")
    assert f"| `{old}` | `{new}` |" in page
    # Whoever has an image for it may still name its facts.
    facts = {"gpus": 8, "gpu": "V100", "gpu_memory_gib": 16, "vcpus": 64, "memory_gib": 488, "efa": 0}
    (tmp_path / "more.json").write_text(json.dumps({old: facts}), encoding="utf-8")
    assert instance_named(old, with_overrides(tmp_path / "more.json")).gpu == "V100"


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
