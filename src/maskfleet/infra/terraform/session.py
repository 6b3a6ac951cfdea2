"""A work folder ready to use: files copied, settings merged, backend written, roots found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maskfleet.errors import InfraError
from maskfleet.infra.existing.cluster import NOT_MADE, describe_cluster
from maskfleet.infra.kubernetes.access import NEEDED, access_of, kubeconfig_of
from maskfleet.infra.stacks import Stack
from maskfleet.infra.state_bucket import make_state_bucket
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
    create_state_bucket: bool = False
    use_cluster: str | None = None
    """Name of a cluster that exists and that maskfleet did not create."""


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
    existing: dict[str, Any] | None = None
    """What AWS says about the cluster if maskfleet did not create it; then only the second root is used."""

    @property
    def cluster_name(self) -> str:
        if self.existing is not None:
            return str(self.existing["cluster_id"])
        return str(self.settings.get("cluster_name") or self.stack.name)

    @property
    def roots(self) -> tuple[Root, ...]:
        """The roots that this work folder uses, in the order of creation."""
        return (self.base, self.addons) if self.existing is None else (self.addons,)

    def is_cluster(self, resource: Resource) -> bool:
        return is_named(resource, (self.stack.cluster,))

    def has_cluster(self, state: State) -> bool:
        return self.existing is not None or any(self.is_cluster(resource) for resource in state.resources)

    def state(self, root: Root) -> State:
        """The state of `root`, which is initialised first if it may have one."""
        if root not in self.roots:
            return State()
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
        if self.existing is not None:
            return {name: self.existing[name] for name in NEEDED}
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

    def write_outputs(self, base: State, more: Mapping[str, Any] | None = None) -> None:
        """Write the variables of the second root: an output of the first sets the variable of the same name.

        An output overrides a setting, because it is what the first root made of that setting. For a cluster that
        maskfleet did not create, what AWS says about it takes the place of outputs; `more` overrides everything.
        """
        given = {name: value for name, value in base.values.items() if value is not None}
        defaults = {} if self.existing is None else NOT_MADE
        values = {**defaults, **self.settings, **given, **(self.existing or {}), **(more or {})}
        variables.write_variables(self.addons.folder, values)


def read_session(options: Options, stack: Stack, view: InfraView, env: Mapping[str, str]) -> Session:
    """The session of a work folder as it is, without updating its files."""
    work = WorkFolder(options.workdir, stack)
    if work.manifest.exists():
        _check_cluster_name(work, {}, options.use_cluster)
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
    name_in_use = options.use_cluster or read_json(work.existing).get("cluster_id")
    backend = backend_from(
        work.backend,
        bucket=options.state_bucket,
        region=options.state_region or settings.get("region"),
        cluster=name_in_use or settings.get("cluster_name"),
        lock_table=options.state_lock_table,
        stack=stack.name,
    )
    _check_cluster_name(work, given, options.use_cluster)
    if name_in_use is not None:
        region, profile = settings.get("region"), settings.get("profile")
        write_private_json(work.existing, describe_cluster(name_in_use, region=region, profile=profile, env=env))
    work.refresh(view.say, take_ours=options.take_ours)
    session = _session(work, view, settings, program)
    known = set().union(*(variables.declared(root.folder) for root in session.roots))
    variables.check_known(settings, known)
    # The second root is planned when the first has been created, half an hour later.
    later = variables.declared(session.addons.folder) - variables.declared(session.base.folder)
    new = {name: given[name] for name in sorted(later & set(given)) if given[name] is not None}
    variables.check_values(session.addons.folder, new, program)
    check_change(work.backend, backend, in_use=_is_used(work))
    folders = {root.name: root.folder for root in session.roots}
    if options.create_state_bucket:
        _create_bucket(backend, session)
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
    existing = read_json(work.existing) or None
    return Session(work.stack, work, view, settings, base, addons, StateBackend(**read_json(work.backend)), existing)


def _create_bucket(backend: StateBackend, session: Session) -> None:
    if backend.bucket is None or backend.region is None:
        raise InfraError("--create-state-bucket needs the name of the bucket", remedy="add --state-bucket NAME")
    make_state_bucket(backend.bucket, region=backend.region, profile=session.profile, say=session.view.say)


def _check_cluster_name(work: WorkFolder, given: Mapping[str, Any], use_cluster: str | None) -> None:
    before = read_json(work.existing).get("cluster_id") or read_json(work.settings).get("cluster_name")
    wanted = use_cluster or given.get("cluster_name", before)
    if use_cluster is not None and not work.existing.exists() and work.manifest.exists():
        raise InfraError(
            f"{work.path} belongs to a cluster of maskfleet's own",
            remedy=f"use another --workdir for {use_cluster}, such as maskfleet-infra/{use_cluster}",
        )
    if before is not None and wanted != before and _is_used(work):
        raise InfraError(
            f"{work.path} belongs to the cluster {before}, not to {wanted}",
            remedy=f"use another --workdir for it, such as maskfleet-infra/{work.stack.name}-{wanted}",
        )


def _is_used(work: WorkFolder) -> bool:
    """Whether a state may exist that belongs to the settings of the work folder."""
    return any(work.states.glob("*.tfstate")) or bool(read_json(work.journal))
