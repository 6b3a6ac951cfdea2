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
    """A reachable cluster and the tools for it; skips the test with the reason otherwise."""
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
    """A separate namespace for the test that enforces Pod Security "restricted"."""
    with namespace_of_our_own(tmp_path) as own:
        yield own


@pytest.fixture(scope="module")
def shared_kube(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    """Such a namespace for all tests of a module that leave nothing in it."""
    with namespace_of_our_own(tmp_path_factory.mktemp("kube")) as own:
        yield own


@pytest.fixture(scope="session")
def mpijobs(cluster: None) -> Iterator[None]:
    """The API knows MPIJobs; the CRD is removed afterwards only if it did not exist before."""
    with mpijobs_known():
        yield


@pytest.fixture(scope="session")
def other_kinds(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The API knows the kinds of Karpenter and cert-manager, by their own CRDs or by ones that accept anything."""
    with kinds_known((*KARPENTER, *CERT_MANAGER), tmp_path_factory.mktemp("crds")):
        yield


@pytest.fixture(scope="session")
def operator(mpijobs: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    """An mpi-operator that watches new namespaces; skips the test with the reason otherwise."""
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
