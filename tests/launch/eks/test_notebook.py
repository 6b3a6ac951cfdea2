"""The notebook of a run on EKS: what helm is told, and what nobody is told."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path
from typing import Any

import bcrypt
import pytest
from eks_world import helm_record

from maskfleet.errors import LaunchError
from maskfleet.launch.backend import parse_handle
from maskfleet.launch.eks.notebook import (
    NotebookRelease,
    RunRelease,
    certificate_fingerprint,
    checked_password,
    ensured,
    notebook_image,
    random_password,
)
from maskfleet.launch.eks.release import record_of
from maskfleet.launch.job import JobHandle
from maskfleet.system.deploy_files import deploy_path
from maskfleet.system.kube.client import Kube
from maskfleet.system.kube.fake import FakeKube
from maskfleet.system.process import Finished, RecordingShell
from tools import run_tool

PASSWORD = "correct horse battery"
ABSENT = Finished(1, err="Error: release: not found\n")
RUN: dict[str, Any] = {
    "image": "123.dkr.ecr.eu-west-1.amazonaws.com/maskfleet:0.3",
    "shared_fs": "fsx",
    "shared_pvc": "pv-fsx",
    "log_dir": "logs",
    "run_id": "r50-1x",
    "data_fs": "fsx",
    "data_pvc": "",
}
RELEASE = RunRelease(None, "kubeflow", "r50")


def answer(values: dict[str, Any]) -> Finished:
    return Finished(0, json.dumps(values))


def ensure(shell: RecordingShell, *, release: RunRelease = RELEASE, **wants: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"image": None, "instance": None, "ask": lambda: PASSWORD, "renew": False, **wants}
    return ensured(NotebookRelease(release, None, run=shell), **options)


def test_a_first_notebook_is_installed_for_the_runs_folder_and_volume() -> None:
    shell = RecordingShell([ABSENT, answer(RUN), Finished(0)])
    ensure(shell)
    read, read_run, install = shell.calls
    place = ["--namespace", "kubeflow"]
    assert read == (["helm", "get", "values", "r50-notebook", "--output", "json", *place], "")
    assert read_run == (["helm", "get", "values", "r50", "--all", "--output", "json", *place], "")
    chart = str(deploy_path("helm", "notebook"))
    assert install[0] == ["helm", "upgrade", "--install", "r50-notebook", chart, "--values", "-", *place]
    sent = json.loads(install[1])
    hashed = sent.pop("htpasswd")
    assert bcrypt.checkpw(PASSWORD.encode(), hashed.encode())
    assert hashed.startswith("$2b$12$")
    assert sent == {
        "image": "123.dkr.ecr.eu-west-1.amazonaws.com/maskfleet:0.3-notebook",
        "shared_fs": "fsx",
        "shared_pvc": "pv-fsx",
        "log_dir": "logs/r50-1x",
        "gpu_instance_type": "",
        "user": "fleet",
        "existing_secret": "",
    }


def test_the_password_leaves_this_process_only_as_a_hash() -> None:
    shell = RecordingShell([ABSENT, answer(RUN), Finished(0)])
    ensure(shell)
    everything = json.dumps(shell.calls)
    assert PASSWORD not in everything
    assert base64.b64encode(PASSWORD.encode()).decode() not in everything
    assert all("$2b$" not in argument for argv, _ in shell.calls for argument in argv)


def test_a_second_call_changes_nothing_and_asks_nothing() -> None:
    shell = RecordingShell([answer({"image": "x:1", "htpasswd": "h"})])
    values = ensure(shell, ask=lambda: pytest.fail("asked for a password"))
    assert values == {"image": "x:1", "htpasswd": "h"}
    assert len(shell.calls) == 1


def test_another_password_keeps_everything_else() -> None:
    before = {"image": "x:1", "htpasswd": "h", "work_dir": "notebooks/ann", "source_cidr": "203.0.113.7/32"}
    shell = RecordingShell([answer(before), Finished(0)])
    ensure(shell, renew=True)
    sent = json.loads(shell.calls[1][1])
    assert bcrypt.checkpw(PASSWORD.encode(), sent["htpasswd"].encode())
    assert {**sent, "htpasswd": "h"} == {**before, "user": "fleet", "existing_secret": ""}


def test_another_image_keeps_the_password() -> None:
    shell = RecordingShell([answer({"image": "x:1", "htpasswd": "h"}), Finished(0)])
    ensure(shell, image="x:2", instance="g5.xlarge", ask=lambda: pytest.fail("asked for a password"))
    assert json.loads(shell.calls[1][1]) == {"image": "x:2", "htpasswd": "h", "gpu_instance_type": "g5.xlarge"}


def test_a_run_id_that_nobody_gave_is_the_release(tmp_path: Path) -> None:
    shell = RecordingShell(
        [ABSENT, answer({**RUN, "run_id": "", "data_fs": "data", "data_pvc": "pv-data"}), Finished(0)]
    )
    values = ensure(shell)
    assert values["log_dir"] == "logs/r50"
    assert (values["data_fs"], values["data_pvc"]) == ("data", "pv-data")


def test_what_is_sent_is_what_the_chart_takes(tmp_path: Path) -> None:
    shell = RecordingShell([ABSENT, answer({**RUN, "data_fs": "data", "data_pvc": "pv-data"}), Finished(0)])
    ensure(shell, instance="g5.xlarge")
    file = tmp_path / "values.json"
    file.write_text(shell.calls[-1][1])
    made = run_tool("helm", "template", "r50-notebook", deploy_path("helm", "notebook"), "--values", file)
    assert 'value: "/fsx/logs/r50-1x"' in made


@pytest.mark.parametrize(
    ("handle", "release"),
    [
        ("eks://kubeflow/r50", RunRelease(None, "kubeflow", "r50")),
        ("eks://dev@kubeflow/r50", RunRelease("dev", "kubeflow", "r50")),
        (
            str(JobHandle("eks", "arn:aws:eks:eu-west-1:1:cluster/a@b@kubeflow", "r50")),
            RunRelease("arn:aws:eks:eu-west-1:1:cluster/a@b", "kubeflow", "r50"),
        ),
    ],
)
def test_a_handle_says_where(handle: str, release: RunRelease) -> None:
    assert RunRelease.of(parse_handle(handle)) == release
    shell = RecordingShell([answer({})])
    ensure(shell, release=release)
    argv = shell.calls[0][0]
    assert argv[argv.index("--namespace") + 1] == "kubeflow"
    assert argv[-2:] == (["--kube-context", release.context] if release.context else ["--namespace", "kubeflow"])


def test_names_of_releases_fit_and_differ() -> None:
    names = ["r50", "a" * 31, "a" * 32, "a" * 40, "a" * 39 + "b", "a" * 21 + "-" + "b" * 15]
    made = [RunRelease(None, "n", name).notebook for name in names]
    assert made[:2] == ["r50-notebook", "a" * 31 + "-notebook"]
    assert len(set(made)) == len(names)
    assert all(len(name) <= 40 and "--" not in name and name.endswith("-notebook") for name in made)


@pytest.mark.parametrize(
    ("image", "made"),
    [
        ("maskfleet:1", "maskfleet:1-notebook"),
        ("host:5000/a/maskfleet:1.2_x", "host:5000/a/maskfleet:1.2_x-notebook"),
        ("maskfleet", None),
        ("host:5000/maskfleet", None),
        ("maskfleet@sha256:" + "0" * 64, None),
        ("maskfleet:1@sha256:" + "0" * 64, "maskfleet:1-notebook"),
        ("", None),
    ],
)
def test_the_image_is_the_runs_with_another_tag_or_must_be_named(image: str, made: str | None) -> None:
    if made is None:
        with pytest.raises(LaunchError) as refused:
            notebook_image(image)
        assert "--image" in refused.value.remedy
    else:
        assert notebook_image(image) == made


@pytest.mark.parametrize("password", ["", "short", "ä" * 40, "tab\tis no key", "two\nlines of text"])
def test_a_password_that_guards_nothing_is_refused_before_anything_happens(password: str) -> None:
    shell = RecordingShell([ABSENT, answer(RUN)])
    with pytest.raises(LaunchError, match="password"):
        ensure(shell, ask=lambda: password)
    assert [argv[1] for argv, _ in shell.calls] == ["get", "get"]


def test_made_passwords_are_long_and_differ() -> None:
    made = {checked_password(random_password()) for _ in range(50)}
    assert len(made) == 50
    assert min(map(len, made)) >= 20


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([Finished(1, err="Error: Kubernetes cluster unreachable: dial tcp\n")], "cluster unreachable"),
        ([ABSENT, ABSENT], "there is no release r50"),
        ([ABSENT, answer({"image": "x:1"})], "no value shared_fs"),
        ([ABSENT, answer(RUN), Finished(1, err="Error: values don't meet\n- log_dir: Does not match\n")], "log_dir"),
    ],
)
def test_what_helm_says_is_passed_on(answers: list[Finished], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        ensure(RecordingShell(answers))


def test_stopping_twice_does_no_harm() -> None:
    shell = RecordingShell(
        [Finished(0), Finished(1, err="Error: uninstall: Release not loaded: x: release: not found")]
    )
    release = NotebookRelease(RELEASE, None, run=shell)
    assert release.stop()
    assert not release.stop()
    assert shell.calls[0][0] == ["helm", "uninstall", "r50-notebook", "--namespace", "kubeflow"]
    with pytest.raises(LaunchError, match="forbidden"):
        NotebookRelease(RELEASE, None, run=RecordingShell([Finished(1, err="Error: forbidden")])).stop()


@pytest.fixture
def certificate(tmp_path: Path) -> str:
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "1",
    ]
    subprocess.run(
        [*command, "-subj", "/CN=x", "-keyout", tmp_path / "key", "-out", tmp_path / "crt"],
        check=True,
        capture_output=True,
    )
    return (tmp_path / "crt").read_text()


def test_the_fingerprint_is_the_one_that_browsers_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, certificate: str
) -> None:
    with FakeKube(tmp_path) as api:
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig))
        data = {"data": {"tls.crt": base64.b64encode(certificate.encode()).decode()}}
        api.objects["/api/v1/namespaces/kubeflow/secrets/r50-notebook-tls"] = data
        with Kube(context=None, namespace="kubeflow") as kube:
            found = certificate_fingerprint(kube, "r50-notebook", {})
            assert certificate_fingerprint(kube, "other", {}) is None
            assert certificate_fingerprint(kube, "r50-notebook", {"tls": {"issuer": "x"}}) is None
    shown = run_tool("openssl", "x509", "-in", tmp_path / "crt", "-noout", "-fingerprint", "-sha256")
    assert found == shown.strip().partition("=")[2]


@pytest.mark.parametrize("chart", ["train", "mpi-operator"])
def test_a_release_of_the_notebooks_name_that_is_not_a_notebook_is_left_alone(chart: str, tmp_path: Path) -> None:
    with FakeKube(tmp_path) as api:
        api.add(helm_record("r50-notebook", {}, chart=chart))
        with Kube(kubeconfig=json.loads(api.kubeconfig.read_text()), namespace="kubeflow") as kube:
            record = record_of(kube, "r50-notebook")
    with pytest.raises(LaunchError, match=rf"release r50-notebook is not maskfleet's.* chart {chart}"):
        NotebookRelease(RELEASE, record, run=RecordingShell())
