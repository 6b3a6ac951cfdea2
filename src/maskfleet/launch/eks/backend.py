"""Amazon EKS: the chart `train` installed by helm, and everything else asked of the Kubernetes API."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from maskfleet.config.launch import EksLaunch
from maskfleet.config.load import RUN_FILE, load, write_run_file
from maskfleet.config.yaml import read_mapping
from maskfleet.errors import ConfigError, LaunchError
from maskfleet.launch.eks.logs import launcher_lines, lines_left
from maskfleet.launch.eks.preflight import refuse_unfit
from maskfleet.launch.eks.reason import launcher_ends, reason_of
from maskfleet.launch.eks.release import CHART, Record, record_of
from maskfleet.launch.eks.status import Snapshot, event_text, mpijob_of, status_from, take
from maskfleet.launch.eks.values import chart_values, values_text
from maskfleet.launch.explain import ECHOES, explain_lines
from maskfleet.launch.job import JobHandle, JobSpec, JobState, JobStatus, Rendered
from maskfleet.system.deploy_files import deploy_path
from maskfleet.system.kube.client import Kube
from maskfleet.system.process import Finished, Shell

VALUES_FILE = "values.yaml"
INSTALL_S = 180.0
STOP_S = 300  # ranks save first
GONE = "already deleted"


class EksBackend:
    """Runs a job as a release of the chart `train` in a namespace of a cluster."""

    def __init__(self, launch: EksLaunch, *, run: Shell) -> None:
        self._launch, self._run = launch, run

    def render(self, job: JobSpec) -> Rendered:
        values = values_text(chart_values(job, self._launch))
        chart = str(deploy_path("helm", CHART))
        # --replace: a release of that name that was removed, of which helm keeps the record, is no obstacle.
        install = self._helm("install", job.name, chart, "--replace", "--values", "-")
        return Rendered(job.name, {VALUES_FILE: values}, (install,))

    def submit(self, rendered: Rendered) -> JobHandle:
        """Send it: the values file is the standard input of the command."""
        handle = self._handle(rendered.name)
        with self._kube() as kube:
            refuse_unfit(kube, self._launch)
            shot = take(kube, rendered.name, with_tail=False)
        state = status_from(shot).state
        if state in (JobState.PENDING, JobState.RUNNING):
            raise LaunchError(
                f"{handle} is {state} already",
                remedy=f"follow it with `maskfleet logs -f {handle}`, cancel it, or choose another --name",
            )
        if shot.record is not None:
            _refuse_another_run(shot.record, rendered, handle)
            if not shot.record.is_removed:
                self._remove(rendered.name)
        for command in rendered.commands:
            done = self._run(command, rendered.files[VALUES_FILE], timeout_s=INSTALL_S)
            if done.code != 0:
                raise _install_error(done, handle)
        return handle

    def status(self, handle: JobHandle) -> JobStatus:
        with self._kube() as kube:
            return status_from(take(kube, release_of(handle)))

    def logs(self, handle: JobHandle, *, follow: bool = False, rank: int | None = None) -> Iterator[str]:
        release_of(handle)
        with self._kube() as kube:
            yield from launcher_lines(kube, handle, follow=follow, rank=rank)

    def cancel(self, handle: JobHandle) -> None:
        """Remove the release; its record and the run's folder stay, so that launching it again goes on."""
        release = release_of(handle)
        with self._kube() as kube:
            record, job = record_of(kube, release), mpijob_of(kube, release)
        if job is not None or (record is not None and not record.is_removed):
            self._remove(release)

    def explain(self, handle: JobHandle) -> str:
        with self._kube() as kube:
            shot = take(kube, release_of(handle))
            status = status_from(shot)
            lines = lines_left(kube, handle.path) if status.state is JobState.FAILED else []
        return explained(shot, status, lines)

    def _kube(self) -> Kube:
        return Kube(context=self._launch.context, namespace=self._launch.namespace)

    def _helm(self, *arguments: str) -> tuple[str, ...]:
        context = ("--kube-context", self._launch.context) if self._launch.context else ()
        return ("helm", *arguments, "--namespace", self._launch.namespace, *context)

    def _handle(self, name: str) -> JobHandle:
        context = f"{self._launch.context}@" if self._launch.context else ""
        return JobHandle("eks", f"{context}{self._launch.namespace}", name)

    def _remove(self, release: str) -> None:
        # In the foreground: when it returns, the pods are gone, and a new job cannot meet the old one in its folder.
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


