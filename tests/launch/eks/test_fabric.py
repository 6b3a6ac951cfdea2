"""`maskfleet doctor --on eks --fabric`: the job that it installs, what it prints, and that it leaves nothing behind."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml
from eks_world import IMAGE, JOB, fit_cluster, launcher, mpijob
from typer.testing import CliRunner

from maskfleet.cli.main import app
from maskfleet.config.launch import EksLaunch
from maskfleet.errors import LaunchError
from maskfleet.launch.eks.backend import EksBackend
from maskfleet.launch.findings import Verdict
from maskfleet.log import FABRIC_MARK
from maskfleet.system.kube.fake import FakeKube
from maskfleet.system.process import Finished, RecordingShell
from ports import free_port

GIB_ROW = {"bytes": 2**30, "time_us": 4607.6, "bus_gb_per_s": 436.9, "ranks": 16, "hosts": 2}


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKube]:
    fake = fit_cluster(FakeKube(tmp_path, port=free_port()))
    monkeypatch.setenv("KUBECONFIG", str(fake.kubeconfig))
    yield fake
    fake.stop()


class Helm(RecordingShell):
    """Runs the job at once: its launcher ends with `code` after `lines`."""

    def __init__(self, api: FakeKube, *lines: str, code: int = 0) -> None:
        super().__init__()
        self._api, self._lines, self._code = api, lines, code

    def __call__(self, argv: Sequence[str], stdin: str = "", *, timeout_s: float = 60) -> Finished:
        if argv[1] == "install":
            job = mpijob("Succeeded" if self._code == 0 else "Failed", completed=True)
            pod = launcher(phase="Succeeded" if self._code == 0 else "Failed", code=self._code)
            job["metadata"]["name"] = pod["metadata"]["labels"][JOB] = argv[2]
            self._api.add(job, pod)
            self._api.append_log("r50-launcher-1", *self._lines)
        return super().__call__(argv, stdin, timeout_s=timeout_s)


def backend(helm: RecordingShell) -> EksBackend:
    return EksBackend(EksLaunch(image=IMAGE, nodes=2, instance="p5.48xlarge"), run=helm)


def test_the_job_is_that_of_a_training_without_a_run_and_is_removed_afterwards(api: FakeKube) -> None:
    rows = ['[1,0]<stdout>:' + FABRIC_MARK + json.dumps({"transport": "NCCL 2.28.9: EFA with GPUDirect RDMA"}),
            '[1,0]<stdout>:' + FABRIC_MARK + json.dumps(GIB_ROW)]  # fmt: skip
    helm, said = Helm(api, "all 2 workers answer", *rows), list[str]()
    found = backend(helm).fabric(said.append)
    assert [(one.name, one.verdict) for one in found] == [("transport", Verdict.OK), ("all-reduce 1 GiB", Verdict.OK)]
    assert "437 GB/s, 4,608 us, 16 ranks on 2 hosts; should reach 437 GB/s" in found[1].found
    assert said == ["all 2 workers answer"]
    (install, values), (uninstall, _) = helm.calls
    sent = yaml.safe_load(values)
    assert sent["fabric_test"] is True
    assert (sent["gpu_nodes"], sent["slots_per_node"], sent["backoff_limit"]) == (2, 8, 0)
    assert sent["max_run_s"] == 3600
    assert "run_yaml" not in sent
    assert install[2].startswith("fabric-test-")
    assert uninstall[:3] == ["helm", "uninstall", install[2]]


def test_a_test_that_fails_is_removed_and_its_log_shown(api: FakeKube) -> None:
    helm, said = Helm(api, "[1,3]<stderr>:error: the job asked for EFA", code=2), list[str]()
    with pytest.raises(LaunchError, match="the fabric test is failed"):
        backend(helm).fabric(said.append)
    assert "[rank3]: error: the job asked for EFA" in said
    assert [call[0][1] for call in helm.calls] == ["install", "uninstall"]


def test_a_cluster_that_cannot_take_a_job_gets_none(api: FakeKube) -> None:
    api.remove({"kind": "Namespace", "metadata": {"name": "kubeflow"}})
    helm = Helm(api)
    with pytest.raises(LaunchError, match="no namespace kubeflow"):
        backend(helm).fabric(print)
    assert helm.calls == []


def test_other_targets_say_how_to_run_it() -> None:
    done = CliRunner().invoke(app, ["doctor", "--fabric"])
    assert isinstance(done.exception, LaunchError)
    assert "python -m maskfleet.bench.fabric" in done.exception.remedy
