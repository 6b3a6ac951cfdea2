"""Runs first because of its file name, before other tests install the MPIJob CRD."""

from __future__ import annotations

import pytest
from chart_cases import TRAIN
from cluster_crds import MPIJOBS, crd_exists
from kube import Kube


def test_train_without_the_operators_crd_fails_as_a_whole_and_names_it(kube: Kube) -> None:
    if crd_exists(MPIJOBS):
        pytest.skip("this cluster knows MPIJobs already: that an installation fails without them was not tested")

    done = kube.try_install("run-1", "train", TRAIN)

    assert done.returncode != 0
    assert 'no matches for kind "MPIJob" in version "kubeflow.org/v2beta1"' in done.stderr
    assert kube.everything() == set(), "a half-made installation was left"
