"""The values of the train chart: which are rejected, and what the trainer gets from the others."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from train_release import CHART, argv, environment, main_container, one, parsed, rank_argv, render, settings, try_render

from maskfleet.config.load import resolve
from maskfleet.config.recipes import RECIPES, recipe
from maskfleet.config.run import RunConfig
from maskfleet.launch.instances import INSTANCES
from tools import ROOT, try_tool

HOSTILE = (
    "x\"y'z",
    "a\nb: c\n---\nkind: Pod",
    "{{ .Release.Name }} {{ fail }}",
    "$(PATH) $$(PATH) ${PATH} $PATH $",
    "`id`; rm -rf / && true | cat > /tmp/x",
    "<&>\u2028\ttab \\ back\\n # no comment",
    "naïve ☃",
)
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))["properties"]


def config_of(objects: list[dict[str, Any]]) -> RunConfig:
    """The configuration that `maskfleet train` reads from the rank's command."""
    command = rank_argv(objects)
    assert command[:4] == ["python3", "-m", "maskfleet", "train"]
    return resolve(recipe_name=command[command.index("--recipe") + 1], sets=settings(objects)).config


REFUSED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("image", {"image": ""}),
    ("image", {"image": "a b"}),
    ("image", {"image": "ACCOUNT.dkr.ecr.REGION.amazonaws.com/maskfleet-train:1"}),
    ("image", {"image": "repo/train@sha256:..."}),
    ("image", {"image": "repo/train@sha256:" + "a" * 63}),
    ("image", {"image": 'x"\nprivileged: true'}),
    ("learning_rate", {"learning_rate": 1}),
    ("maskrcnn", {"maskrcnn": {"gpu_nodes": 2}}),
    ("global", {"global": {"shared_fs": "fsx"}}),
    ("preset", {"preset": "fast"}),
    ("recipe", {"recipe": "r50"}),
    ("preset", {"preset": "standard", "recipe": "demo"}),
    ("run_id", {"run_id": "../other"}),
    ("run_id", {"run_id": "a/b"}),
    ("run_id", {"run_id": "r" * 129}),
    ("log_dir", {"log_dir": "/logs"}),
    ("log_dir", {"log_dir": "logs/../../etc"}),
    ("base_lr", {"base_lr": 0}),
    ("base_lr", {"base_lr": "1e-2/8"}),
    ("base_lr", {"base_lr": [0.1]}),
    ("lr_schedule", {"lr_schedule": "__import__('os')"}),
    ("lr_schedule", {"lr_schedule": [1.5]}),
    ("lr_epoch_schedule", {"lr_epoch_schedule": [[1, 2, 3]]}),
    ("lr_epoch_schedule", {"lr_schedule": "1x", "lr_epoch_schedule": [[1, None]]}),
    ("images_per_epoch", {"steps_per_epoch": 7500, "images_per_epoch": 120000}),
    ("batch_size_per_gpu", {"batch_size_per_gpu": 0}),
    ("batch_size_per_gpu", {"batch_size_per_gpu": "4"}),
    ("mode_mask", {"mode_mask": "yes"}),
    ("backbone_norm", {"backbone_norm": "BN"}),
    ("backbone_weights", {"backbone_weights": "/etc/passwd"}),
    ("extra_config", {"extra_config": ["no-equals-sign"]}),
    ("extra_config", {"extra_config": ["--config=x"]}),
    ("image_pull_policy", {"image_pull_policy": "Sometimes"}),
    ("gpu_nodes", {"gpu_nodes": 0}),
    ("gpu_nodes", {"gpu_nodes": 1.5}),
    ("gpu_nodes", {"gpu_nodes": "2"}),
    ("gpu_instance_type", {"gpu_instance_type": "P4D"}),
    ("gpus_per_node", {"gpu_instance_type": "z9.huge"}),
    ("cpus_per_node", {"gpu_instance_type": "z9.huge", "gpus_per_node": 8}),
    ("memory_gib_per_node", {"gpu_instance_type": "", "gpus_per_node": 0, "cpus_per_node": 1}),
    ("gpus_per_node", {"gpus_per_node": 9}),
    ("efa_per_node", {"efa_per_node": 5}),
    ("efa_per_node", {"gpu_instance_type": "g5.xlarge", "efa_per_node": 1}),
    ("cpus_per_node", {"cpus_per_node": 96}),
    ("memory_gib_per_node", {"memory_gib_per_node": 1152}),
    ("slots_per_node", {"slots_per_node": 9}),
    ("hugepages_2mi_mib", {"hugepages_2mi_mib": 5}),
    ("shm_gib", {"shm_gib": "16Gi"}),
    ("single_zone", {"single_zone": True}),
    ("worker_tolerations", {"worker_tolerations": [{"effect": "Never"}]}),
    ("shared_fs", {"shared_fs": "/fsx"}),
    ("shared_fs", {"shared_fs": "f" * 64}),
    ("shared_fs", {"shared_fs": "etc"}),
    ("data_fs", {"data_fs": "usr", "data_pvc": "pv"}),
    ("shared_pvc", {"shared_pvc": "PV_fsx"}),
    ("data_pvc", {"data_fs": "efs"}),
    ("data_fs", {"data_pvc": "pv-efs"}),
    ("launcher_on_demand", {"launcher_on_demand": "maybe"}),
    ("system_node_selector", {"system_node_selector": {"a": "b c"}}),
    ("launcher_memory", {"launcher_memory": "1 GiB"}),
    ("launcher_cpu", {"launcher_cpu": "half"}),
    ("backoff_limit", {"backoff_limit": 2000}),
    ("grace_s", {"grace_s": 5}),
    ("queue", {"queue": "q" * 64}),
    ("nccl_debug", {"nccl_debug": "LOUD"}),
    ("nccl_socket_ifname", {"nccl_socket_ifname": "eth0; id"}),
    ("if_exclude", {"if_exclude": "lo docker0"}),
    ("rendezvous_port", {"rendezvous_port": 80}),
    ("env", {"env": {"A": 1}}),
    ("env", {"env": {"A-B": "1"}}),
    ("env.MASTER_ADDR", {"env": {"MASTER_ADDR": "here"}}),
    ("service_account", {"service_account": "a/b"}),
    ("network_policy", {"network_policy": "no"}),
    ("run_yaml", {"run_yaml": "- a list"}),
    ("run_yaml", {"run_yaml": "a: [1"}),
    *(
        (f"run_yaml is the whole run: put {name}", {"run_yaml": "recipe: demo\n", name: value})
        for name, value in [
            ("preset", "standard"),
            ("recipe", "demo"),
            ("base_lr", 0.1),
            ("lr_schedule", "1x"),
            ("lr_epoch_schedule", [[1, None]]),
            ("batch_size_per_gpu", 1),
            ("images_per_epoch", 1),
            ("steps_per_epoch", 1),
            ("eval_period_in_epochs", 0),
            ("data_train", "a"),
            ("data_val", "a"),
            ("data_dir", "a"),
            ("mode_fpn", False),
            ("mode_mask", False),
            ("backbone_norm", "GN"),
            ("backbone_weights", "a"),
            ("extra_config", ["a=b"]),
        ]
    ),
)


