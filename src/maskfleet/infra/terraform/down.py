"""`maskfleet infra down`: first what the cluster created outside of the state, then the roots; data only on request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from maskfleet.errors import InfraError
from maskfleet.infra.journal import recorded
from maskfleet.infra.kubernetes.access import reachable
from maskfleet.infra.kubernetes.leftovers import EbsVolume, claims_with_volumes, ebs_volumes, leftovers, remove
from maskfleet.infra.stacks import BUCKETS
from maskfleet.infra.terraform.root import Root
from maskfleet.infra.terraform.session import Session
from maskfleet.infra.terraform.state import Resource, State, is_named, split_kept
from maskfleet.system.kube.client import ApiError


@dataclass(frozen=True, slots=True)
class DownOptions:
    """What `down` deletes, and how long it waits."""

    delete_data: bool = False
    skip_cluster: bool = False
    wait_s: float = 900.0


def down(session: Session, options: DownOptions) -> None:
    """Remove everything but data; with `delete_data`, everything. Run again, it resumes."""
    base, addons = session.state(session.base), session.state(session.addons)
    kept, gone = _split(session, base, options)
    if not gone and not addons.resources:
        session.view.say("nothing is left to remove")
        _say_kept(session, kept, [])
        return
    if addons.resources and not session.has_cluster(base) and not options.skip_cluster:
        raise InfraError(
            f"{session.addons.name} has {len(addons.resources)} resources of a cluster that {session.base.name} lacks",
            remedy="if that cluster is gone, --skip-cluster forgets them",
        )
    _confirm(session, options, kept, [*gone, *addons.resources])
    remaining = _empty_cluster(session, options, base)
    if addons.resources and not options.skip_cluster:
        session.write_outputs(base)
        session.addons.init()
        destroy(session, session.addons, addons.resources, ())
    if gone:
        session.write_settings()
        session.base.init()
        destroy(session, session.base, gone, kept)
    if options.skip_cluster:
        session.addons.forget([resource.address for resource in session.state(session.addons).resources])
    _say_kept(session, kept, remaining)


def _say_kept(session: Session, kept: Sequence[Resource], remaining: Sequence[EbsVolume]) -> None:
    """Show what still exists, and how to delete it."""
    say = session.view.say
    if kept:
        say(f"kept data, and what it depends on ({len(kept)} resources; file systems and buckets are billed):")
        for resource in kept:
            say(f"  {resource.address}  {resource.id}".rstrip())
        say(f"maskfleet infra up {session.stack.name} creates a cluster that uses it again")
        if any(is_named(resource, set(session.stack.data) - BUCKETS) for resource in kept):
            say(f"maskfleet infra down {session.stack.name} --delete-data deletes it, except for buckets")
    if remaining:
        say("EBS volumes of claims in the cluster remain, and are billed:")
        for volume in remaining:
            say(f"  {volume.volume_id}  of {volume.claim}; aws ec2 delete-volume --volume-id {volume.volume_id}")


def _split(session: Session, base: State, options: DownOptions) -> tuple[list[Resource], list[Resource]]:
    if options.delete_data:
        return split_kept(base, BUCKETS, session.stack.guards)
    kept, gone = split_kept(base, session.stack.data, session.stack.guards)
    if any(session.is_cluster(resource) for resource in kept):
        raise InfraError(
            "data cannot be kept without the cluster: by the state, a resource that holds data depends on it",
            remedy="copy the data elsewhere and give --delete-data, or remove that dependency from the edited root",
        )
    return kept, gone


def _confirm(session: Session, options: DownOptions, kept: Sequence[Resource], gone: Sequence[Resource]) -> None:
    say = session.view.say
    say(f"{len(gone)} resources of {session.cluster_name} will be destroyed, and everything that runs in it will stop")
    data = [resource for resource in gone if is_named(resource, session.stack.data)]
    if data:
        say("with all data in:")
        for resource in data:
            say(f"  {resource.address}  {resource.id}".rstrip())
    elif kept:
        say(f"{len(kept)} resources that hold data, or that data depends on, are kept")
    if options.skip_cluster:
        say("--skip-cluster: load balancers and Karpenter's nodes are not deleted; they may be left behind")
    if not session.view.confirm_name("type the name of the cluster to remove it", session.cluster_name):
        raise InfraError("nothing was removed: not confirmed", remedy="type the name of the cluster, or give --yes")


def _empty_cluster(session: Session, options: DownOptions, base: State) -> list[EbsVolume]:
    """Remove what the cluster created outside of the state; the EBS volumes that remain."""
    cluster = None if options.skip_cluster else session.cluster(base)
    if cluster is None:
        return []
    with cluster as kube:
        is_reachable, why = reachable(kube)
        if not is_reachable:
            raise InfraError(
                f"the cluster does not answer, so its load balancers and nodes cannot be removed first: {why}",
                remedy="check network, VPN and credentials; if the cluster is gone for good, add --skip-cluster",
            )
        try:
            if leftovers(kube):
                session.view.say("removing what the cluster created outside of terraform's state")
                remove(kube, leftovers, session.view.say, limit_s=options.wait_s)
            if options.delete_data:
                remove(kube, claims_with_volumes, session.view.say, limit_s=options.wait_s)
            return ebs_volumes(kube)
        except ApiError as error:
            raise InfraError(
                f"the cluster did not do what it was asked: {error.what}",
                remedy="check network, VPN and that your AWS identity has an access entry in the cluster",
            ) from error


def destroy(session: Session, root: Root, gone: Sequence[Resource], kept: Sequence[Resource]) -> None:
    """Destroy `gone`; if something is kept, only those addresses, and only after the plan proved that it is kept."""
    targets = list(dict.fromkeys(resource.address for resource in gone)) if kept else []
    progress = root.plan(destroy=True, targets=targets)
    stays = {resource.address for resource in kept}
    hit = [change.address for change in progress.work if change.address in stays]
    if hit:
        raise InfraError(
            f"the plan would destroy {', '.join(hit)}, which data is in or depends on; nothing was destroyed",
            remedy="please report this; --delete-data deletes data on purpose",
        )
    session.view.say(f"{root.name}: {len(progress.work)} to destroy")
    with recorded(session.work.journal, root.name, "down", root.folder):
        root.apply()
