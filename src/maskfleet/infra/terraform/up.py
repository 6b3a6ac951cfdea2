"""`maskfleet infra up`: plan, ask, apply, one root after the other."""

from __future__ import annotations

from maskfleet.errors import InfraError
from maskfleet.infra.journal import recorded
from maskfleet.infra.terraform.plan import destroyed, lost_data, pass_outputs, plan_root
from maskfleet.infra.terraform.progress import TerraformProgress
from maskfleet.infra.terraform.root import Root
from maskfleet.infra.terraform.session import Session


def up(session: Session, *, delete_data: bool = False) -> None:
    """Create or change everything; run again, it resumes."""
    session.write_settings()
    base = plan_root(session, session.base)
    if base.has_changes:
        _check_data(session, base, delete_data=delete_data)
        confirm(session, f"apply this to {session.base.name}? What runs in the cluster follows")
        apply_root(session, session.base)
    pass_outputs(session)
    addons = plan_root(session, session.addons)
    if addons.has_changes:
        if not base.has_changes or destroyed(addons):
            confirm(session, f"apply this to {session.addons.name}?")
        apply_root(session, session.addons)
    if not base.has_changes and not addons.has_changes:
        session.view.say("nothing to do: everything matches the settings")


def apply_root(session: Session, root: Root) -> None:
    """Apply the saved plan of `root`, and record it."""
    with recorded(session.work.journal, root.name, "up", root.folder):
        progress = root.apply()
    done = progress.summary
    if done:
        session.view.say(f"{root.name}: {done['add']} created, {done['change']} changed, {done['remove']} destroyed")


def _check_data(session: Session, progress: TerraformProgress, *, delete_data: bool) -> None:
    """Refuse a plan that deletes data, as a new deployment type of a file system does, unless `delete_data`."""
    lost = [change.address for change in lost_data(session, progress)]
    if lost and not delete_data:
        raise InfraError(
            f"this would delete {', '.join(lost)} with all data in it; nothing was changed",
            remedy="undo the change of settings, or copy the data elsewhere and give --delete-data",
        )


def confirm(session: Session, question: str) -> None:
    """Raise an error unless the user agrees."""
    if not session.view.confirm(question):
        raise InfraError("nothing was changed: not confirmed", remedy="confirm, or give --yes")