@pytest.mark.parametrize(("field", "values"), REFUSED, ids=lambda value: str(value)[:60])
def test_a_bad_value_is_rejected_with_the_name_of_its_field(tmp_path: Path, field: str, values: dict[str, Any]) -> None:
    done = try_render(tmp_path, values)
    assert done.returncode != 0
    assert done.stdout == ""
    assert re.search(rf"\b{re.escape(field)}\b", done.stderr), done.stderr
    assert "nil pointer" not in done.stderr


@pytest.mark.parametrize("name", ["r" * 41, "r" * 64, "a.b", "50-epochs"])
def test_a_release_name_that_gives_no_valid_pod_or_service_name_is_rejected(tmp_path: Path, name: str) -> None:
    done = try_render(tmp_path, {}, name=name)
    assert done.returncode != 0
    assert "release name" in done.stderr


def test_the_longest_release_name_still_gives_valid_pod_names(tmp_path: Path) -> None:
    job = one(render(tmp_path, {"gpu_nodes": 1000}, name="r" * 40), "MPIJob")
    assert len(f"{job['metadata']['name']}-worker-999") <= 63
    assert len(f"{job['metadata']['name']}-launcher-abcde") <= 63


def test_hostile_values_reach_the_trainer_unchanged_and_do_nothing_else(tmp_path: Path) -> None:
    given = [f"train.weights={text}" for text in HOSTILE]
    environ = {f"EVIL_{index}": text for index, text in enumerate(HOSTILE)}
    objects = render(tmp_path, {"extra_config": given, "env": environ})
    harmless = render(tmp_path, {})
    assert settings(objects)[1:] == given
    assert len(argv(main_container(objects, "Launcher"))) == len(argv(main_container(harmless, "Launcher"))) + 4 * len(
        HOSTILE
    )
    assert {
        name: value for name, value in environment(main_container(objects, "Launcher")).items() if "EVIL" in name
    } == environ
    assert [item["kind"] for item in objects] == [item["kind"] for item in harmless]


