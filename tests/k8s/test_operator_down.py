"""What the commands say while the MPI operator is down. Runs last because of its file name: it stops the operator."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator

import pytest
from kube import eventually
from test_cli_eks import NAME, Fleet, fleet

from tools import run_tool, tool

__all__ = ["fleet"]
STOP, START = "MASKFLEET_STOP_OPERATOR", "MASKFLEET_START_OPERATOR"


def switches() -> tuple[list[str], list[str]] | None:
    """Commands that stop the operator and start it again: of the environment, or those that scale its Deployment."""
    if os.environ.get(STOP) and os.environ.get(START):
        return shlex.split(os.environ[STOP]), shlex.split(os.environ[START])
    deployments = json.loads(run_tool("kubectl", "get", "deployments", "--all-namespaces", "-o", "json"))["items"]
    for one in deployments:
        meta, replicas = one["metadata"], one.get("status", {}).get("readyReplicas", 0)
        if "mpi-operator" in meta["name"] and replicas:
            scale = [tool("kubectl"), "--namespace", meta["namespace"], "scale", "deployment", meta["name"]]
            return [*scale, "--replicas=0"], [*scale, f"--replicas={replicas}"]
    return None


@pytest.fixture
def stop_operator(fleet: Fleet) -> Iterator[Callable[[], object]]:
    """Stops the operator; it is started again afterwards."""
    found = switches()
    if found is None:
        pytest.skip(f"no Deployment runs the operator here, and {STOP} and {START} name no commands")
    stop, start = found
    yield lambda: subprocess.run(stop, check=True, timeout=60)
    subprocess.run(start, check=True, timeout=60)
    eventually(lambda: operator_verdict(fleet) == "ok", what="the operator runs again", within_s=120)


def operator_verdict(fleet: Fleet) -> str:
    asked = (
        "doctor",
        "--on",
        "eks",
        "--namespace",
        fleet.kube.namespace,
        "--launch-set",
        "shared_claim=runs",
        "--json",
    )
    return str(next(one["verdict"] for one in json.loads(fleet(*asked).stdout) if one["name"] == "MPI operator"))


def test_a_dead_operator_is_named_and_nothing_is_launched_until_it_is_back(
    fleet: Fleet, stop_operator: Callable[[], object]
) -> None:
    assert fleet.launch().returncode == 0
    eventually(
        lambda: fleet.status()["detail"].startswith("0 of 2 workers are ready"), what="the operator handled the job"
    )
    assert "no operator" not in fleet("explain", fleet.handle).stdout
    stop_operator()
    said = eventually(
        lambda: text if "no operator" in (text := fleet("explain", fleet.handle).stdout) else "",
        what="explain names the operator",
        within_s=120,
    )
    assert "The MPI operator does not run: it starts no worker and no new attempt until it is back." in said
    assert re.search(r"its lease was renewed (3[1-9]|[4-9]\d|1\d\d) s ago and lasts 15 s", said), said
    assert fleet.status()["detail"].startswith("0 of 2 workers are ready"), "the state comes from what is there"
    assert operator_verdict(fleet) == "fail"
    other = [f"{NAME}-2" if word == NAME else word for word in fleet.arguments("--detach")]
    refused = fleet(*other)
    assert refused.returncode == 2
    assert "the MPI operator does not run: lease not renewed for" in refused.stderr
    assert fleet.kube.find("mpijob", f"{NAME}-2") is None
