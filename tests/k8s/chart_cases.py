"""Documented values of every chart, as the tests install them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Values = dict[str, Any]

IMAGE = "registry.example/maskfleet@sha256:" + "ab" * 32
# bcrypt of a password that nobody uses.
HASH = "$2b$10$BjjXabIzFgg//QvgNulZoOXW9nfhroPR/.EgvuMMPHQRoYrtfYfVO"
RUN_YAML = 'run:\n  note: "quotes \' and {{ .Values.image }}"\n'
CPU = {"gpu_instance_type": "", "gpus_per_node": 0, "cpus_per_node": 2, "memory_gib_per_node": 4}


@dataclass(frozen=True)
class Lifecycle:
    """A first installation of a chart, and an upgrade that changes or adds objects of these kinds."""

    chart: str
    first: Values
    second: Values
    changes: frozenset[str]


TRAIN: Values = {"image": IMAGE}
NOTEBOOK: Values = {"image": IMAGE, "htpasswd": HASH}
STAGE_DATA: Values = {"image": IMAGE, "s3_bucket": "my-bucket"}
EFS: Values = {"enabled": True, "file_system_id": "fs-0123456789abcdef0"}
FSX: Values = {
    "enabled": True,
    "file_system_id": "fs-0123456789abcdef1",
    "dns_name": "fs-0123456789abcdef1.fsx.us-east-1.amazonaws.com",
    "mount_name": "abcdefgh",
}
STORAGE: Values = {"efs": EFS, "fsx": FSX}
# Storage classes have no namespace, so the name must be unique in the cluster.
GP3: Values = {"enabled": True, "name": "maskfleet-test-{namespace}"}
GPU_NODES: Values = {"cluster_id": "fleet", "role_name": "fleet-node"}
OPERATOR: Values = {"watch_namespace": "{namespace}"}

LIFECYCLES = (
    Lifecycle("train", TRAIN, {**TRAIN, "gpu_nodes": 3}, frozenset({"MPIJob", "PodDisruptionBudget"})),
    Lifecycle("notebook", NOTEBOOK, {**NOTEBOOK, "log_dir": "logs/r50"}, frozenset({"Deployment"})),
    Lifecycle("stage-data", STAGE_DATA, {**STAGE_DATA, "check": True}, frozenset({"Job"})),
    Lifecycle("storage", STORAGE, {**STORAGE, "gp3": GP3}, frozenset({"StorageClass"})),
    Lifecycle("mpi-operator", OPERATOR, {**OPERATOR, "threadiness": 3}, frozenset({"Deployment"})),
    Lifecycle("gpu-nodes", GPU_NODES, {**GPU_NODES, "consolidate_after": "60s"}, frozenset({"NodePool"})),
)

DOCUMENTED: dict[str, dict[str, Values]] = {
    "train": {
        "defaults": TRAIN,
        "optimized": {**TRAIN, "preset": "optimized", "gpu_nodes": 4, "gpu_instance_type": "p5.48xlarge"},
        "cpu": {**TRAIN, **CPU, "gpu_nodes": 1},
        "fabric test": {**TRAIN, "fabric_test": True, "max_run_s": 3600, "backoff_limit": 0},
        "metrics": {**TRAIN, "metrics_enabled": True, "metrics_namespace": "observe"},
        "run file": {**TRAIN, "run_yaml": RUN_YAML},
        "hyper-parameters": {
            **TRAIN,
            "recipe": "r50_fpn_1x",
            "base_lr": 0.01,
            "batch_size_per_gpu": 2,
            "images_per_epoch": 120000,
            "lr_epoch_schedule": "[(8, 0.1), (10, 0.01), (12, None)]",
            "mode_mask": False,
            "backbone_norm": "GN",
            "extra_config": ["TRAIN.GRADIENT_CLIP=0.36", "TRAIN.CHECKPOINT_PERIOD=2"],
        },
        "two file systems": {**TRAIN, "data_fs": "efs", "data_pvc": "pv-efs", "log_dir": "runs/mine"},
        "queue": {**TRAIN, "queue": "gpu-queue"},
        "elastic": {**TRAIN, "gpu_nodes": 3, "min_nodes": 2, "run_yaml": RUN_YAML, "metrics_enabled": True},
        "nodes": {
            **TRAIN,
            "system_node_selector": {"role": "system"},
            "system_tolerations": [{"key": "system", "operator": "Exists"}],
            "worker_tolerations": [{"key": "spot", "operator": "Exists"}],
            "launcher_on_demand": "preferred",
            "single_zone": "any",
            "hugepages_2mi_mib": 512,
            "max_run_s": 86400,
        },
    },
    "notebook": {
        "defaults": NOTEBOOK,
        "existing secret": {"image": IMAGE, "existing_secret": "login"},
        "two volumes": {**NOTEBOOK, "data_fs": "efs", "data_pvc": "pv-efs", "work_dir": "notebooks"},
        "gpu": {**NOTEBOOK, "gpu_instance_type": "g5.xlarge"},
        "public": {**NOTEBOOK, "source_cidr": "203.0.113.0/24"},
        "internal": {**NOTEBOOK, "source_cidr": ["10.0.0.0/16"], "load_balancer_scheme": "internal"},
        "issuer": {**NOTEBOOK, "tls": {"issuer": "letsencrypt", "hosts": ["notebook.example.com"]}},
        "own certificate": {**NOTEBOOK, "tls": {"existing_secret": "certificate"}},
    },
    "stage-data": {
        "defaults": STAGE_DATA,
        "fsx": {**STAGE_DATA, "shared_fs": "fsx", "s3_prefix": "data", "stage_dir": "/fsx/data", "check": True},
        "preload": {"image": IMAGE, "shared_fs": "fsx", "preload": True, "workers": 128},
        "own account": {**STAGE_DATA, "service_account": "", "role_arn": "arn:aws:iam::123456789012:role/staging"},
        "times": {**STAGE_DATA, "ttl_s": None, "max_run_s": 3600, "backoff_limit": 0, "region": "us-east-1"},
    },
    "storage": {
        "both": STORAGE,
        "efs": {"efs": {**EFS, "access_point_id": "fsap-0123456789abcdef0", "claim": "home"}},
        "fsx": {"fsx": {**FSX, "capacity": "2400Gi"}},
        "gp3": {"gp3": {**GP3, "default": False}},
    },
    "mpi-operator": {
        "one namespace": OPERATOR,
        "all namespaces": {"monitoring_port": 8081, "network_policy": True},
    },
    "gpu-nodes": {
        "general": GPU_NODES,
        "efa": {**GPU_NODES, "efa_az": "us-east-1a", "capacity_type": "spot", "startup_taints": {"efs": False}},
        "reserved": {
            **GPU_NODES,
            "efa_az": "us-east-1a",
            "general": {"enabled": False},
            "efa": {"capacity_reservations": [{"id": "cr-0123456789abcdef0"}], "reserved_only": True},
        },
    },
}


def filled(values: Values, namespace: str) -> Values:
    """Values with the name of the test's namespace put in."""
    return {key: _filled(value, namespace) for key, value in values.items()}


def _filled(value: Any, namespace: str) -> Any:
    if isinstance(value, dict):
        return filled(value, namespace)
    return value.replace("{namespace}", namespace) if isinstance(value, str) else value