def test_a_hostile_run_file_stays_a_run_file(tmp_path: Path) -> None:
    text = (
        "recipe: demo\n"
        + "".join(f"# {line}\n" for part in HOSTILE for line in part.splitlines())
        + "data: {root: '$(X)'}\n"
    )
    objects = render(tmp_path, {"run_yaml": text})
    assert one(objects, "ConfigMap", "r50-run")["data"]["run.yaml"] == text
    assert rank_argv(objects)[4:] == ["/fsx/logs/r50", "--config", "/etc/maskfleet/run.yaml"]


def test_the_default_preset_is_the_recipe_standard(tmp_path: Path) -> None:
    objects = render(tmp_path, {})
    assert rank_argv(objects)[4:] == ["/fsx/logs/r50", "--recipe", "standard", "--set", "data.root=/fsx/data/coco2017"]
    config = config_of(objects).model_dump()
    assert config == recipe("standard").model_dump() | {
        "data": recipe("standard").data.model_dump() | {"root": "/fsx/data/coco2017"}
    }


def test_the_old_charts_values_mean_what_they_meant(tmp_path: Path) -> None:
    weights = "data/coco2017/pretrained-models/ImageNet-R50-AlignPadding.npz"
    common = {
        "eval_period_in_epochs": 1,
        "mode_fpn": True,
        "mode_mask": "True",
        "backbone_norm": "FreezeBN",
        "backbone_weights": weights,
    }
    standard = {
        "preset": "standard",
        "steps_per_epoch": 7500,
        "lr_schedule": "[240000,320000,360000]",
        "base_lr": 0.01,
        "data_train": '["coco_train2017"]',
        "data_val": '("coco_val2017")',
        "extra_config": "TRAIN.CHECKPOINT_PERIOD=2",
    }
    config = config_of(render(tmp_path, {**common, **standard}))
    assert config.train.step_schedule == (240_000, 320_000, 360_000)
    assert (config.train.base_lr, config.train.base_lr_images, config.train.steps_per_epoch) == (0.01, 8, 7500)
    assert config.model.backbone.weights == f"/fsx/{weights}"
    assert config.checkpoint.every_epochs == 2
    assert (config.data.train, config.data.val) == (("coco_train2017",), ("coco_val2017",))
    optimized = {
        "preset": "optimized",
        "batch_size_per_gpu": 4,
        "images_per_epoch": 120000,
        "base_lr": "0.0015625",
        "lr_epoch_schedule": "[(16, 0.1), (20, 0.01), (24, None)]",
        "data_train": ["train2017"],
        "data_val": ["val2017"],
        "extra_config": ["TRAIN.GRADIENT_CLIP=0.36"],
    }
    config = config_of(render(tmp_path, {**common, **optimized, "data_fs": "efs", "data_pvc": "pv-efs"}))
    assert config.train == recipe("optimized").train
    assert config.data.root == "/efs/data/coco2017"
    assert config.model.backbone.weights == f"/efs/{weights}"


