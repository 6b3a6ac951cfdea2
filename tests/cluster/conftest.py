"""The hosts, created once per session and only for `make test-cluster`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from client import Client

from cluster import Cluster, why_not
from maskfleet.config.base import replaced
from maskfleet.config.load import dump
from maskfleet.config.recipes import recipe
from maskfleet.data.synthetic.dataset import make_shapes
from micro_run import MICRO


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if os.environ.get("MASKFLEET_TEST_CLUSTER") != "1":
        pytest.skip("three hosts in network namespaces: run `make test-cluster`")
    reason = why_not()
    if reason is not None:
        pytest.skip(f"NOT TESTED: three hosts on this machine: {reason}")
    hosts = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        hosts.up()
        yield hosts
    finally:
        hosts.down()


@pytest.fixture(scope="session")
def client(cluster: Cluster) -> Client:
    root = cluster.shared / "set"
    make_shapes(root, num_train=12, num_val=5, height=(64, 64), width=(64, 64), num_categories=2, max_objects=3, seed=3)
    run_file = cluster.folder / "micro.yaml"
    run_file.write_text(dump(replaced(recipe("demo"), {**MICRO, "data.root": str(root), "train.images_per_gpu": 1})))
    return Client(cluster, run_file)
