"""Hostile values: rejected with the name of the field, or passed on unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from chart_cases import DOCUMENTED, GPU_NODES, NOTEBOOK, STAGE_DATA, STORAGE, TRAIN, Values, filled
from kube import Kube, Manifest, random_name

pytestmark = pytest.mark.usefixtures("mpijobs", "other_kinds")
QUOTES = 'say "hi" it\'s $(HOME) `id` \\'
TEMPLATE = "one\n{{ .Values.image }}: two\n---\nkind: Pod"

# Chart, values that are good but for one, which `{}` stands for; and its name.
FIELDS: list[tuple[str, Values, str]] = [
    ("train", {**TRAIN, "image": "{}"}, "image"),
    ("train", {**TRAIN, "run_id": "{}"}, "run_id"),
    ("train", {**TRAIN, "log_dir": "{}"}, "log_dir"),
    ("train", {**TRAIN, "shared_pvc": "{}"}, "shared_pvc"),
    ("train", {**TRAIN, "recipe": "{}"}, "recipe"),
    ("train", {**TRAIN, "extra_config": ["NOTE={}"]}, "extra_config"),
    ("train", {**TRAIN, "data_train": "{}"}, "data_train"),
    ("train", {**TRAIN, "nccl_debug": "{}"}, "nccl_debug"),
    ("train", {**TRAIN, "queue": "{}"}, "queue"),
    ("train", {**TRAIN, "env": {"NOTE": "{}"}}, "NOTE"),
    ("notebook", {**NOTEBOOK, "user": "{}"}, "user"),
    ("notebook", {**NOTEBOOK, "htpasswd": "{}"}, "htpasswd"),
    ("notebook", {**NOTEBOOK, "log_dir": "{}"}, "log_dir"),
    ("notebook", {**NOTEBOOK, "source_cidr": "{}"}, "source_cidr"),
    ("notebook", {**NOTEBOOK, "tls": {"hosts": ["{}"]}}, "tls.hosts"),
    ("stage-data", {**STAGE_DATA, "s3_bucket": "{}"}, "s3_bucket"),
    ("stage-data", {**STAGE_DATA, "s3_prefix": "{}"}, "s3_prefix"),
    ("stage-data", {**STAGE_DATA, "stage_dir": "{}"}, "stage_dir"),
    ("storage", {"efs": {**STORAGE["efs"], "file_system_id": "{}"}}, "file_system_id"),
    ("storage", {"fsx": {**STORAGE["fsx"], "dns_name": "{}"}}, "dns_name"),
    ("mpi-operator", {"watch_namespace": "{}"}, "watch_namespace"),
    ("mpi-operator", {"image": {"tag": "{}"}}, "tag"),
    ("gpu-nodes", {**GPU_NODES, "cluster_id": "{}"}, "cluster_id"),
    ("gpu-nodes", {**GPU_NODES, "tags": {"team": "{}"}}, "team"),
]


@pytest.fixture(scope="module")
def kinds(shared_kube: Kube) -> dict[str, set[str]]:
    """The kinds that each chart makes of good values; a ConfigMap comes with a run file."""
    firsts = {chart: next(iter(cases.values())) for chart, cases in DOCUMENTED.items()}
    return {
        chart: {"ConfigMap"} | {item["kind"] for item in rehearsed(shared_kube, chart, values)}
        for chart, values in firsts.items()
    }


@pytest.mark.parametrize("hostile", [QUOTES, TEMPLATE], ids=["quotes", "template"])
@pytest.mark.parametrize(("chart", "values", "field"), FIELDS, ids=[f"{chart}-{field}" for chart, _, field in FIELDS])
def test_a_hostile_string_is_rejected_by_name_or_arrives_unchanged(
    shared_kube: Kube, kinds: dict[str, set[str]], chart: str, values: Values, field: str, hostile: str
) -> None:
    done = shared_kube.try_install("it", chart, replaced(values, hostile), "--dry-run=server")

    if done.returncode != 0:
        assert field.rpartition(".")[2] in done.stderr, done.stderr
        return
    objects = rehearsed(shared_kube, chart, replaced(values, hostile))
    assert {item["kind"] for item in objects} <= kinds[chart], "a value made an object"
    assert any(arrives(hostile, text) for text in texts(objects)), done.stdout
    taken = shared_kube.rehearse(*objects)
    assert taken.returncode == 0, taken.stderr


@pytest.mark.parametrize("chart", DOCUMENTED)
def test_a_release_name_too_long_for_its_pods_is_rejected_by_name(shared_kube: Kube, chart: str) -> None:
    [documented, *_] = DOCUMENTED[chart].values()
    values = filled(documented, shared_kube.namespace)

    done = shared_kube.try_install("a" * 41, chart, values, "--dry-run=server")

    assert done.returncode != 0
    assert "release name" in done.stderr.lower().replace(".", " ")
    assert "at most 40" in done.stderr
    longer = shared_kube.try_install("a" * 64, chart, values, "--dry-run=server")
    assert longer.returncode != 0
    assert "name" in longer.stderr


@pytest.mark.parametrize(
    ("chart", "values", "field"),
    [
        ("train", {**TRAIN, "gpu_nodes": "two"}, "gpu_nodes"),
        ("train", {**TRAIN, "gpu_nodes": 0}, "gpu_nodes"),
        ("train", {**TRAIN, "gpu_node": 2}, "gpu_node"),
        ("train", {**TRAIN, "extra_config": {"A": 1}}, "extra_config"),
        ("train", {}, "image"),
        ("notebook", {**NOTEBOOK, "source_cidr": "0.0.0.0/0"}, "source_cidr"),
        ("notebook", {"image": NOTEBOOK["image"]}, "htpasswd"),
        ("notebook", {**NOTEBOOK, "htpasswd": "secret"}, "htpasswd"),
        ("stage-data", {**STAGE_DATA, "workers": "many"}, "workers"),
        ("stage-data", {"image": STAGE_DATA["image"]}, "s3_bucket"),
        ("storage", {"efs": {"enabled": True}}, "file_system_id"),
        ("mpi-operator", {"replicas": "one"}, "replicas"),
        ("gpu-nodes", {"cluster_id": "fleet"}, "role_name"),
    ],
)
def test_a_wrong_or_missing_value_is_rejected_by_name(
    shared_kube: Kube, chart: str, values: Values, field: str
) -> None:
    done = shared_kube.try_install(random_name("it"), chart, values, "--dry-run=server")

    assert done.returncode != 0
    assert field in done.stderr, done.stderr


def rehearsed(kube: Kube, chart: str, values: Values) -> list[Manifest]:
    return kube.install_rehearsed("it", chart, filled(values, kube.namespace))


def replaced(value: Any, hostile: str) -> Any:
    """Values with the hostile text where `{}` stands."""
    match value:
        case dict():
            return {key: replaced(inner, hostile) for key, inner in value.items()}
        case list():
            return [replaced(inner, hostile) for inner in value]
        case str():
            return value.replace("{}", hostile)
        case _:
            return value


def texts(value: Any) -> Iterator[str]:
    """Every text in objects, and in texts that are objects themselves."""
    match value:
        case dict():
            for inner in value.values():
                yield from texts(inner)
        case list():
            for inner in value:
                yield from texts(inner)
        case str():
            yield value


def arrives(hostile: str, text: str) -> bool:
    """Whether a text holds the hostile one; Kubernetes reads $$ as one dollar sign, where it would else fill in."""
    return hostile in text or hostile in text.replace("$$", "$")
