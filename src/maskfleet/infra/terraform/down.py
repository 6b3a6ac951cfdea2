"""Removing infrastructure: `down`. What lives outside of the state first, data last and only when told."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maskfleet.errors import InfraError
from maskfleet.infra.kubernetes.kubeconfig import access_of, kubeconfig_of
from maskfleet.infra.kubernetes.kubectl import Cluster
from maskfleet.infra.kubernetes.leftovers import Disk, Waiting, disks, leftovers, remove, remove_disks
from maskfleet.infra.terraform.journal import recorded
from maskfleet.infra.terraform.progress import Progress
from maskfleet.infra.terraform.root import Root
from maskfleet.infra.terraform.session import Session
from maskfleet.infra.terraform.state import Resource, State, is_named, split_kept
from maskfleet.system.files import write_private_json


@dataclass(frozen=True, slots=True)
class Wishes:
    """How to remove."""

    delete_data: bool = False
    skip_cluster: bool = False
    wait_s: float = 900.0


def down(session: Session, wishes: Wishes) -> None:
    """Remove everything but data; with `delete_data`, everything. Begun again, it goes on where it was."""
    base, addons = session.state(session.base), session.state(session.addons)
    kept, gone = _split(session, base, wishes)
    if not gone and not addons.resources:
        session.view.say("nothing is left to remove")
        say_kept(session, kept, [])
        return
    if addons.resources and not session.has_cluster(base) and not wishes.skip_cluster:
        raise InfraError(
            f"{session.addons.name} has {len(addons.resources)} resources of a cluster that {session.base.name} lacks",
            remedy="if that cluster is gone, --skip-cluster forgets them",
        )
    _ask(session, wishes, kept, [*gone, *addons.resources])
    remaining = _empty_cluster(session, wishes, base)
    if addons.resources and not wishes.skip_cluster:
        session.give_outputs(_values(base))
        session.addons.init()
        _destroy(session, session.addons, addons.resources, ())
    if gone:
        session.give_settings()
        session.base.init()
        _destroy(session, session.base, gone, kept)
    if wishes.skip_cluster:
        session.addons.forget([resource.address for resource in session.state(session.addons).resources])
    say_kept(session, kept, remaining)


def cluster_of(session: Session, state: State) -> Cluster | None:
    """The cluster in `state`, by a kubeconfig in the work folder that names no other; None for one without address."""
    access = access_of(state)
    if not session.has_cluster(state) or access is None:
        return None
    profile = session.settings.get("profile")
    write_private_json(session.work.kubeconfig, kubeconfig_of(access, profile=str(profile) if profile else None))
    return Cluster(session.work.kubeconfig, session.env)


def say_kept(session: Session, kept: Sequence[Resource], remaining: Sequence[Disk]) -> None:
    """Exactly what is still there, and how to be rid of it."""
    say = session.view.say
    if kept:
        say(f"kept, with all that it needs ({len(kept)} resources; file systems and buckets are billed):")
        for resource in kept:
            say(f"  {resource.address}{f'  {resource.id}' if resource.id else ''}")
        say(f"maskfleet infra up {session.place.name} makes a cluster around it again;")
        say(f"maskfleet infra down {session.place.name} --delete-data deletes it")
    if remaining:
        say("EBS volumes that claims in the cluster had asked for are left, and are billed:")
        for disk in remaining:
            say(f"  {disk.volume_id}  of {disk.claim}; aws ec2 delete-volume --volume-id {disk.volume_id}")


def _split(session: Session, base: State, wishes: Wishes) -> tuple[list[Resource], list[Resource]]:
    if wishes.delete_data:
        return [], list(base.resources)
    kept, gone = split_kept(base, session.place.data, session.place.guards)
    if any(session.is_cluster(resource) for resource in kept):
        raise InfraError(
            "data cannot be kept without the cluster: a resource that holds data needs it by the state",
            remedy="copy the data elsewhere and give --delete-data, or take that dependency out of the edited root",
        )
    return kept, gone


def _ask(session: Session, wishes: Wishes, kept: Sequence[Resource], gone: Sequence[Resource]) -> None:
    say = session.view.say
    say(f"{len(gone)} resources of {session.cluster_name} will be destroyed, and all that runs in it will end")
    data = [resource for resource in gone if is_named(resource, session.place.data)]
    if data:
        say("with all data in:")
        for resource in data:
            say(f"  {resource.address}{f'  {resource.id}' if resource.id else ''}")
    elif kept:
        say(f"{len(kept)} resources that hold data, or that those need, stay")
    if wishes.skip_cluster:
        say("--skip-cluster: load balancers and Karpenter's nodes are not looked for; they may be left behind")
    if not session.view.confirm_name("type the name of the cluster to remove it", session.cluster_name):
        raise InfraError("nothing was removed: not confirmed", remedy="type the name of the cluster, or give --yes")


def _empty_cluster(session: Session, wishes: Wishes, base: State) -> list[Disk]:
    """Remove what the cluster made outside of the state; the EBS volumes that stay."""
    cluster = None if wishes.skip_cluster else cluster_of(session, base)
    if cluster is None:
        return []
    ready, why = cluster.is_ready()
    if not ready:
        raise InfraError(
            f"the cluster does not answer, so its load balancers and nodes cannot be removed first: {why}",
            remedy="check network, VPN and credentials; if the cluster is gone for good, add --skip-cluster",
        )
    say = session.view.say
    waiting = Waiting(wishes.wait_s, time.monotonic, time.sleep)
    if leftovers(cluster):
        say("removing what the cluster made outside of terraform's state")
        remove(cluster, say, waiting)
    if wishes.delete_data:
        remove_disks(cluster, say, waiting)
    return disks(cluster)


def _destroy(session: Session, root: Root, gone: Sequence[Resource], kept: Sequence[Resource]) -> None:
    """Destroy `gone`; where something stays, only those addresses, and only after the plan proved that it does."""
    targets = list(dict.fromkeys(resource.address for resource in gone)) if kept else []
    progress = root.plan(destroy=True, targets=targets)
    _check_kept(progress, kept)
    session.view.say(f"{root.name}: {len(progress.work)} to destroy")
    with recorded(session.work.journal, root.name, "down", root.folder):
        root.apply()


def _check_kept(progress: Progress, kept: Sequence[Resource]) -> None:
    stays = {resource.address for resource in kept}
    hit = [change.address for change in progress.work if change.address in stays]
    if hit:
        raise InfraError(
            f"the plan would destroy {', '.join(hit)}, which holds data or is needed by it; nothing was destroyed",
            remedy="please report this; --delete-data deletes data on purpose",
        )


def _values(state: State) -> Mapping[str, Any]:
    return {name: output.value for name, output in state.outputs.items()}
