"""`maskfleet infra status` and `outputs`: what the states say, and whether the cluster answers; nothing is changed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from maskfleet.errors import InfraError
from maskfleet.infra.journal import fingerprint, last_entry
from maskfleet.infra.kubernetes.access import reachable
from maskfleet.infra.terraform.root import Root
from maskfleet.infra.terraform.session import Session
from maskfleet.infra.terraform.state import State


@dataclass(frozen=True, slots=True)
class RootStatus:
    """One root by its state."""

    root: str
    resources: int
    types: dict[str, int]
    tainted: tuple[str, ...]
    serial: int
    last: str
    settings_changed: bool


@dataclass(frozen=True, slots=True)
class Status:
    """The state of the whole infrastructure."""

    cluster: str
    state_in: str
    roots: tuple[RootStatus, ...]
    cluster_made: bool
    cluster_is_ours: bool
    """False for a cluster that maskfleet did not create, where everything may have been there already."""
    reachable: bool | None
    """None if there is nothing to reach."""
    detail: str

    @property
    def is_well(self) -> bool:
        """Whether all roots exist without failed resources, and the cluster answers."""
        made = all((root.resources or not self.cluster_is_ours) and not root.tainted for root in self.roots)
        return made and self.cluster_made and self.reachable is True


def status(session: Session) -> Status:
    """What the states say, and whether the cluster answers."""
    states = [(root, session.state(root)) for root in session.roots]
    base = session.state(session.base)
    made = session.has_cluster(base)
    answers: bool | None = None
    detail = "has no endpoint yet" if made else "not created"
    if (cluster := session.cluster(base)) is not None:
        with cluster as kube:
            answers, detail = reachable(kube)
    return Status(
        cluster=session.cluster_name,
        state_in=session.backend.text,
        roots=tuple(_root_status(session, root, state) for root, state in states),
        cluster_made=made,
        cluster_is_ours=session.existing is None,
        reachable=answers,
        detail=detail,
    )


def outputs(session: Session) -> dict[str, Any]:
    """Outputs of both roots, the second overriding the first; sensitive ones masked.

    After a `down` that kept data, Terraform still has outputs of the cluster that is gone; a message says so.
    """
    merged: dict[str, Any] = {}
    base = session.state(session.base)
    for state in (base, session.state(session.addons)):
        for name, output in state.outputs.items():
            merged[name] = "(sensitive)" if output.get("sensitive") else output["value"]
    if not merged:
        session.view.say(f"nothing exists yet: maskfleet infra up {session.stack.name} creates it")
    elif not session.has_cluster(base):
        session.view.say("there is no cluster now: its outputs are those of the previous one")
    return merged


def access(session: Session) -> dict[str, Any]:
    """Name, endpoint, certificate authority and region of the cluster."""
    found = session.access(session.state(session.base))
    if found is None:
        raise InfraError("there is no cluster to reach", remedy=f"maskfleet infra up {session.stack.name} creates it")
    return found


def _root_status(session: Session, root: Root, state: State) -> RootStatus:
    last = last_entry(session.work.journal, root.name)
    return RootStatus(
        root=root.name,
        resources=len(state.resources),
        types=dict(Counter(resource.type for resource in state.resources).most_common()),
        tainted=tuple(resource.address for resource in state.resources if resource.tainted),
        serial=state.serial,
        last=last.text,
        settings_changed=bool(last.did == "up" and last.fingerprint != fingerprint(root.folder)),
    )
