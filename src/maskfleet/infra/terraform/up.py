"""Making infrastructure: `plan` and `up`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from maskfleet.errors import InfraError
from maskfleet.infra.terraform.journal import recorded
from maskfleet.infra.terraform.progress import Change, Progress
from maskfleet.infra.terraform.root import Root
from maskfleet.infra.terraform.session import Session
from maskfleet.infra.terraform.state import State, is_named
from maskfleet.infra.terraform.summary import billed, counts, destroyed
from maskfleet.infra.terraform.variables import outputs_declared, required


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan of one root; None for one that cannot be planned yet."""

    root: str
    progress: Progress | None

    @property
    def changes(self) -> bool:
        return self.progress is None or self.progress.has_changes


def plan(session: Session) -> list[Planned]:
    """Plan both roots and say what would happen; the second can be planned only when the first is there."""
    session.give_settings()
    base = _planned(session, session.base)
    if not _is_there(session, base):
        session.view.say(f"{session.addons.name}: planned when {session.base.name} is made, for it needs its outputs")
        return [Planned(session.base.name, base), Planned(session.addons.name, None)]
    _feed(session)
    addons = _planned(session, session.addons)
    return [Planned(session.base.name, base), Planned(session.addons.name, addons)]


def up(session: Session, *, delete_data: bool = False) -> dict[str, Any]:
    """Make or change everything; the outputs of the first root. Begun again, it goes on where it was."""
    session.give_settings()
    base = _planned(session, session.base)
    agreed = False
    if base.has_changes:
        _check_data(session, base, delete_data=delete_data)
        _agree(session, f"apply this to {session.base.name}? What runs in the cluster follows")
        agreed = True
        _apply(session, session.base)
    outputs = _feed(session)
    addons = _planned(session, session.addons)
    if addons.has_changes:
        if not agreed or destroyed(addons):
            _agree(session, f"apply this to {session.addons.name}?")
        _apply(session, session.addons)
    if not base.has_changes and not addons.has_changes:
        session.view.say("nothing to do: everything is as the settings say")
    return outputs


def _is_there(session: Session, base: Progress) -> bool:
    """Whether the cluster exists, stays as it is by the plan `base`, and has the outputs that the second root needs."""
    state = session.base.state()
    cluster = {resource.address for resource in state.resources if session.is_cluster(resource)}
    touched = {change.address for change in destroyed(base)}
    return bool(cluster) and not cluster & touched and not missing_inputs(session, state)


def missing_inputs(session: Session, state: State) -> list[str]:
    """Why the second root cannot be planned: variables without default that are outputs of the first, not there yet."""
    needed = required(session.addons.folder) & outputs_declared(session.base.folder)
    return sorted(needed - set(session.settings) - set(state.outputs))


def show_plan(session: Session, root: Root, progress: Progress) -> None:
    """The plan in a few lines: counts, drift, what is destroyed, what costs money."""
    say = session.view.say
    only_outputs = progress.changed_outputs and not progress.work
    outputs = f", outputs: {', '.join(progress.changed_outputs)}" if only_outputs else ""
    say(f"{root.name}: {counts(progress.work)}{outputs}")
    for change in progress.drift:
        say(f"  changed outside of terraform: {change.address} ({change.action})")
    lost = data_lost(session, progress)
    for change in destroyed(progress):
        data = ", WITH ALL DATA IN IT" if change in lost else ""
        say(f"  {change.action}: {change.address}{f' ({change.reason})' if change.reason else ''}{data}")
    if progress.work:
        lines = billed(root.planned_values())
        if lines:
            say("  billed while it exists:")
            for line in lines:
                say(f"    {line}")
    for warning in progress.warnings:
        say(f"  warning: {warning.summary}")


def _planned(session: Session, root: Root) -> Progress:
    root.init()
    progress = root.plan()
    show_plan(session, root, progress)
    return progress


def _feed(session: Session) -> dict[str, Any]:
    """Give the second root the outputs of the first."""
    state = session.base.state()
    missing = missing_inputs(session, state)
    if missing:
        raise InfraError(
            f"{session.base.name} has no output {', '.join(missing)}, which {session.addons.name} needs",
            remedy="maskfleet infra status says how far it got; maskfleet infra up goes on",
        )
    outputs = {name: output.value for name, output in state.outputs.items()}
    session.give_outputs(outputs)
    return outputs


def _apply(session: Session, root: Root) -> None:
    with recorded(session.work.journal, root.name, "up", root.folder):
        progress = root.apply()
    done = progress.summary
    if done is not None:
        session.view.say(f"{root.name}: {done.add} created, {done.change} changed, {done.remove} destroyed")


def _check_data(session: Session, progress: Progress, *, delete_data: bool) -> None:
    """Refuse a plan that deletes data, as a new deployment type of a file system does, unless that is wanted."""
    lost = [change.address for change in data_lost(session, progress)]
    if lost and not delete_data:
        raise InfraError(
            f"this would delete {', '.join(lost)} with all data in it; nothing was changed",
            remedy="take the change of settings back, or copy the data elsewhere and give --delete-data",
        )


def data_lost(session: Session, progress: Progress) -> list[Change]:
    """What a plan deletes that may hold data; what is only half made (tainted) never held any."""
    return [
        change for change in destroyed(progress) if is_named(change, session.place.data) and change.reason != "tainted"
    ]


def _agree(session: Session, question: str) -> None:
    if not session.view.confirm(question):
        raise InfraError("nothing was changed: not confirmed", remedy="confirm, or give --yes")
