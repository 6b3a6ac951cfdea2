"""Tests against the cluster that KUBECONFIG names; `make test-k8s` runs them. They need no node."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_crds import CERT_MANAGER, KARPENTER, kinds_known, mpijobs_known
from kube import Kube, eventually, namespace_of_our_own, random_name, wait_until_our_namespaces_are_gone, why_no_cluster

from tools import tool


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A cluster that answers, and the tools for it; a skip that says so otherwise."""
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        pytest.skip("one process would remove definitions that another one uses: make test-k8s runs these tests in one")
    reason = why_no_cluster()
    if reason is not None:
        pytest.skip(reason)
    tool("helm")
    yield
    wait_until_our_namespaces_are_gone()


@pytest.fixture
def kube(cluster: None, tmp_path: Path) -> Iterator[Kube]:
    """A namespace of the test's own where Pod Security "restricted" is enforced."""
    with namespace_of_our_own(tmp_path) as own:
        yield own


@pytest.fixture(scope="module")
def shared_kube(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    """Such a namespace for all tests of a module that leave nothing in it."""
    with namespace_of_our_own(tmp_path_factory.mktemp("kube")) as own:
        yield own


@pytest.fixture(scope="session")
def mpijobs(cluster: None) -> Iterator[None]:
    """MPIJobs are known to the API; the definition goes again only if it was not there before."""
    with mpijobs_known():
        yield


@pytest.fixture(scope="session")
def other_kinds(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Karpenter's and cert-manager's kinds are known to the API, by their own definitions or by loose ones."""
    with kinds_known((*KARPENTER, *CERT_MANAGER), tmp_path_factory.mktemp("crds")):
        yield


@pytest.fixture(scope="session")
def operator(mpijobs: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    """An mpi-operator that answers for new namespaces; a skip that says so otherwise."""
    with namespace_of_our_own(tmp_path_factory.mktemp("operator")) as own:
        name = random_name("probe")
        template = {"spec": {"containers": [{"name": "probe", "image": "probe"}]}}
        replica = {"replicas": 1, "restartPolicy": "Never", "template": template}
        job = {
            "apiVersion": "kubeflow.org/v2beta1",
            "kind": "MPIJob",
            "metadata": {"name": name},
            "spec": {"mpiReplicaSpecs": {"Launcher": replica, "Worker": replica}},
        }
        made = own.create(job)
        assert made.returncode == 0, made.stderr
        try:
            eventually(lambda: own.find("service", name), what="the operator's headless Service", within_s=60)
        except AssertionError:
            pytest.skip("no mpi-operator answers in this cluster: a new MPIJob got no Service within 60 s")
