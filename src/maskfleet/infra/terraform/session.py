"""A work folder ready to use: files copied, settings merged, backend written, roots found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maskfleet.errors import InfraError
from maskfleet.infra.kubernetes.access import access_of, kubeconfig_of
from maskfleet.infra.stacks import Stack
from maskfleet.infra.terraform import variables
from maskfleet.infra.terraform.backend import StateBackend, backend_from, check_change, write_backend
from maskfleet.infra.terraform.root import Program, Root, find_terraform
from maskfleet.infra.terraform.state import Resource, State, is_named
from maskfleet.infra.view import InfraView
from maskfleet.infra.workdir import WorkFolder
from maskfleet.system.files import read_json, write_private_json
from maskfleet.system.kube.client import Kube
from maskfleet.system.lock import locked


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says about a work folder."""

    workdir: Path
    assignments: Sequence[str] = ()
    var_files: Sequence[Path] = ()
    state_bucket: str | None = None
    state_region: str | None = None
    state_lock_table: str | None = None
    take_ours: bool = False


@dataclass(slots=True)
class Session:
    """What plan, up, status and down work with."""

    stack: Stack
    work: WorkFolder
    view: InfraView
    settings: dict[str, Any]
    base: Root
    """The root applied first: AWS resources."""
    addons: Root
    """The root applied second: what runs in the cluster."""
    backend: StateBackend

    @property
    def cluster_name(self) -> str:
        return str(self.settings.get("cluster_name") or self.stack.name)

    def is_cluster(self, resource: Resource) -> bool:
        return is_named(resource, (self.stack.cluster,))

    def has_cluster(self, state: State) -> bool:
        return any(self.is_cluster(resource) for resource in state.resources)

    def state(self, root: Root) -> State:
        """The state of `root`, which is initialised first if it may have one."""
        if not (root.folder / ".terraform").is_dir():
            if self.backend.bucket is None and not (self.work.states / f"{root.name}.tfstate").exists():
                return State()
            root.init()
        return root.state()

    @property
    def profile(self) -> str | None:
        """The AWS profile to use."""
        return str(self.settings.get("profile") or "") or None

    def access(self, state: State) -> dict[str, Any] | None:
        """Name, endpoint, certificate authority and region of the cluster in `state`; None if it has no endpoint."""
        return access_of(state) if self.has_cluster(state) else None

    def cluster(self, state: State) -> Kube | None:
        """The cluster in `state`, by a kubeconfig that names no other; None if it has no endpoint."""
        access = self.access(state)
        if access is None:
            return None
        kubeconfig = kubeconfig_of(access, profile=self.profile)
        write_private_json(self.work.kubeconfig, kubeconfig)
        return Kube(kubeconfig=kubeconfig, namespace="default")

    def write_settings(self) -> None:
        """Write the variables of the first root."""
        variables.write_variables(self.base.folder, self.settings)

    def write_outputs(self, base: State) -> None:
        """Write the variables of the second root: an output of the first sets the variable of the same name.

        An output overrides a setting, because it is what the first root made of that setting.
        """
        given = {name: value for name, value in base.values.items() if value is not None}
        variables.write_variables(self.addons.folder, {**self.settings, **given})


def read_session(options: Options, stack: Stack, view: InfraView, env: Mapping[str, str]) -> Session:
    """The session of a work folder as it is, without updating its files."""
    work = WorkFolder(options.workdir, stack)
    if work.manifest.exists():
        return _session(work, view, read_json(work.settings), find_terraform(env))
    if options.state_bucket is None:
        raise InfraError(
            f"{options.workdir} is not a work folder of maskfleet",
            remedy=f"maskfleet infra up {stack.name} creates one; --workdir names another, --state-bucket one in S3",
        )
    return open_session(options, stack, view, env)


def open_session(options: Options, stack: Stack, view: InfraView, env: Mapping[str, str]) -> Session:
    """The session with files, settings and backend updated."""
    program = find_terraform(env)
    given = variables.from_options(options.assignments, options.var_files, program)
    work = WorkFolder(options.workdir, stack)
    settings = {**read_json(work.settings), **given}
    settings = {name: value for name, value in settings.items() if value is not None}
    backend = backend_from(
        work.backend,
        bucket=options.state_bucket,
        region=options.state_region or settings.get("region"),
        cluster=settings.get("cluster_name"),
        lock_table=options.state_lock_table,
        stack=stack.name,
    )
    _check_cluster_name(work, given)
    work.refresh(view.say, take_ours=options.take_ours)
    session = _session(work, view, settings, program)
    known = variables.declared(session.base.folder) | variables.declared(session.addons.folder)
    variables.check_known(settings, known)
    check_change(work.backend, backend, in_use=_is_used(work))
    folders = {root.name: root.folder for root in (session.base, session.addons)}
    write_backend(work.backend, backend, folders=folders, states=work.states, program=program)
    write_private_json(work.settings, settings)
    session.backend = backend
    if backend.bucket is None:
        view.say(f"the state is stored in {work.states} only: do not lose it; --state-bucket stores it in S3")
    return session


@contextmanager
def only_one(options: Options) -> Iterator[None]:
    """Hold the work folder, so that two commands do not change its files at the same time."""
    options.workdir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(options.workdir / ".lock", f"changing the infrastructure in {options.workdir}"):
        yield


def _session(work: WorkFolder, view: InfraView, settings: dict[str, Any], program: Program) -> Session:
    base, addons = (
        Root(name.rsplit("/", 1)[-1], work.copy_of(name), work.logs, program, view) for name in work.stack.roots
    )
    return Session(work.stack, work, view, settings, base, addons, StateBackend(**read_json(work.backend)))


def _check_cluster_name(work: WorkFolder, given: Mapping[str, Any]) -> None:
    before = read_json(work.settings).get("cluster_name")
    wanted = given.get("cluster_name", before)
    if before is not None and wanted != before and _is_used(work):
        raise InfraError(
            f"{work.path} belongs to the cluster {before}, not to {wanted}",
            remedy=f"use another --workdir for it, such as maskfleet-infra/{work.stack.name}-{wanted}",
        )


def _is_used(work: WorkFolder) -> bool:
    """Whether a state may exist that belongs to the settings of the work folder."""
    return any(work.states.glob("*.tfstate")) or bool(read_json(work.journal))