def test_schedules_may_be_lists(tmp_path: Path) -> None:
    config = config_of(render(tmp_path, {"preset": "optimized", "lr_epoch_schedule": [[2, 0.1], [3.5, None]]}))
    assert config.train.epoch_schedule == ((2.0, 0.1), (3.5, None))
    config = config_of(render(tmp_path, {"lr_schedule": [1000, 2000000], "images_per_epoch": 12000000}))
    assert config.train.step_schedule == (1000, 2_000_000)
    assert config.train.images_per_epoch == 12_000_000


def test_numbers_work_with_helm_set_too() -> None:
    sets = ["image=x", "base_lr=0.01", "shm_gib=1.5", "gpu_nodes=3", "mode_mask=False", "backoff_limit=0"]
    options = [option for text in sets for option in ("--set", text)]
    done = try_tool("helm", "template", "r50", CHART, *options)
    assert done.returncode == 0, done.stderr
    assert "TRAIN.BASE_LR=0.01" in done.stdout
    assert "MODE_MASK=False" in done.stdout


def test_the_run_folder_depends_on_the_values_alone(tmp_path: Path) -> None:
    values = {"run_id": "2026-11-r50", "log_dir": "team/logs", "shared_fs": "efs", "shared_pvc": "pv-efs"}
    first, second = render(tmp_path, values), render(tmp_path, values)
    assert first == second
    assert rank_argv(first)[4] == "/efs/team/logs/2026-11-r50"


def test_the_schema_knows_every_value_and_every_recipe() -> None:
    [defaults] = parsed((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert set(defaults) == set(SCHEMA)
    assert SCHEMA["recipe"]["enum"] == [*RECIPES, None]


def test_the_charts_instance_table_is_maskfleets() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "chart_instances.py"))
    shipped = (CHART / "files" / "instances.yaml").read_text(encoding="utf-8")
    assert shipped == script["table"](), "run: python scripts/chart_instances.py"
    [rows] = parsed(shipped)
    assert set(rows) == set(INSTANCES)
    for name, row in rows.items():
        facts = INSTANCES[name]
        assert (row["gpus"], row["efa"]) == (facts.gpus, facts.efa)
        assert 0 < row["cpus"] < facts.vcpus
        assert 0.74 * facts.memory_gib < row["memory_gib"] < 0.925 * facts.memory_gib


def test_the_page_names_every_value_and_every_value_of_the_old_charts() -> None:
    page = (ROOT / "docs" / "run-anywhere" / "eks" / "train-chart.md").read_text(encoding="utf-8")
    for name in SCHEMA:
        assert f"`{name}`" in page, name
    old = "name gpus gpu_nodes gpus_per_node gpu_instance_type image image_pull_policy train_script working_dir"
    old += (
        " data_fs data_dir steps_per_epoch images_per_epoch lr_schedule lr_epoch_schedule base_lr data_train data_val"
    )
    old += " eval_period_in_epochs mode_fpn mode_mask backbone_norm backbone_weights nccl_socket_ifname if_exclude"
    old += " tf_device_min_sys_mem_mb tf_enable_auto_mixed_precision nccl_debug horovod_autotune horovod_log_level"
    old += " extra_config backoff_limit batch_size_per_gpu"
    for name in old.split():
        assert f"| `maskrcnn.{name}`" in page, name
    for name in ("namespace", "shared_fs", "shared_pvc"):
        assert f"| `global.{name}`" in page, name
