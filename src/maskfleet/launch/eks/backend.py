"""Amazon EKS: helm installs the chart `train`; status, logs and files come from the Kubernetes API."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Self

from maskfleet.config.base import replaced
from maskfleet.config.launch import EksLaunch
from maskfleet.config.load import changes_of_run, load
from maskfleet.config.run import RunConfig
from maskfleet.config.yaml import read_mapping
from maskfleet.errors import LaunchError
from maskfleet.launch.backend import Backend, NotebookOptions
from maskfleet.launch.eks.doctor import examine_eks, refuse_unfit
from maskfleet.launch.eks.elastic.status import end_of, indexed_job_of
from maskfleet.launch.eks.explain import explained
from maskfleet.launch.eks.files import run_files
from maskfleet.launch.eks.handle import handle_path, launch_of, release_of
from maskfleet.launch.eks.jobs.fabric import FabricJob
from maskfleet.launch.eks.logs import job_lines, lines_left
from maskfleet.launch.eks.mpijob import chart_values, values_text, with_data_in_pods, with_instance_facts
from maskfleet.launch.eks.release import CHART, ReleaseRecord, record_of, refuse_strangers
from maskfleet.launch.eks.status import is_finished, leftover_pods, mpijob_of, status_from, take_snapshot
from maskfleet.launch.files.transfer import Report, RunFiles, ignore
from maskfleet.launch.findings import Finding
from maskfleet.launch.instances import INSTANCES, Instance
from maskfleet.launch.job import JobHandle, JobSpec, JobState, JobStatus, NameRule, Rendered, job_for
from maskfleet.system.deploy_files import deploy_path
from maskfleet.system.kube.client import Kube
from maskfleet.system.process import Finished, Shell, run_command

VALUES_FILE = "values.yaml"
INSTALL_S = 180.0
STOP_S = 300  # ranks save first
LEFT_S = 20.0  # for pods that the operator created while the release was being removed
POLL_S = 1.0
GONE = "already deleted"
# A Service gets the name, too, so it begins with a letter; Kubernetes appends to it and allows 63 characters.
NAMES = NameRule(longest=40, pattern=re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?"))


class EksBackend(Backend):
    """Runs a job as a release of the chart `train` in a namespace of a cluster."""

    def __init__(
        self,
        launch: EksLaunch,
        *,
        nodes: int | None = None,
        known: Mapping[str, Instance] = INSTANCES,
        run: Shell = run_command,
    ) -> None:
        launch = with_instance_facts(launch if nodes is None else replaced(launch, {"nodes": nodes}), known)
        self._launch, self._run = launch, run
        self.slots = (launch.ranks or max(1, launch.gpus or 0),) * launch.nodes

    @classmethod
    def for_handle(cls, handle: JobHandle) -> Self:
        return cls(launch_of(handle))

    @classmethod
    def handle_path(cls, path: str) -> str:
        return handle_path(path)

    def job(self, run: RunConfig, *, name: str | None = None) -> JobSpec:
        run = with_data_in_pods(run, self._launch)
        launch = self._launch
        return job_for(
            run, slots=self.slots, name=name, min_nodes=launch.min_nodes, max_restarts=launch.retries, rule=NAMES
        )

    def render(self, job: JobSpec) -> Rendered:
        values = values_text(chart_values(job, self._launch))
        chart = str(deploy_path("helm", CHART))
        install = self._helm("install", job.name, chart, "--values", "-")
        return Rendered(job.name, {VALUES_FILE: values}, (install,))

    def submit(self, rendered: Rendered) -> JobHandle:
        """Run helm with the values file on its standard input."""
        handle = self._handle(rendered.name)
        with self._kube() as kube:
            refuse_unfit(kube, self._launch)
            snapshot = take_snapshot(kube, rendered.name, with_tail=False)
        refuse_strangers(snapshot.record, snapshot.job, CHART, rendered.name)
        state = status_from(snapshot).state
        if state in (JobState.PENDING, JobState.RUNNING):
            raise LaunchError(
                f"{handle} is {state} already",
                remedy=f"follow it with `maskfleet logs -f {handle}`, cancel it, or choose another --name",
            )
        replace: tuple[str, ...] = ()
        if snapshot.record is not None:
            _refuse_another_run(snapshot.record, rendered, handle)
            if not snapshot.record.is_removed:
                self._remove(rendered.name)
            # Only over the record of a removed release: a launch of the same name at the same moment must not win.
            replace = ("--replace",)
        for command in rendered.commands:
            done = self._run((*command, *replace), rendered.files[VALUES_FILE], timeout_s=INSTALL_S)
            if done.code != 0:
                raise _install_error(done, handle)
        return handle

    def status(self, handle: JobHandle) -> JobStatus:
        with self._kube() as kube:
            return status_from(take_snapshot(kube, release_of(handle)))

    def logs(self, handle: JobHandle, *, follow: bool = False, rank: int | None = None) -> Iterator[str]:
        release_of(handle)
        with self._kube() as kube:
            yield from job_lines(kube, handle, follow=follow, rank=rank)

    def cancel(self, handle: JobHandle) -> None:
        """Remove the release; its record and the run directory stay, so that a new launch resumes.

        A run that has ended is left as it is, with its logs.
        """
        release = release_of(handle)
        with self._kube() as kube:
            record, mpijob = record_of(kube, release), mpijob_of(kube, release)
            job = mpijob or indexed_job_of(kube, release)
            refuse_strangers(record, job, CHART, release)
            if job is not None and (is_finished(job) if mpijob is not None else end_of(job) is not None):
                return
            if job is not None or (record is not None and not record.is_removed):
                self._remove(release)
            deadline = time.monotonic() + LEFT_S
            while (left := leftover_pods(kube, release)) and time.monotonic() < deadline:
                time.sleep(POLL_S)
        if left:
            raise LaunchError(
                f"{release} is cancelled, but its pods are not deleted yet: {', '.join(left)}",
                remedy="cancel again in a minute; if a node is dead for good, delete the node or "
                "`kubectl delete pod NAME --force`, then launch again",
            )

    def explain(self, handle: JobHandle) -> str:
        with self._kube() as kube:
            snapshot = take_snapshot(kube, release_of(handle), with_nodes=True)
            status = status_from(snapshot)
            lines = lines_left(kube, handle.path) if status.state is JobState.FAILED else []
        return explained(snapshot, status, lines)

    def doctor(self, *, folder: Path, data: str | None) -> list[Finding]:
        return examine_eks(self._launch)

    def fabric(self, say: Callable[[str], None]) -> list[Finding]:
        with self._kube() as kube:
            refuse_unfit(kube, self._launch)
        return FabricJob(self._launch, self.slots, run=self._run).measure(say)

    def files(
        self, handle: JobHandle, *, writable: bool = False, is_file: bool = False, report: Report = ignore
    ) -> AbstractContextManager[RunFiles]:
        return run_files(handle, writable=writable, is_file=is_file, report=report)

    def notebook(self, handle: JobHandle, options: NotebookOptions) -> None:
        from maskfleet.launch.eks.notebook import serve

        serve(handle, options, run=self._run)

    def stop_notebook(self, handle: JobHandle) -> str:
        from maskfleet.launch.eks.notebook import NotebookRelease, RunRelease

        release = RunRelease.of(handle)
        with self._kube() as kube:
            record = record_of(kube, release.notebook)
        existed = NotebookRelease(release, record, run=self._run).stop()
        return f"{release.notebook} is removed" if existed else f"there is no {release.notebook}"

    def _kube(self) -> Kube:
        return Kube(context=self._launch.context, namespace=self._launch.namespace)

    def _helm(self, *arguments: str) -> tuple[str, ...]:
        context = ("--kube-context", self._launch.context) if self._launch.context else ()
        return ("helm", *arguments, "--namespace", self._launch.namespace, *context)

    def _handle(self, name: str) -> JobHandle:
        context = f"{self._launch.context}@" if self._launch.context else ""
        return JobHandle("eks", f"{context}{self._launch.namespace}", name)

    def _remove(self, release: str) -> None:
        # In the foreground: when it returns the pods are deleted, so two jobs never share the run directory.
        done = self._run(
            self._helm("uninstall", release, "--keep-history", "--ignore-not-found", "--cascade", "foreground",
                       "--wait", "--timeout", f"{STOP_S}s"),
            timeout_s=STOP_S + 60,
        )  # fmt: skip
        if done.code != 0 and GONE not in done.err:
            raise LaunchError(
                f"helm could not remove {release}: {done.err.strip() or done.out.strip()}",
                remedy="see what is left with `maskfleet status`, and try again",
            )


def _refuse_another_run(record: ReleaseRecord, rendered: Rendered, handle: JobHandle) -> None:
    """Raise if another run was launched under this name: the folder of a name holds one run."""
    before = record.values.get("run_yaml")
    if not isinstance(before, str):
        return  # it was not installed by `maskfleet launch`
    with tempfile.TemporaryDirectory() as folder:
        old, new, values = Path(folder, "old.yaml"), Path(folder, "new.yaml"), Path(folder, VALUES_FILE)
        old.write_text(before, encoding="utf-8")
        values.write_text(rendered.files[VALUES_FILE], encoding="utf-8")
        new.write_text(str(read_mapping(values)["run_yaml"]), encoding="utf-8")
        changed = changes_of_run(load(old), load(new))
    if changed:
        raise LaunchError(
            f"{handle} holds another run, which differs in\n{changed}",
            remedy="choose another --name for the other run, or launch the same run to continue it",
        )


def _install_error(done: Finished, handle: JobHandle) -> LaunchError:
    said = (done.err.strip() or done.out.strip() or f"code {done.code}").removeprefix("Error: ")
    # helm 3: cannot re-use a name that is still in use; helm 4: cannot reuse one; both, if the records collide: secrets
    # "sh.helm.release.v1.NAME.v1" already exists.
    if "still in use" in said or ("sh.helm.release" in said and "already exists" in said):
        remedy = f"someone launched it at the same moment: `maskfleet status {handle}`"
    elif "values don't meet the specifications" in said or "execution error at" in said:
        remedy = "the message above names the value of the chart; change the field of the launch section that gives it"
    elif "invalid ownership metadata" in said:
        remedy = "something of that name exists that helm did not make: choose another --name"
    elif "forbidden" in said:
        remedy = "ask the cluster's administrator for this permission (docs/run-anywhere/eks/index.md lists all)"
    else:
        remedy = "nothing was started; fix what helm reports and launch again"
    return LaunchError(f"helm could not install {handle}:\n{said}", remedy=remedy)
