"""How fast the nodes of a cluster exchange data: a fabric test as a job of the chart `train`, removed afterwards."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from maskfleet.config.base import replaced
from maskfleet.config.launch import EksLaunch
from maskfleet.errors import LaunchError
from maskfleet.launch.eks.logs import job_lines
from maskfleet.launch.eks.mpijob import chart_values, values_text
from maskfleet.launch.eks.release import CHART
from maskfleet.launch.eks.status import status_from, take_snapshot
from maskfleet.launch.fabric import FabricTest
from maskfleet.launch.findings import Finding
from maskfleet.launch.instances import expected_bandwidth
from maskfleet.launch.job import JobHandle, JobSpec, JobState
from maskfleet.system.deploy_files import deploy_path
from maskfleet.system.kube.client import Kube
from maskfleet.system.process import Shell

INSTALL_S = 180.0
REMOVE_S = 300
MAX_RUN_S = 3600  # with the time until the nodes start: a test that nobody watches must not keep them


class FabricJob:
    """One test in the namespace of `launch`, on as many nodes as it names."""

    def __init__(self, launch: EksLaunch, slots: tuple[int, ...], *, run: Shell) -> None:
        self._launch, self._slots, self._run = launch, slots, run
        self.name = f"fabric-test-{secrets.token_hex(3)}"

    @property
    def handle(self) -> JobHandle:
        context = f"{self._launch.context}@" if self._launch.context else ""
        return JobHandle("eks", f"{context}{self._launch.namespace}", self.name)

    def values(self) -> dict[str, Any]:
        """Values of the chart: those of a training on the same nodes, without a run."""
        job = JobSpec(self.name, "", self._slots, min_nodes=len(self._slots), max_restarts=0)
        launch = replaced(self._launch, {"min_nodes": None})  # an all-reduce needs every node
        values = {**chart_values(job, launch), "fabric_test": True, "max_run_s": MAX_RUN_S}
        del values["run_yaml"]
        return values

    def measure(self, say: Callable[[str], None]) -> list[Finding]:
        """Run the test and remove it, whatever happens; `say` gets every other line of its log."""
        values = values_text(self.values())
        test = FabricTest()
        with Kube(context=self._launch.context, namespace=self._launch.namespace) as kube:
            try:
                self._helm(values, "install", self.name, str(deploy_path("helm", CHART)), "--values", "-")
                for line in job_lines(kube, self.handle, follow=True):
                    if not test.read(line):
                        say(line)
                status = status_from(take_snapshot(kube, self.name, with_tail=False))
            finally:
                self._helm("", "uninstall", self.name, "--ignore-not-found", "--wait", "--timeout", f"{REMOVE_S}s")
        if status.state is not JobState.DONE or not test.rows:
            raise LaunchError(
                f"the fabric test is {status.state}{f': {status.detail}' if status.detail else ''}",
                remedy="see the lines of its log above; `maskfleet doctor --on eks` checks what a launch requires",
            )
        return test.findings(expected_bandwidth(self._launch.instance, len(self._slots)))

    def _helm(self, stdin: str, *arguments: str) -> None:
        context = ("--kube-context", self._launch.context) if self._launch.context else ()
        command = ("helm", *arguments, "--namespace", self._launch.namespace, *context)
        done = self._run(command, stdin, timeout_s=INSTALL_S if arguments[0] == "install" else REMOVE_S + 60)
        if done.code != 0:
            raise LaunchError(
                f"helm could not {arguments[0]} {self.name}: {done.err.strip() or done.out.strip()}",
                remedy=f"fix what helm reports; remove what is left with `maskfleet cancel {self.handle}`",
            )
