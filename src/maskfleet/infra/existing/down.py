"""`maskfleet infra down` with `--use-cluster`: removes what maskfleet installed, and nothing that others use."""

from __future__ import annotations

from collections.abc import Sequence

from maskfleet.errors import InfraError
from maskfleet.infra.existing.parts import namespace_of
from maskfleet.infra.existing.usage import our_nodes, reasons_to_keep
from maskfleet.infra.kubernetes.access import reachable
from maskfleet.infra.kubernetes.leftovers import remove
from maskfleet.infra.terraform.down import DownOptions, destroy
from maskfleet.infra.terraform.session import Session
from maskfleet.infra.terraform.state import Resource, State, split_kept
from maskfleet.system.kube.client import ApiError, Kube


def down_existing(session: Session, options: DownOptions) -> None:
    """Remove what the state of the add-ons root lists, except what something else still uses."""
    addons = session.state(session.addons)
    if not addons.resources:
        session.view.say("nothing is left to remove")
        return
    if options.skip_cluster:
        _confirm(session, addons.resources)
        session.addons.forget([resource.address for resource in addons.resources])
        session.view.say("--skip-cluster: forgotten, and not removed from the cluster")
        return
    kube = session.cluster(State())
    assert kube is not None
    with kube:
        answers, why = reachable(kube)
        if not answers:
            raise InfraError(
                f"the cluster does not answer, so what maskfleet installed cannot be removed: {why}",
                remedy="check network, VPN and credentials; if the cluster is gone for good, add --skip-cluster",
            )
        kept, gone = _split(session, kube, addons)
        if not gone:
            return
        _confirm(session, gone)
        if any(resource.name == "gpu_nodes" for resource in gone):
            remove(kube, our_nodes(kube), session.view.say, limit_s=options.wait_s)
    session.write_outputs(State())
    session.addons.init()
    destroy(session, session.addons, gone, kept)
    if kept:
        session.view.say("run the command again once nothing uses what was kept")


def _split(session: Session, kube: Kube, addons: State) -> tuple[list[Resource], list[Resource]]:
    """(kept, removed), after a message about each resource that is kept."""
    try:
        reasons = reasons_to_keep(kube, addons, namespace_of(session.settings))
    except ApiError as error:
        raise InfraError(
            f"who uses what maskfleet installed cannot be read: {error.what}; nothing was removed",
            remedy="use an identity with an access entry that may read the whole cluster",
        ) from error
    used = {resource.block: reasons[resource.name] for resource in addons.resources if resource.name in reasons}
    for block, reason in used.items():
        session.view.say(f"kept {block}: {reason}")
    return split_kept(addons, set(used))


def _confirm(session: Session, gone: Sequence[Resource]) -> None:
    say = session.view.say
    say(f"{len(gone)} resources that maskfleet installed in {session.cluster_name} will be removed; all else stays:")
    for resource in gone:
        say(f"  {resource.address}")
    if not session.view.confirm_name("type the name of the cluster to remove them", session.cluster_name):
        raise InfraError("nothing was removed: not confirmed", remedy="type the name of the cluster, or give --yes")
