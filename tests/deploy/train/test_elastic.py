"""The train chart with min_nodes: an Indexed Job whose pods each run a supervisor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_security import breaches
from train_release import CHART, IMAGE, NAMESPACE, argv, environment, one, parsed, render, try_render

from maskfleet.launch.eks.elastic import pod as program
from tools import run_tool, try_tool

ELASTIC = {"gpu_nodes": 3, "min_nodes": 2}
CPU = {"gpu_instance_type": "", "gpus_per_node": 0, "cpus_per_node": 1, "memory_gib_per_node": 2}
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"run_yaml": "recipe: demo\n", "data_fs": "efs", "data_pvc": "pv-efs", "hugepages_2mi_mib": 64, "queue": "q"},
    {**CPU, "metrics_enabled": True, "max_run_s": 60, "service_account": "trainer", "network_policy": False},
)


def job_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any] = one(objects, "Job")["spec"]
    return spec


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return render(tmp_path_factory.mktemp("plain"), ELASTIC)


def worker_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    [container] = job_of(objects)["template"]["spec"]["containers"]
    return dict(container)


@pytest.mark.slow
@pytest.mark.parametrize("values", VARIANTS)
def test_every_object_is_valid_and_every_pod_restricted(tmp_path: Path, values: dict[str, Any]) -> None:
    objects = render(tmp_path, {**ELASTIC, **values})
    assert not [item for item in objects if item["kind"] in ("MPIJob", "Service")]
    documents = tmp_path / "all.yaml"
    documents.write_text("\n---\n".join(json.dumps(item) for item in objects))
    said = run_tool("kubernetes-validate", "--strict", "-k", "1.33.0", documents)
    assert said.count(" passed for resource ") == len(objects)
    assert breaches(job_of(objects)["template"]) == []


def test_the_job_replaces_what_is_lost_and_fails_only_with_the_run(tmp_path: Path) -> None:
    objects = render(tmp_path, {**ELASTIC, "backoff_limit": 5, "max_run_s": 3600})
    spec = job_of(objects)
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 3, 3)
    assert spec["successPolicy"] == {"rules": [{"succeededCount": 2}]}
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"], spec["activeDeadlineSeconds"]) == (5, 1, 3600)
    fail, disrupted, left = spec["podFailurePolicy"]["rules"]
    assert (fail["action"], fail["onExitCodes"]["values"]) == ("FailJob", [program.RUN_FAILED])
    assert (disrupted["action"], disrupted["onPodConditions"]) == (
        "Ignore",
        [{"type": "DisruptionTarget", "status": "True"}],
    )
    assert (left["action"], left["onExitCodes"]["values"]) == ("Ignore", [program.ASKED_TO_LEAVE])
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert one(objects, "PodDisruptionBudget")["spec"]["minAvailable"] == 2
    assert one(render(tmp_path, {"gpu_nodes": 2, "min_nodes": 2}), "PodDisruptionBudget")["spec"]["minAvailable"] == 1


def test_karpenter_may_drain_a_reclaimed_spot_node(plain: list[dict[str, Any]]) -> None:
    annotations = job_of(plain)["template"]["metadata"]["annotations"]
    assert "karpenter.sh/do-not-disrupt" not in annotations


@pytest.mark.slow
def test_a_worker_has_what_a_worker_of_an_mpijob_has(tmp_path: Path) -> None:
    elastic = worker_of(render(tmp_path, {**ELASTIC, "hugepages_2mi_mib": 64}))
    mpijob = one(render(tmp_path, {"gpu_nodes": 3, "hugepages_2mi_mib": 64}), "MPIJob")
    [worker] = mpijob["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert elastic["resources"] == worker["resources"]
    assert elastic["securityContext"] == worker["securityContext"]
    assert {"nvidia.com/gpu", "vpc.amazonaws.com/efa", "hugepages-2Mi"} <= elastic["resources"]["limits"].keys()
    assert [one for one in worker["volumeMounts"] if one["name"] != "maskfleet"] == elastic["volumeMounts"]


def test_the_program_understands_its_command(tmp_path: Path) -> None:
    container = worker_of(render(tmp_path, {**ELASTIC, **CPU, "slots_per_node": 4, "run_yaml": "recipe: demo\n"}))
    command = argv(container)
    assert command[:3] == ["python3", "-m", "maskfleet.launch.eks.elastic.pod"]
    asked = program._parsed(command[3:])
    assert (asked.run_dir, asked.name) == (Path("/fsx/logs/r50"), "r50")
    assert (asked.workers, asked.slots, asked.min_nodes, asked.max_restarts, asked.wait_s) == (3, 4, 2, 3, 900)
    assert asked.config == Path("/etc/maskfleet/run.yaml")
    fields = {one["name"]: one["valueFrom"]["fieldRef"]["fieldPath"] for one in container["env"] if "valueFrom" in one}
    assert fields == {
        "MASKFLEET_HOST_ADDRESS": "status.podIP",
        program.UID: "metadata.labels['batch.kubernetes.io/controller-uid']",
    }
    assert not {"MASTER_ADDR", "MASTER_PORT"} & environment(container).keys()


@pytest.mark.slow
def test_hyper_parameters_reach_the_run_as_in_an_mpijob(tmp_path: Path) -> None:
    odd = "data.cache_dir=/tmp/a b;$(touch x) `id` {{ y }} 'z'"
    container = worker_of(render(tmp_path, {**ELASTIC, "recipe": "demo", "base_lr": 0.5, "extra_config": [odd]}))
    asked = program._parsed(argv(container)[3:])
    assert asked.recipe == "demo"
    assert asked.sets == ["data.root=/fsx/data/coco2017", "TRAIN.BASE_LR=0.5", odd]


@pytest.mark.slow
def test_a_queued_job_is_suspended_until_it_is_admitted(tmp_path: Path, plain: list[dict[str, Any]]) -> None:
    job = one(render(tmp_path, {**ELASTIC, "queue": "gpu"}), "Job")
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpu"
    assert job["spec"]["suspend"] is True
    assert "suspend" not in job_of(plain)


@pytest.mark.slow
def test_metrics_do_not_keep_a_finished_pod_alive(tmp_path: Path) -> None:
    spec = job_of(render(tmp_path, {**ELASTIC, "metrics_enabled": True}))["template"]["spec"]
    [exporter] = spec["initContainers"]
    assert (exporter["name"], exporter["restartPolicy"]) == ("metrics", "Always")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"gpu_nodes": 2, "min_nodes": 3}, "min_nodes is 3, but gpu_nodes is only 2"),
        ({"min_nodes": 0}, "min_nodes"),
        ({"min_nodes": 1, "fabric_test": True}, "fabric_test needs all nodes at once"),
    ],
)
def test_values_that_do_not_fit_are_rejected(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    done = try_render(tmp_path, values)
    assert done.returncode != 0
    assert said in done.stderr


@pytest.mark.slow
def test_an_old_cluster_is_refused_with_the_version_it_needs(tmp_path: Path) -> None:
    file = tmp_path / "values.json"
    file.write_text(json.dumps({"image": IMAGE, **ELASTIC}))
    command = ("template", "r50", CHART, "--namespace", NAMESPACE, "--values", file, "--kube-version")
    refused = try_tool("helm", *command, "1.30.9")
    assert refused.returncode != 0
    assert "min_nodes needs Kubernetes 1.31 or newer" in refused.stderr
    assert parsed(run_tool("helm", *command, "1.31.0"))
