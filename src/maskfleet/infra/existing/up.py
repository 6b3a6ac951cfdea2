"""`maskfleet infra plan` and `up` with `--use-cluster`: look, show, and install only what is missing."""

from __future__ import annotations

from maskfleet.errors import InfraError
from maskfleet.infra.existing.inventory import take_inventory
from maskfleet.infra.existing.parts import namespace_of, parts_of, table, variables_of
from maskfleet.infra.kubernetes.access import reachable
from maskfleet.infra.terraform.plan import destroyed, plan_root
from maskfleet.infra.terraform.progress import TerraformProgress
from maskfleet.infra.terraform.session import Session
from maskfleet.infra.terraform.state import State
from maskfleet.infra.terraform.up import apply_root, confirm


def plan_existing(session: Session) -> TerraformProgress:
    """Show what the cluster has and lacks, and plan the add-ons root for what it lacks."""
    ours = session.state(session.addons).resources
    kube = session.cluster(State())
    assert kube is not None
    with kube:
        answers, why = reachable(kube)
        if not answers:
            raise InfraError(
                f"the cluster {session.cluster_name} does not answer: {why}",
                remedy="check network, VPN and credentials; your AWS identity needs an access entry in the cluster",
            )
        found = take_inventory(kube, namespace_of(session.settings))
    parts = parts_of(found, session.settings, ours)
    session.view.say(f"cluster {session.cluster_name}, which maskfleet did not create:")
    for line in table(parts):
        session.view.say(line)
    session.write_outputs(State(), variables_of(parts, session.settings))
    return plan_root(session, session.addons)


def up_existing(session: Session) -> None:
    """Install what is missing; run again, it resumes."""
    progress = plan_existing(session)
    if not progress.has_changes:
        session.view.say("nothing to do: the cluster has everything that the settings ask for")
        return
    lost = [change.address for change in destroyed(progress)]
    removed = f"; it replaces or removes {', '.join(lost)}, which maskfleet installed" if lost else ""
    confirm(session, f"apply this to {session.cluster_name}{removed}?")
    apply_root(session, session.addons)
