"""`maskfleet ls`, `cp` and `fetch` on EKS: the pod they make, and real agents behind the API's websocket."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from eks_world import IMAGE, helm_record
from typer.testing import CliRunner

from maskfleet.cli.main import app
from maskfleet.errors import LaunchError
from maskfleet.launch.backend import backend_of, parse_handle
from maskfleet.launch.eks import files as eks_files
from maskfleet.launch.eks.files import pod_for
from maskfleet.launch.eks.release import RunStorage
from maskfleet.system.kube.client import ApiError
from maskfleet.system.kube.fake import FakeKube
from ports import free_port

HANDLE = "eks://kubeflow/r50"
VALUES = {"image": IMAGE, "run_id": "r50"}


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKube]:
    """A cluster with a release r50, whose volume is a folder here."""
    fake = FakeKube(tmp_path, port=free_port())
    monkeypatch.setenv("KUBECONFIG", str(fake.kubeconfig))
    monkeypatch.setattr(eks_files, "POLL_S", 0.01)
    fake.volume = tmp_path / "volume"
    run = fake.volume / "logs" / "r50"
    (run / "checkpoints").mkdir(parents=True)
    (run / "log.txt").write_text("hello\n")
    (run / "checkpoints" / "step-1.pt").write_bytes(os.urandom(2_000_000))
    (fake.volume / "data").mkdir()
    (fake.volume / "data" / "note").write_text("n")
    fake.add(helm_record("r50", VALUES))
    yield fake
    fake.stop()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def pods_left(api: FakeKube) -> list[str]:
    return [path for path, one in api.objects.items() if one["kind"] == "Pod"]


def test_the_run_folder_is_listed_and_the_pod_is_gone_afterwards(api: FakeKube) -> None:
    done = invoke("ls", HANDLE, "--json")
    assert [(one["path"], one["kind"]) for one in json.loads(done.stdout)] == [
        ("checkpoints", "folder"),
        ("log.txt", "file"),
    ]
    assert len(api.created_pods) == 1
    assert pods_left(api) == []


def test_two_slashes_begin_at_the_root_of_the_volume(api: FakeKube) -> None:
    assert "note" in invoke("ls", f"{HANDLE}//data").stdout
    assert {"logs/", "data/"} <= set(invoke("ls", f"{HANDLE}//").stdout.split())
    assert "log.txt" in invoke("ls", f"{HANDLE}/").stdout


def test_fetch_brings_the_whole_folder_over_a_connection_that_breaks(api: FakeKube, tmp_path: Path) -> None:
    assert api.volume is not None
    api.cut_exec_after = 1_000_000
    here = tmp_path / "here"
    done = invoke("fetch", HANDLE, str(here))
    assert done.exit_code == 0
    assert api.cut_exec_after is None
    assert contents(here) == contents(api.volume / "logs" / "r50")
    assert int(done.stdout.split(" bytes")[0].split()[-1]) < 2_000_006 + 100_000
    assert "0 files, 0 bytes; 2 were there already" in invoke("fetch", HANDLE, str(here)).stdout
    assert pods_left(api) == []


def test_one_file_is_copied_from_and_to_the_volume(api: FakeKube, tmp_path: Path) -> None:
    assert api.volume is not None
    invoke("cp", f"{HANDLE}/log.txt", str(tmp_path / "copy.txt"))
    assert (tmp_path / "copy.txt").read_text() == "hello\n"
    assert api.created_pods[-1]["spec"]["containers"][0]["volumeMounts"][0]["readOnly"] is True
    (tmp_path / "weights").write_bytes(os.urandom(500_000))
    done = invoke("cp", str(tmp_path / "weights"), f"{HANDLE}//data/weights")
    assert "500000 bytes sent" in done.stdout
    assert (api.volume / "data" / "weights").read_bytes() == (tmp_path / "weights").read_bytes()
    assert api.created_pods[-1]["spec"]["containers"][0]["volumeMounts"][0]["readOnly"] is False


def test_files_of_a_cancelled_run_can_still_be_fetched(api: FakeKube, tmp_path: Path) -> None:
    api.add(helm_record("r50", VALUES, status="uninstalled", version=2))
    assert invoke("fetch", HANDLE, str(tmp_path / "here")).exit_code == 0


def test_a_run_id_and_another_volume_are_honoured(api: FakeKube) -> None:
    values = {**VALUES, "run_id": "other", "shared_fs": "efs", "shared_pvc": "pv-efs", "log_dir": "runs"}
    api.add(helm_record("r50", values, version=2))
    with pytest.raises(LaunchError), backend_of(parse_handle(HANDLE)).files(parse_handle(HANDLE)) as files:
        files.entries()
    spec = api.created_pods[-1]["spec"]
    assert spec["volumes"][0]["persistentVolumeClaim"]["claimName"] == "pv-efs"
    assert spec["containers"][0]["volumeMounts"][0]["mountPath"] == "/efs"


@pytest.mark.parametrize("path", ["/..", "/../../etc/passwd", "//..", "/checkpoints/../../../data"])
def test_no_path_of_a_handle_leaves_the_volume(path: str, api: FakeKube, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="leaves the folder"):
        invoke("ls", f"{HANDLE}{path}")
    assert api.created_pods == []


def test_an_unknown_release_makes_no_pod(api: FakeKube) -> None:
    with pytest.raises(LaunchError, match="knows no release never-was"):
        invoke("ls", "eks://kubeflow/never-was")
    assert api.created_pods == []


def test_an_image_that_cannot_be_pulled_is_said_at_once(api: FakeKube) -> None:
    def stuck(pod: dict[str, Any]) -> None:
        waiting = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "repo/train"'}
        pod["status"] = {"phase": "Pending", "containerStatuses": [{"name": "files", "state": {"waiting": waiting}}]}

    api.on_new_pod = stuck
    with pytest.raises(LaunchError, match="image cannot be pulled"):
        invoke("ls", HANDLE)
    assert pods_left(api) == []


def test_a_pod_that_finds_no_node_is_given_up_with_the_reason(api: FakeKube, monkeypatch: pytest.MonkeyPatch) -> None:
    message = "0/3 nodes are available: 3 Insufficient cpu."
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    api.on_new_pod = lambda pod: pod.update(status={"phase": "Pending", "conditions": [unscheduled]})
    monkeypatch.setattr(eks_files, "START_S", 0.1)
    said: list[str] = []
    handle = parse_handle(HANDLE)
    with pytest.raises(LaunchError, match="Insufficient cpu"), backend_of(handle).files(handle, report=said.append):
        pass
    assert pods_left(api) == []
    [waits] = [words for words in said if "waits" in words]
    assert waits.endswith(message)


def test_a_namespace_that_refuses_pods_is_named(api: FakeKube) -> None:
    api.forbidden.add("/api/v1/namespaces/kubeflow/pods")
    with pytest.raises(ApiError, match="violates PodSecurity"):
        invoke("ls", HANDLE)


@pytest.mark.parametrize("told", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_whoever_ends_the_command_ends_the_pod(told: signal.Signals, api: FakeKube, tmp_path: Path) -> None:
    assert api.volume is not None
    with (api.volume / "logs" / "r50" / "huge").open("wb") as file:
        file.truncate(20 * 2**30)
    argv = [sys.executable, "-m", "maskfleet", "fetch", HANDLE, str(tmp_path / "here")]
    # In the background of a script Ctrl-C does nothing, and under nohup a closed terminal.
    ctrl_c = "--default-signal=INT" if told is signal.SIGINT else "--ignore-signal=INT"
    argv = ["env", ctrl_c, "--default-signal=HUP", *argv]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 240
    while not list(tmp_path.glob("here/huge*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(told)
    process.communicate(timeout=240)
    assert process.returncode != 0
    assert len(api.created_pods) == 1
    assert pods_left(api) == []


def test_the_pod_has_no_right_that_it_does_not_need() -> None:
    pod = pod_for("p", "r50", RunStorage("/fsx", "pv-fsx", "logs/r50", "i", ("ecr",)), writable=False)
    spec, container = pod["spec"], pod["spec"]["containers"][0]
    assert spec["automountServiceAccountToken"] is False
    assert spec["activeDeadlineSeconds"] == 6 * 3600
    assert spec["imagePullSecrets"] == [{"name": "ecr"}]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["runAsNonRoot"] is True
    assert container["command"][:3] == ["python3", "-I", "-c"]
    assert container["command"][-2:] == ["wait", "120"]
