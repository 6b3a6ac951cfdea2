"""What the train chart renders, for the operator and for the cluster."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from train_release import (
    CHART,
    IMAGE,
    argv,
    crd_problems,
    environment,
    hostfile,
    main_container,
    one,
    operator_env,
    operator_pod,
    render,
    render_all,
    replica,
)

from maskfleet.system.rank_variables import COMPILED_CODE
from pairwise import pairwise
from tools import run_tool

CPU: Mapping[str, Any] = {
    "gpu_instance_type": "",
    "gpus_per_node": 0,
    "cpus_per_node": 4,
    "memory_gib_per_node": 8,
}
WHAT: tuple[Mapping[str, Any], ...] = (
    {},
    {"preset": "optimized", "batch_size_per_gpu": 2, "lr_epoch_schedule": [[16, 0.1], [24, None]]},
    {"recipe": "finetune", "mode_fpn": True, "extra_config": ["train.weights=/fsx/w.npz"]},
    {"run_yaml": "recipe: standard\n"},
)
DATA: tuple[Mapping[str, Any], ...] = ({}, {"data_fs": "efs", "data_pvc": "pv-efs"})
SHAPE: tuple[Mapping[str, Any], ...] = (
    {},
    {"gpu_nodes": 1},
    {"gpu_instance_type": "g5.xlarge"},
    {**CPU, "slots_per_node": 2},
)
ON_DEMAND: tuple[Mapping[str, Any], ...] = ({}, {"launcher_on_demand": "any"})
QUEUE: tuple[Mapping[str, Any], ...] = ({}, {"queue": "gpu-queue"})
POLICY: tuple[Mapping[str, Any], ...] = ({}, {"network_policy": False})
ACCOUNT: tuple[Mapping[str, Any], ...] = ({}, {"service_account": "trainer"})


def merged(parts: tuple[Mapping[str, Any], ...]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}


def hashable(item: Mapping[str, Any]) -> str:
    return json.dumps(item, sort_keys=True)


def valid(objects: list[list[dict[str, Any]]], folder: Path) -> None:
    """Every object passes the schema of its kind, and every pod the one of pods."""
    seen: dict[str, dict[str, Any]] = {}
    for release in objects:
        jobs = [item for item in release if item["kind"] == "MPIJob"]
        assert len(jobs) == 1
        seen |= {hashable(item): item for item in release}
        seen |= {hashable(pod): pod for pod in (operator_pod(release, role) for role in ("Launcher", "Worker"))}
    for item in seen.values():
        if item["kind"] == "MPIJob":
            assert crd_problems(item) == []
    built_in = [item for item in seen.values() if item["kind"] != "MPIJob"]
    documents = folder / "built-in.yaml"
    documents.write_text("\n---\n".join(json.dumps(item) for item in built_in))
    said = run_tool("kubernetes-validate", "--strict", "-k", "1.33.0", documents)
    assert said.count(" passed for resource ") == len(built_in)


def test_helm_lint_passes() -> None:
    said = run_tool("helm", "lint", "--strict", CHART, "--set", f"image={IMAGE}")
    assert "1 chart(s) linted, 0 chart(s) failed" in said


def test_every_two_switches_together_render_valid_objects(tmp_path: Path) -> None:
    pairs = pairwise(WHAT, DATA, SHAPE, ON_DEMAND, QUEUE, POLICY, ACCOUNT)
    more: list[dict[str, Any]] = [{"single_zone": value} for value in ("required", "preferred", "any")]
    more += [{"launcher_on_demand": "preferred"}, {"hugepages_2mi_mib": 5120}, {"max_run_s": 3600}]
    more += [{"priority_class": "high", "image_pull_secrets": ["registry"], "env": {"NCCL_ALGO": "Ring"}}]
    more += [{"system_node_selector": {"role": "system"}, "system_tolerations": [{"operator": "Exists"}]}]
    more += [{"worker_tolerations": [{"key": "team", "operator": "Equal", "value": "a", "effect": "NoSchedule"}]}]
    valid(render_all(tmp_path, [*(merged(parts) for parts in pairs), *more]), tmp_path)


def test_an_unknown_field_or_a_wrong_type_in_the_mpijob_is_found(tmp_path: Path) -> None:
    job = one(render(tmp_path, {}), "MPIJob")
    job["spec"]["runPolicy"]["backofLimit"] = 3
    job["spec"]["slotsPerWorker"] = "8"
    [typo, kind] = sorted(crd_problems(job))
    assert "backofLimit" in typo
    assert "slotsPerWorker" in kind


def test_the_operator_gets_what_it_needs(tmp_path: Path) -> None:
    objects = render(tmp_path, {"gpu_nodes": 3})
    spec = one(objects, "MPIJob")["spec"]
    assert spec["mpiImplementation"] == "OpenMPI"
    assert spec["sshAuthMountPath"] == "/home/fleet/.ssh"
    assert spec["slotsPerWorker"] == 8
    assert spec["runPolicy"] == {"cleanPodPolicy": "Running", "backoffLimit": 3}
    assert replica(objects, "Worker")["replicas"] == 3
    assert replica(objects, "Launcher")["restartPolicy"] == "Never"
    assert replica(objects, "Worker")["restartPolicy"] == "OnFailure"
    for role in ("Launcher", "Worker"):
        # The operator warns about, and overrides, a restart policy in the template.
        assert "restartPolicy" not in replica(objects, role)["template"]["spec"]
        assert main_container(objects, role)["name"] == role.lower()


def test_a_node_that_cannot_be_had_ends_the_job_and_releases_the_others(tmp_path: Path) -> None:
    # With WaitForWorkersReady the operator creates no launcher before all workers are ready, so no limit ever begins.
    objects = render(tmp_path, {"gpu_nodes": 2, "wait_for_workers_s": 60, "backoff_limit": 1})
    spec = one(objects, "MPIJob")["spec"]
    assert spec["launcherCreationPolicy"] == "AtStartup"
    [waits] = replica(objects, "Launcher")["template"]["spec"]["initContainers"]
    assert waits["command"][3:5] == ["wait", "60"]
    assert spec["runPolicy"]["backoffLimit"] == 1
    # The operator then deletes workers that run or are pending.
    assert spec["runPolicy"]["cleanPodPolicy"] == "Running"


def test_by_default_a_job_ends_an_hour_after_a_node_is_missing(tmp_path: Path) -> None:
    objects = render(tmp_path, {})
    [waits] = replica(objects, "Launcher")["template"]["spec"]["initContainers"]
    attempts = 1 + one(objects, "MPIJob")["spec"]["runPolicy"]["backoffLimit"]
    assert int(waits["command"][4]) * attempts <= 3600


def test_no_object_has_a_name_that_the_operator_uses(tmp_path: Path) -> None:
    objects = render(tmp_path, {"run_yaml": "recipe: standard\n"})
    names = {(item["kind"], item["metadata"]["name"]) for item in objects}
    theirs = {("Service", "r50"), ("ConfigMap", "r50-config"), ("Secret", "r50-ssh"), ("Job", "r50-launcher")}
    assert names.isdisjoint(theirs)
    volumes = [volume["name"] for volume in operator_pod(objects, "Launcher")["spec"]["volumes"]]
    assert len(volumes) == len(set(volumes))


def test_every_object_belongs_to_its_release(tmp_path: Path) -> None:
    for item in render(tmp_path, {"run_yaml": "recipe: standard\n"}):
        labels = item["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "maskfleet-train"
        assert labels["app.kubernetes.io/instance"] == "r50"
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        assert labels["app.kubernetes.io/part-of"] == "maskfleet"
        assert item["metadata"]["namespace"] == "kubeflow"
        assert item["metadata"]["name"].startswith("r50")


def test_mpirun_counts_and_finds_the_ranks_as_the_operator_lists_them(tmp_path: Path) -> None:
    objects = render(tmp_path, {"gpu_nodes": 2, "gpu_instance_type": "p5.48xlarge"})
    job = one(objects, "MPIJob")
    command = argv(main_container(objects, "Launcher"))
    assert command[:5] == ["python3", "-I", "/etc/maskfleet/pod.py", "launch", "/etc/mpi/hostfile"]
    assert command[5:9] == ["/usr/bin/mpirun", "--noprefix", "-np", "16"]
    assert command[9:12] == ["--hostfile", "/etc/mpi/hostfile", "--map-by"]
    workers = [line.split()[0] for line in hostfile(job).splitlines()]
    env = environment(main_container(objects, "Launcher"))
    assert env["MASTER_ADDR"] == workers[0]
    folder = Path(command[command.index("train", 20) + 1])
    assert Path(env[COMPILED_CODE]) == folder.parent / ".compiled", "runs side by side share what they compile"
    [init] = replica(objects, "Launcher")["template"]["spec"]["initContainers"]
    assert argv(init)[-2:] == workers
    forwarded = [value for option, value in itertools.pairwise(command) if option == "-x"]
    assert forwarded == ["PATH", "LD_LIBRARY_PATH", *sorted(env)]


def test_a_fabric_test_runs_an_all_reduce_in_place_of_the_training(tmp_path: Path) -> None:
    objects = render(tmp_path, {"fabric_test": True})
    command = argv(main_container(objects, "Launcher"))
    assert command[-7:] == ["python3", "-I", "/etc/maskfleet/pod.py", "rank", "python3", "-m", "maskfleet.bench.fabric"]


def test_metrics_are_offered_to_one_namespace_and_only_if_asked(tmp_path: Path) -> None:
    plain = render(tmp_path, {})
    assert len(replica(plain, "Worker")["template"]["spec"]["containers"]) == 1
    assert len(one(plain, "NetworkPolicy")["spec"]["ingress"]) == 1
    objects = render(tmp_path, {"metrics_enabled": True, "metrics_port": 9500, "metrics_namespace": "observe"})
    [_, exporter] = replica(objects, "Worker")["template"]["spec"]["containers"]
    assert exporter["command"] == [
        "python3", "-m", "maskfleet.launch.exporter", "/fsx/logs/r50", "$(POD_IP)", "9500", "$(REPLICA_INDEX)",
    ]  # fmt: skip
    assert {variable["name"] for variable in exporter["env"]} == {"POD_IP", "REPLICA_INDEX"}
    assert next(mount for mount in exporter["volumeMounts"] if mount["name"] == "shared")["readOnly"] is True
    policy = one(objects, "NetworkPolicy")["spec"]["ingress"]
    assert policy[1] == {
        "from": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "observe"}}}],
        "ports": [{"port": 9500, "protocol": "TCP"}],
    }
    assert not [item for item in objects if item["kind"] == "PodMonitor"]


def test_the_operators_environment_does_not_override_ours(tmp_path: Path) -> None:
    objects = render(tmp_path, {})
    launcher = main_container(objects, "Launcher")
    theirs = operator_env(one(objects, "MPIJob"))
    assert environment(launcher).keys().isdisjoint(theirs)
    command = argv(launcher)
    given = {
        name: command[index + 2] for index, (option, name) in enumerate(itertools.pairwise(command)) if option == "-mca"
    }
    assert given["plm_rsh_args"] == "-F /etc/maskfleet/ssh_config"  # on the command line, so it wins
    assert given["plm_rsh_no_tree_spawn"] == "1"
    assert (given["pml"], given["btl"]) == ("ob1", "^openib")


def test_gpu_efa_cpu_and_memory_come_from_the_instance_type(tmp_path: Path) -> None:
    objects = render(tmp_path, {})
    worker = main_container(objects, "Worker")
    asked = {"cpu": "92", "memory": "1055Gi", "nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "4"}
    assert worker["resources"] == {"requests": asked, "limits": asked}
    spec = replica(objects, "Worker")["template"]["spec"]
    assert spec["nodeSelector"] == {"node.kubernetes.io/instance-type": "p4d.24xlarge"}


@pytest.mark.parametrize("name", ["g5.8xlarge", "p4d.24xlarge", "p6-b200.48xlarge"])
def test_efa_gets_the_settings_of_awss_cheat_sheet(name: str, tmp_path: Path) -> None:
    # awsome-distributed-training, 1.architectures/efa-cheatsheet.md, preset 3.1; it warns against NCCL's own settings.
    # FI_EFA_USE_DEVICE_RDMA=1 aborts on types without RDMA read (libfabric issues 8186, 8661).
    env = environment(main_container(render(tmp_path, {"gpu_instance_type": name}), "Launcher"))
    assert {key: value for key, value in env.items() if key.startswith(("FI_", "RDMAV_"))} == {
        "FI_PROVIDER": "efa",
        "FI_EFA_USE_HUGE_PAGE": "0",
    }
    assert {key for key in env if key.startswith("NCCL_")} == {"NCCL_DEBUG", "NCCL_SOCKET_IFNAME"}


@pytest.mark.parametrize(
    ("name", "is_set"), [("g5.12xlarge", True), ("g6.48xlarge", True), ("g6e.48xlarge", False), ("g5.8xlarge", False)]
)
def test_several_gpus_of_g5_and_g6_copy_as_awss_cheat_sheet_says(name: str, is_set: bool, tmp_path: Path) -> None:
    env = environment(main_container(render(tmp_path, {"gpu_instance_type": name}), "Launcher"))
    assert env.get("NCCL_SHM_USE_CUDA_MEMCPY") == ("1" if is_set else None)


def test_one_node_or_an_instance_without_efa_requests_no_efa(tmp_path: Path) -> None:
    for values in ({"gpu_nodes": 1}, {"gpu_instance_type": "g5.xlarge"}, {"efa_per_node": 0}):
        objects = render(tmp_path, values)
        assert "vpc.amazonaws.com/efa" not in main_container(objects, "Worker")["resources"]["limits"]
        assert "FI_PROVIDER" not in environment(main_container(objects, "Launcher"))


def test_workers_on_the_cpu_need_neither_gpu_nor_instance_type(tmp_path: Path) -> None:
    objects = render(tmp_path, dict(CPU))
    assert main_container(objects, "Worker")["resources"]["limits"] == {"cpu": "4", "memory": "8Gi"}
    assert "nodeSelector" not in replica(objects, "Worker")["template"]["spec"]
    assert one(objects, "MPIJob")["spec"]["slotsPerWorker"] == 1


def test_shared_memory_is_in_memory_and_at_most_half_of_the_workers(tmp_path: Path) -> None:
    for values, size in (
        ({}, "16384Mi"),
        ({"shm_gib": "1.5"}, "1536Mi"),
        ({"gpu_instance_type": "g5.xlarge"}, "6144Mi"),
    ):
        volumes = {v["name"]: v for v in replica(render(tmp_path, values), "Worker")["template"]["spec"]["volumes"]}
        assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": size}


def test_a_data_volume_of_its_own_is_mounted_read_only(tmp_path: Path) -> None:
    worker = main_container(render(tmp_path, {"data_fs": "efs", "data_pvc": "pv-efs"}), "Worker")
    mounts = {mount["mountPath"]: mount for mount in worker["volumeMounts"]}
    assert mounts["/efs"]["readOnly"] is True
    assert "readOnly" not in mounts["/fsx"]


def test_the_launcher_avoids_spot_nodes(tmp_path: Path) -> None:
    spec = replica(render(tmp_path, {}), "Launcher")["template"]["spec"]
    [term] = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert {rule["key"]: (rule["operator"], rule["values"]) for rule in term["matchExpressions"]} == {
        "karpenter.sh/capacity-type": ("NotIn", ["spot"]),
        "eks.amazonaws.com/capacityType": ("NotIn", ["SPOT"]),
    }


def test_workers_with_efa_must_share_a_zone_and_others_should(tmp_path: Path) -> None:
    for values, rule in (({}, "required"), ({"gpu_instance_type": "g5.xlarge"}, "preferred")):
        affinity = replica(render(tmp_path, values), "Worker")["template"]["spec"]["affinity"]["podAffinity"]
        assert list(affinity) == [f"{rule}DuringSchedulingIgnoredDuringExecution"]


def test_a_queued_job_is_suspended_until_it_is_admitted(tmp_path: Path) -> None:
    job = one(render(tmp_path, {"queue": "gpu-queue"}), "MPIJob")
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpu-queue"
    assert job["spec"]["runPolicy"]["suspend"] is True
    assert "suspend" not in one(render(tmp_path, {}), "MPIJob")["spec"]["runPolicy"]


def test_no_voluntary_disruption_may_evict_a_worker(tmp_path: Path) -> None:
    objects = render(tmp_path, {"gpu_nodes": 4})
    budget = one(objects, "PodDisruptionBudget")["spec"]
    assert budget["minAvailable"] == 4
    for role, counted in (("Worker", True), ("Launcher", False)):
        metadata = replica(objects, role)["template"]["metadata"]
        assert (budget["selector"]["matchLabels"].items() <= metadata["labels"].items()) == counted
        assert metadata["annotations"]["karpenter.sh/do-not-disrupt"] == "true"


def test_ready_means_that_sshd_answers_and_a_stopping_pod_has_time_to_save(tmp_path: Path) -> None:
    objects = render(tmp_path, {"grace_s": 300})
    worker = main_container(objects, "Worker")
    assert worker["command"] == ["/usr/sbin/sshd", "-D", "-e", "-f", "/etc/maskfleet/sshd_config"]
    assert worker["ports"] == [{"name": "ssh", "containerPort": 2222, "protocol": "TCP"}]
    for probe in ("startupProbe", "readinessProbe"):
        assert worker[probe]["tcpSocket"] == {"port": "ssh"}
    for role in ("Launcher", "Worker"):
        assert main_container(objects, role)["lifecycle"]["preStop"]["exec"]["command"][-2:] == ["leave", "280"]
        assert replica(objects, role)["template"]["spec"]["terminationGracePeriodSeconds"] == 300


def test_only_pods_of_the_release_may_reach_its_pods(tmp_path: Path) -> None:
    policy = one(render(tmp_path, {}), "NetworkPolicy")["spec"]
    own = {"app.kubernetes.io/name": "maskfleet-train", "app.kubernetes.io/instance": "r50"}
    assert policy["podSelector"] == {"matchLabels": own}
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": own}}]}]
    assert policy["policyTypes"] == ["Ingress"]


def test_a_run_file_reaches_every_pod(tmp_path: Path) -> None:
    text = "recipe: standard\ndata: {root: /fsx/data/coco2017}\n"
    objects = render(tmp_path, {"run_yaml": text})
    assert one(objects, "ConfigMap", "r50-run")["data"] == {"run.yaml": text}
    for role in ("Launcher", "Worker"):
        spec = replica(objects, role)["template"]["spec"]
        [volume] = [volume for volume in spec["volumes"] if volume["name"] == "maskfleet"]
        assert {source["configMap"]["name"] for source in volume["projected"]["sources"]} == {"r50-files", "r50-run"}
        mounts = {mount["name"]: mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
        assert mounts["maskfleet"] == "/etc/maskfleet"
