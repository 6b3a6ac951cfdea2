"""Jobs from Python: prepared, submitted, followed, fetched; and the stack that notebooks use."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
from sagemaker_world import REGION, Refusal, World, launch

import maskfleet
from maskfleet.config.recipes import recipe
from maskfleet.errors import ConfigError, LaunchError
from maskfleet.launch.job import JobState
from maskfleet.launch.sagemaker import logs
from maskfleet.launch.sagemaker.stack import STACK_VARIABLE, sagemaker_stack

OUTPUTS = {"DataUri": "s3://lab/maskfleet", "EfsFileSystemId": "fs-01234567"}


def stacked(world: World, **outputs: str) -> None:
    rows = [{"OutputKey": key, "OutputValue": value} for key, value in outputs.items()]
    world.stacks["sm"] = {"StackStatus": "CREATE_COMPLETE", "Outputs": rows}


def submitted(world: World) -> maskfleet.LaunchedJob:
    section = launch().model_dump(exclude_none=True)
    job = maskfleet.prepare_job(recipe("demo"), section, name="r50").submit()
    assert repr(job) == f"LaunchedJob('sagemaker://{REGION}/r50')"
    return job


def test_submit_sends_what_text_shows(world: World) -> None:
    prepared = maskfleet.prepare_job(recipe("demo"), launch(), name="r50")
    assert not world.requests
    prepared.submit()
    [(_, _, body)] = [one for one in world.requests if one[0] == "CreateTrainingJob"]
    assert body.decode() in prepared.text()


def test_a_launch_section_with_a_wrong_field_is_named(world: World) -> None:
    with pytest.raises(ConfigError, match=r"launch on sagemaker: .*spots"):
        maskfleet.prepare_job(recipe("demo"), {"on": "sagemaker", "spots": True})


def test_a_job_is_followed_and_fetched(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LATE_S", 0.0)
    monkeypatch.setattr(logs, "POLL_S", 0.0)
    job = submitted(world)
    assert job.status().state is JobState.PENDING
    world.write("r50/algo-1-1794830400", "[1/6] loss", "done")
    world.move("r50", "Completed", status="Completed")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        info = tarfile.TarInfo("metrics.jsonl")
        info.size = 2
        tar.addfile(info, io.BytesIO(b"{}"))
    world.objects["lab", "out/r50/output/model.tar.gz"] = packed.getvalue()
    again, lines = maskfleet.LaunchedJob(str(job.handle)), list[str]()
    assert again.wait(lines.append).state is JobState.DONE
    assert lines == ["[sagemaker]: 2026-11-16 12:01:00 Completed", "[1/6] loss", "done"]
    assert list(again.logs()) == lines[1:]
    assert again.fetch(tmp_path / "r50") == tmp_path / "r50"
    assert (tmp_path / "r50" / "metrics.jsonl").read_bytes() == b"{}"


def test_waiting_for_a_job_that_fails_or_is_cancelled_raises(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LATE_S", 0.0)
    monkeypatch.setattr(logs, "POLL_S", 0.0)
    job = submitted(world)
    world.move("r50", "Failed", status="Failed", reason="CapacityError: no capacity")
    with pytest.raises(LaunchError, match=r"r50 is failed: (.|\n)*CapacityError"):
        job.wait()
    world.move("r50", "Stopped", status="Stopped")
    with pytest.raises(LaunchError, match="r50 is cancelled"):
        job.wait()
    job.cancel()
    assert not world.sent("StopTrainingJob"), "it has ended already"


def test_a_stack_gives_a_launch_section(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    stacked(world, **OUTPUTS)
    monkeypatch.setenv(STACK_VARIABLE, "sm")
    stack = sagemaker_stack(region=REGION)
    assert (stack.name, stack.region, stack.data_uri) == ("sm", REGION, "s3://lab/maskfleet")
    assert [stack.source(one) for one in ("efs", "fsx")] == ["s3", "s3"], "nothing is mounted here"
    (tmp_path / "efs").mkdir()
    (tmp_path / "fsx").mkdir()
    assert [stack.source(one) for one in ("efs", "fsx")] == ["efs", "s3"]
    assert stack.path("s3", "data") == "s3://lab/maskfleet/data"
    assert stack.path("efs", "data") == str(tmp_path / "efs/data")
    with pytest.raises(LaunchError, match="stack sm has no fsx"):
        stack.path("fsx", "data")
    from_s3 = stack.launch("s3", "data", log="logs/a", nodes=2)
    assert from_s3["channels"] == [{"name": "train", "source": "s3", "uri": "s3://lab/maskfleet/data"}]
    assert from_s3["nodes"] == 2
    train, log = stack.launch("efs", "data", log="logs/a")["channels"]
    assert train == {"name": "train", "source": "efs", "uri": "/data"}
    assert log == {"name": "log", "source": "efs", "uri": "/logs/a", "read_only": False}
    assert (tmp_path / "efs/logs/a").is_dir()


def test_a_stack_that_is_not_named_or_not_ours_is_an_error(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STACK_VARIABLE, raising=False)
    with pytest.raises(LaunchError, match="no stack is named"):
        sagemaker_stack()
    stacked(world, Vpc="vpc-1")
    with pytest.raises(LaunchError, match="stack sm has no output DataUri"):
        sagemaker_stack("sm", region=REGION)


def test_trials_are_created_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    stacked(world, **OUTPUTS)
    known: set[str] = set()

    def create(**given: Any) -> dict[str, Any]:
        name = given.get("TrialName") or given["ExperimentName"]
        if name in known:
            raise Refusal("ValidationException", f"Experiment names must be unique: {name} already exists")
        known.add(name)
        return {}

    monkeypatch.setattr(world, "_create_experiment", create, raising=False)
    monkeypatch.setattr(world, "_create_trial", create, raising=False)
    stack = sagemaker_stack("sm", region=REGION)
    for _ in range(2):
        names = stack.create_trials("e", ["resnet50", "resnet101"])
        assert names == {"resnet50": "e-resnet50", "resnet101": "e-resnet101"}
    assert known == {"e", "e-resnet50", "e-resnet101"}
    world.user_denies.add("CreateTrial")
    with pytest.raises(LaunchError, match="CreateTrial"):
        stack.create_trials("e", ["c4"])