def launch_of(handle: JobHandle) -> EksLaunch:
    """The cluster and namespace that an EKS handle names."""
    context, at, namespace = handle.place.rpartition("@")
    try:
        return EksLaunch(namespace=namespace, context=context if at else None)
    except ValueError as error:
        raise LaunchError(
            f"{handle} names no namespace", remedy="write eks://NAMESPACE/NAME, as `maskfleet launch` printed it"
        ) from error


def release_of(handle: JobHandle) -> str:
    """The release that a job's handle names."""
    if "/" in handle.path:
        raise LaunchError(
            f"{handle} names a file, not a job",
            remedy=f"leave the path out: {JobHandle(handle.on, handle.place, handle.path.split('/')[0])}",
        )
    return handle.path


def explained(shot: Snapshot, status: JobStatus, lines: list[str]) -> str:
    """What is to be said about a job, whatever its state."""
    at = f" at step {status.step}" if status.step is not None else ""
    head = f"The run is {status.state}{at}{f': {status.detail}' if status.detail else ''}."
    reason = reason_of(shot)
    match status.state:
        case JobState.DONE:
            return "The run is done; there is nothing to explain."
        case JobState.CANCELLED:
            return "The run was cancelled.\n  → launch it again under its name to go on from its last checkpoint"
        case JobState.FAILED:
            own = explain_lines(lines)
            vague = own.cause is None or own.cause.name in ECHOES
            parts = [head, *launcher_ends(shot)]
            if reason is not None and (vague or reason.name == "host memory"):
                return "\n".join([*parts, "", reason.render()])
            also = [f"The cluster also says: {reason.name}. {reason.meaning}"] if reason is not None else []
            return "\n".join([*parts, "", own.render(), *also])
        case _:
            parts = [head, *(f"{host.address}: {host.state}  {host.detail}".rstrip() for host in status.hosts)]
            parts += launcher_ends(shot)
            if reason is not None:
                parts += ["", reason.render()]
            return "\n".join([*parts, *(["", *map(event_text, shot.events[-5:])] if shot.events else [])])


def _refuse_another_run(record: Record, rendered: Rendered, handle: JobHandle) -> None:
    """The folder of a name holds one run: what was launched before under it must be the same."""
    before = record.values.get("run_yaml")
    if not isinstance(before, str):
        return  # it was installed by other means than `maskfleet launch`
    with tempfile.TemporaryDirectory() as folder:
        old, new, values = Path(folder, "old"), Path(folder, "new.yaml"), Path(folder, VALUES_FILE)
        old.mkdir()
        (old / RUN_FILE).write_text(before, encoding="utf-8")
        values.write_text(rendered.files[VALUES_FILE], encoding="utf-8")
        new.write_text(str(read_mapping(values)["run_yaml"]), encoding="utf-8")
        try:
            write_run_file(old, load(new))
        except ConfigError as error:
            raise LaunchError(
                error.what.replace(str(old), str(handle)),
                remedy="choose another --name for the other run, or launch the same run to continue it",
            ) from error


def _install_error(done: Finished, handle: JobHandle) -> LaunchError:
    said = (done.err.strip() or done.out.strip() or f"code {done.code}").removeprefix("Error: ")
    if "still in use" in said:  # helm 3: cannot re-use a name that is; helm 4: cannot reuse one
        remedy = f"somebody launched it at the same moment: `maskfleet status {handle}`"
    elif "values don't meet the specifications" in said or "execution error at" in said:
        remedy = "the words above name the value of the chart; change the field of the launch section that gives it"
    elif "invalid ownership metadata" in said:
        remedy = "something of that name exists that helm did not make: choose another --name"
    elif "forbidden" in said:
        remedy = "ask who runs the cluster for this right (docs/run-anywhere/eks/index.md lists what is needed)"
    else:
        remedy = "nothing runs; mend what helm names and launch again"
    return LaunchError(f"helm could not install {handle}:\n{said}", remedy=remedy)
