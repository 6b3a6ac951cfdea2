"""From a run to helm's command, and what a cluster must have before it is sent."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from eks_world import IMAGE, claim, fit_cluster, helm_record, launcher, mpijob
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from maskfleet.cli.main import app
from maskfleet.config.base import replaced
from maskfleet.config.launch import EksLaunch
from maskfleet.config.load import load
from maskfleet.config.recipes import recipe
from maskfleet.errors import ConfigError, LaunchError, MaskfleetError
from maskfleet.launch.eks import backend as eks_backend
from maskfleet.launch.eks.backend import EksBackend
from maskfleet.launch.eks.mpijob import values_text
from maskfleet.launch.job import JobHandle, Rendered
from maskfleet.system.deploy_files import deploy_path
from maskfleet.system.kube.fake import FakeKube
from maskfleet.system.process import Finished, RecordingShell
from ports import free_port
from tools import tool

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
HANDLE = JobHandle("eks", "kubeflow", "r50")


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKube]:
    fake = fit_cluster(FakeKube(tmp_path, port=free_port()))
    monkeypatch.setenv("KUBECONFIG", str(fake.kubeconfig))
    yield fake
    fake.stop()


def rendered(run: Any = None, **launch: Any) -> tuple[EksBackend, Rendered, RecordingShell]:
    """A backend with a shell that only remembers, and what it would send for the job r50."""
    shell = RecordingShell()
    backend = EksBackend(EksLaunch(**{"image": IMAGE, "nodes": 2, **launch}), run=shell)
    return backend, backend.render(backend.job(run or recipe("standard"), name="r50")), shell


def values_of(**launch: Any) -> dict[str, Any]:
    return dict(yaml.safe_load(rendered(**launch)[1].files["values.yaml"]))


def test_submit_sends_what_render_returned(api: FakeKube) -> None:
    backend, what, shell = rendered()
    assert backend.submit(what) == HANDLE
    assert shell.calls == [(list(what.commands[0]), what.files["values.yaml"])]


def test_the_command_names_chart_namespace_and_context() -> None:
    chart = str(deploy_path("helm", "train"))
    assert rendered(context="arn:aws:eks:x:1:cluster/a", namespace="ml")[1].commands == (
        ("helm", "install", "r50", chart, "--values", "-", "--namespace", "ml",
         "--kube-context", "arn:aws:eks:x:1:cluster/a"),
    )  # fmt: skip


def test_render_needs_no_cluster_and_no_helm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    monkeypatch.setenv("PATH", "")
    arguments = ["launch", "--on", "eks", "--recipe", "standard", "--image", "i", "--name", "r50", "--dry-run"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0
    assert done.output == rendered(nodes=1, image="i")[1].text() + ("" if done.output.endswith("\n") else "\n")


def test_the_values_say_nodes_ranks_volumes_and_the_whole_run(tmp_path: Path) -> None:
    values = values_of(instance="p4d.24xlarge", queue="gpu", retries=1, efa=False, chart_values={"nccl_debug": "INFO"})
    run_yaml = values.pop("run_yaml")
    assert values == {
        "run_id": "r50", "log_dir": "logs", "image": IMAGE, "gpu_nodes": 2, "slots_per_node": 8,
        "gpu_instance_type": "p4d.24xlarge", "gpus_per_node": 8, "efa_per_node": 0, "shared_fs": "fsx",
        "shared_pvc": "pv-fsx", "backoff_limit": 1, "shm_gib": 16.0, "queue": "gpu", "nccl_debug": "INFO",
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(run_yaml)
    assert load(tmp_path / "run.yaml") == replaced(recipe("standard"), {"data.root": "/fsx/data/coco2017"})


@pytest.mark.parametrize(
    ("root", "launch", "there"),
    [
        ("data", {}, "/fsx/data/coco2017"),
        ("data", {"data_dir": "sets/coco"}, "/fsx/sets/coco"),
        ("my/set", {}, "/fsx/my/set"),
        ("/fsx/elsewhere", {}, "/fsx/elsewhere"),
        ("s3://bucket/sets/coco", {}, "s3://bucket/sets/coco"),
        ("data", {"data_claim": "pv-efs", "data_path": "/efs"}, "/efs/data/coco2017"),
        ("/fsx/x", {"data_claim": "pv-efs", "data_path": "/efs"}, "/fsx/x"),
    ],
)
def test_data_root_is_where_the_pods_see_it(root: str, launch: dict[str, str], there: str) -> None:
    run = replaced(recipe("standard"), {"data.root": root})
    values = yaml.safe_load(rendered(run, **launch)[1].files["values.yaml"])
    assert yaml.safe_load(values["run_yaml"])["data"]["root"] == there
    assert values.get("data_fs") == ("efs" if "data_claim" in launch else None)


@pytest.mark.parametrize("root", ["/home/me/coco", "/fsxother/coco", "../coco", "a/../../b", "~/coco", "/fsx/../etc"])
def test_data_that_no_pod_would_see_is_refused(root: str) -> None:
    with pytest.raises(LaunchError, match=r"data\.root"):
        rendered(replaced(recipe("standard"), {"data.root": root}))


@pytest.mark.parametrize("field", ["train.weights", "model.backbone.weights"])
def test_weights_of_this_machine_are_refused_and_those_of_volume_or_image_are_not(field: str, tmp_path: Path) -> None:
    mine = tmp_path / "w.npz"
    mine.touch()
    for path in (str(mine), "~/w.npz"):
        with pytest.raises(LaunchError, match=rf"{field} .*w.npz is a file on this machine") as refused:
            rendered(replaced(recipe("standard"), {field: path}))
        assert f"{field}=/fsx/" in refused.value.remedy
    for path in ("/fsx/w.npz", "w.npz", "/opt/of-the-image/w.npz"):
        rendered(replaced(recipe("standard"), {field: path}))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--hosts", "a,b"], "launch on eks: hosts is no field of eks"),
        (["--launch-set", "nod=1"], "nod is no field of eks; did you mean nodes?"),
        (["--launch-set", "data_path=/efs"], "launch on eks: data_claim and data_path belong together"),
        (["--launch-set", "shared_path=fsx"], "shared_path = 'fsx': it should match pattern"),
        (["--on", "EKS"], "there is no place 'EKS': it is local, ssh, sagemaker, eks"),
    ],
)
def test_an_option_that_does_not_fit_is_named_in_words(option: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        CliRunner().invoke(app, ["launch", "--on", "eks", "--image", "i", *option, "--dry-run"], catch_exceptions=False)
    assert words in refused.value.what


def test_instances_without_gpus_train_with_one_rank_a_node() -> None:
    values = values_of(instance="m7i.4xlarge", gpus=0, cpus=15, memory_gib=56)
    assert (values["gpus_per_node"], values["slots_per_node"], values["cpus_per_node"]) == (0, 1, 15)


def test_an_image_must_be_named() -> None:
    with pytest.raises(LaunchError, match="no training image"):
        rendered(image=None)


def test_values_that_follow_from_the_job_are_not_set_twice() -> None:
    with pytest.raises(LaunchError, match="gpu_nodes, run_yaml"):
        rendered(chart_values={"gpu_nodes": 4, "run_yaml": "x"})


def test_names_are_short_enough_for_what_kubernetes_appends() -> None:
    backend = EksBackend(EksLaunch(image="i"))
    assert backend.job(recipe("demo"), name="a" * 40).name == "a" * 40
    with pytest.raises(LaunchError, match="cannot name a job"):
        backend.job(recipe("demo"), name="a" * 41)


def test_a_name_is_good_for_a_service_too() -> None:
    with pytest.raises(LaunchError, match="cannot name a job"):
        EksBackend(EksLaunch(image="i")).job(recipe("demo"), name="50-epochs")


@pytest.mark.parametrize("launch", [{}, {"data_claim": "pv-efs", "data_path": "/efs"}, {"queue": "q", "retries": 0},
                                    {"instance": "g5.xlarge", "nodes": 1}, {"efa": False, "shm_gib": 2.5},
                                    {"instance": "m7i.4xlarge", "gpus": 0, "cpus": 15, "memory_gib": 56}])  # fmt: skip
def test_the_real_chart_takes_our_values(launch: dict[str, Any]) -> None:
    what = rendered(**launch)[1]
    argv = [tool("helm"), "template", "r50", str(deploy_path("helm", "train")), "--namespace", "kubeflow", "-f", "-"]
    done = subprocess.run(argv, input=what.files["values.yaml"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    objects = [one for one in yaml.safe_load_all(done.stdout) if one]
    run = next(one for one in objects if one["kind"] == "ConfigMap" and "run.yaml" in one["data"])
    assert run["data"]["run.yaml"] == yaml.safe_load(what.files["values.yaml"])["run_yaml"]
    job = next(one for one in objects if one["kind"] == "MPIJob")
    assert (job["metadata"]["name"], job["spec"]["slotsPerWorker"]) == ("r50", values_of(**launch)["slots_per_node"])
    command = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["command"]
    assert "/fsx/logs/r50" in command


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=150, deadline=None)
@given(text=TEXT, word=TEXT, end=st.sampled_from(["", "\n", "\n\n", " \n"]))
def test_any_text_survives_the_values_file(text: str, word: str, end: str) -> None:
    values = {"image": word, "run_yaml": text + end, "nested": {"a": [word, 1, None, True]}}
    assert yaml.safe_load(values_text(values)) == values


def test_helm_reads_hostile_text_as_it_was_written(tmp_path: Path) -> None:
    chart = tmp_path / "echo"
    (chart / "templates").mkdir(parents=True)
    (chart / "Chart.yaml").write_text("apiVersion: v2\nname: echo\nversion: 0.1.0\n")
    (chart / "templates" / "a.yaml").write_text("text: {{ .Values | toJson | quote }}\n")
    for run in ("a: {{ .Files }}\n", "\u2028\x85\x7f \t'\"#: - \U0001f600", "on", "0x10", "a\n\n  b\n", "é: “q”\n"):
        argv = [tool("helm"), "template", "x", str(chart), "-f", "-"]
        done = subprocess.run(
            argv, input=values_text({"run_yaml": run, "image": run}), capture_output=True, text=True, check=True
        )
        assert json.loads(yaml.safe_load(done.stdout)["text"]) == {"run_yaml": run, "image": run}


Change = Callable[[FakeKube], None]


def without(path: str) -> Change:
    return lambda api: api.objects.pop(path) and None


def old_lease(api: FakeKube) -> None:
    next(one for one in api.objects.values() if one["kind"] == "Lease")["spec"]["renewTime"] = "2026-01-01T00:00:00.0Z"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("/api/v1/namespaces/kubeflow"), "no namespace kubeflow"),
        (without("/apis/kubeflow.org/v2beta1"), "has no MPIJob resource"),
        (old_lease, "operator does not run: lease not renewed for"),
        (without("/api/v1/namespaces/kubeflow/persistentvolumeclaims/pv-fsx"), "has no volume claim pv-fsx"),
        (lambda api: api.add(claim("pv-fsx", "Pending")), "pv-fsx is Pending"),
        (lambda api: api.add(claim("pv-fsx", "Lost")), "pv-fsx is Lost"),
        (
            lambda api: setattr(api, "allowed", lambda asked: asked["resource"] != "mpijobs"),
            "may not get mpijobs, create mpijobs, delete mpijobs",
        ),
        (lambda api: setattr(api, "allowed", lambda asked: asked.get("subresource") != "log"), "may not get pods/log"),
    ],
)
def test_what_a_cluster_lacks_is_said_before_anything_is_sent(change: Change, words: str, api: FakeKube) -> None:
    change(api)
    backend, what, shell = rendered()
    with pytest.raises(LaunchError, match=words) as caught:
        backend.submit(what)
    assert caught.value.remedy
    assert shell.calls == []


def test_a_claim_that_binds_with_its_first_pod_is_fine(api: FakeKube) -> None:
    api.add(claim("pv-fsx", "Pending", "late"))
    late = {"kind": "StorageClass", "metadata": {"name": "late"}, "volumeBindingMode": "WaitForFirstConsumer"}
    api.add(late)
    backend, what, _ = rendered()
    assert backend.submit(what) == HANDLE


def test_an_operator_without_a_lease_is_no_reason_to_refuse(api: FakeKube) -> None:
    without("/apis/coordination.k8s.io/v1/namespaces/mpi/leases/mpi-operator")(api)
    backend, what, _ = rendered()
    assert backend.submit(what) == HANDLE


def test_who_may_not_look_around_may_still_launch(api: FakeKube) -> None:
    api.objects.pop("/api/v1/namespaces/kubeflow")
    api.objects["/api/v1/namespaces/kubeflow/"] = {"kind": "Namespace", "metadata": {"name": "x"}}
    api.broken["/api/v1/namespaces/kubeflow"] = 403
    api.forbidden.add("/apis/coordination.k8s.io")
    backend, what, _ = rendered()
    assert backend.submit(what) == HANDLE


def test_a_job_that_runs_is_not_sent_again(api: FakeKube) -> None:
    api.add(mpijob("Created"), helm_record("r50", {}))
    backend, what, shell = rendered()
    with pytest.raises(LaunchError, match="eks://kubeflow/r50 is pending already") as caught:
        backend.submit(what)
    assert "maskfleet logs -f eks://kubeflow/r50" in caught.value.remedy
    assert shell.calls == []


def test_a_run_that_ended_is_cleared_and_continued_under_its_name(api: FakeKube) -> None:
    backend, what, shell = rendered()
    run_yaml = yaml.safe_load(what.files["values.yaml"])["run_yaml"]
    api.add(mpijob("Created", "Failed", completed=True), helm_record("r50", {"run_yaml": run_yaml}))
    backend.submit(what)
    uninstall, install = (call[0] for call in shell.calls)
    assert uninstall[:4] == ["helm", "uninstall", "r50", "--keep-history"]
    assert uninstall[uninstall.index("--cascade") + 1] == "foreground"
    assert install == [*what.commands[0], "--replace"]


def test_a_cancelled_run_is_continued_without_clearing(api: FakeKube) -> None:
    api.add(helm_record("r50", {}, status="uninstalled"))
    backend, what, shell = rendered()
    backend.submit(what)
    assert [call[0] for call in shell.calls] == [[*what.commands[0], "--replace"]]


def test_another_run_under_the_same_name_is_refused(api: FakeKube) -> None:
    other = yaml.safe_load(rendered(recipe("demo"))[1].files["values.yaml"])["run_yaml"]
    api.add(helm_record("r50", {"run_yaml": other}, status="uninstalled"))
    backend, what, shell = rendered()
    with pytest.raises(LaunchError, match="eks://kubeflow/r50 holds another run") as caught:
        backend.submit(what)
    assert "--name" in caught.value.remedy
    assert shell.calls == []


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("Error: INSTALLATION FAILED: cannot re-use a name that is still in use", "same moment"),
        ("Error: INSTALLATION FAILED: cannot reuse a name that is still in use", "same moment"),
        ('Error: INSTALLATION FAILED: secrets "sh.helm.release.v1.r50.v1" already exists', "same moment"),
        ("Error: values don't meet the specifications of the schema(s): - shm_gib: Invalid type", "names the value"),
        ("Error: INSTALLATION FAILED: Service exists … invalid ownership metadata", "choose another --name"),
        ('secrets is forbidden: User "x" cannot create resource', "permission"),
        ("", "fix what helm reports"),
    ],
)
def test_what_helm_says_is_passed_on_with_a_next_step(said: str, remedy: str, api: FakeKube) -> None:
    backend, what, shell = rendered()
    shell.answers = [Finished(1, "", said)]
    with pytest.raises(LaunchError, match="helm could not install eks://kubeflow/r50") as caught:
        backend.submit(what)
    assert remedy in caught.value.remedy


def test_a_missing_helm_is_named(api: FakeKube, monkeypatch: pytest.MonkeyPatch) -> None:
    from maskfleet.system.process import run_command

    monkeypatch.setenv("PATH", "/nowhere")
    backend = EksBackend(EksLaunch(image="i"), run=run_command)
    with pytest.raises(MaskfleetError, match="helm is not installed here"):
        backend.submit(backend.render(backend.job(recipe("demo"), name="r50")))


def test_cancel_removes_the_release_and_keeps_its_record(api: FakeKube) -> None:
    api.add(mpijob("Created", "Running"), helm_record("r50", {}))
    backend, _, shell = rendered(context="fake")
    backend.cancel(HANDLE)
    assert shell.calls == [(["helm", "uninstall", "r50", "--keep-history", "--ignore-not-found", "--cascade",
                             "foreground", "--wait", "--timeout", "300s", "--namespace", "kubeflow",
                             "--kube-context", "fake"], "")]  # fmt: skip


def test_cancelling_twice_or_what_never_was_does_nothing(api: FakeKube) -> None:
    backend, _, shell = rendered()
    backend.cancel(HANDLE)
    api.add(helm_record("r50", {}, status="uninstalled"))
    backend.cancel(HANDLE)
    assert shell.calls == []


def test_cancelling_while_somebody_else_does_is_no_error(api: FakeKube) -> None:
    api.add(helm_record("r50", {}))
    backend, _, shell = rendered()
    shell.answers = [Finished(1, "", 'Error: uninstallation … the release named "r50" is already deleted')]
    backend.cancel(HANDLE)
    shell.answers = [Finished(1, "", "Error: context deadline exceeded")]
    with pytest.raises(LaunchError, match="could not remove r50: Error: context deadline"):
        backend.cancel(HANDLE)


STRANGERS = [
    {"chart": "notebook"},
    {"chart": "mpi-operator", "manifest": "metadata: {}\n"},
    {"chart": "train", "manifest": "metadata:\n  labels:\n    app.kubernetes.io/part-of: other\n"},
    {"chart": "train", "manifest": "data:\n  note: app.kubernetes.io/part-of is maskfleet\n"},
]


@pytest.mark.parametrize("status", ["deployed", "uninstalled", "failed"])
@pytest.mark.parametrize("stranger", STRANGERS, ids=lambda one: one["chart"])
def test_a_release_that_is_not_ours_is_neither_replaced_nor_removed(
    stranger: dict[str, str], status: str, api: FakeKube
) -> None:
    api.add(helm_record("r50", {}, status=status, **stranger))
    backend, what, shell = rendered()
    with pytest.raises(LaunchError, match=rf"release r50 is not maskfleet's.* chart {stranger['chart']}"):
        backend.submit(what)
    with pytest.raises(LaunchError, match="release r50 is not maskfleet's"):
        backend.cancel(HANDLE)
    assert shell.calls == []


def test_an_mpijob_that_somebody_else_made_is_neither_replaced_nor_removed(api: FakeKube) -> None:
    job = mpijob("Created", "Running")
    job["metadata"]["labels"] = {"app.kubernetes.io/part-of": "other"}
    api.add(job)
    backend, what, shell = rendered()
    for act in (lambda: backend.submit(what), lambda: backend.cancel(HANDLE)):
        with pytest.raises(LaunchError, match="MPIJob r50 is not maskfleet's"):
            act()
    assert shell.calls == []


@pytest.mark.parametrize("end", ["Succeeded", "Failed"])
def test_cancelling_a_run_that_ended_leaves_its_pods_logs_and_state(end: str, api: FakeKube) -> None:
    api.add(mpijob("Created", end, completed=True), helm_record("r50", {}))
    backend, _, shell = rendered()
    before = backend.status(HANDLE)
    backend.cancel(HANDLE)
    assert shell.calls == []
    assert backend.status(HANDLE) == before
    done = CliRunner().invoke(app, ["cancel", str(HANDLE)])
    assert done.output.strip() == f"nothing to cancel: it is {before.state}"


def test_pods_that_are_stuck_on_a_dead_node_are_named(api: FakeKube, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eks_backend, "LEFT_S", 0.0)
    pod = launcher()
    pod["spec"]["nodeName"] = "ip-10-0-0-7"
    api.add(helm_record("r50", {}, status="uninstalled"), pod)
    backend, _, shell = rendered()
    with pytest.raises(LaunchError, match="not deleted yet: r50-launcher-1 on ip-10-0-0-7"):
        backend.cancel(HANDLE)
    assert shell.calls == []
    status = backend.status(HANDLE)
    assert (status.state, status.detail) == ("cancelled", "pods are not deleted yet: r50-launcher-1 on ip-10-0-0-7")


def test_facts_of_an_instance_from_a_file_reach_the_chart(tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    facts = {"gpus": 2, "gpu": "X", "gpu_memory_gib": 48, "vcpus": 24, "memory_gib": 100, "efa": 1}
    file.write_text(json.dumps({"x9.large": facts}))
    arguments = ["launch", "--on", "eks", "--recipe", "standard", "--image", "i", "--name", "r50", "--instance",
                 "x9.large", "--instances", str(file), "--nodes", "3", "--max-restarts", "5", "--dry-run"]  # fmt: skip
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    values = yaml.safe_load(done.output.split("\n\n# command")[0])
    asked = [values[name] for name in ("gpus_per_node", "efa_per_node", "cpus_per_node", "memory_gib_per_node")]
    assert asked == [2, 1, 22, 79]
    assert (values["gpu_nodes"], values["slots_per_node"], values["backoff_limit"]) == (3, 2, 5)
