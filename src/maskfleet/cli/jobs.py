"""`maskfleet status`, `logs`, `explain` and `cancel`: they need only the handle."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from maskfleet.cli.console import out, print_raw
from maskfleet.cli.options import JsonOption

HandleArgument = Annotated[str, typer.Argument(help="What `maskfleet launch` printed.", show_default=False)]


def status(handle: HandleArgument, as_json: JsonOption = False) -> None:
    """The status of a job: state, step, restarts, hosts and events."""
    from maskfleet.launch.backend import backend_of, parse_handle
    from maskfleet.launch.job import JobState

    parsed = parse_handle(handle)
    found = backend_of(parsed).status(parsed)
    if as_json:
        print_raw(json.dumps(found.as_json(), indent=2, ensure_ascii=False))
    else:
        age = f", {found.step_age_s:.0f} s ago" if found.step_age_s is not None else ""
        step = f" at step {found.step}{age}" if found.step is not None else ""
        restarts = f", {found.restarts} restarts" if found.restarts else ""
        detail = f": {found.detail}" if found.detail else ""
        out.print(f"{found.state}{step}{restarts}{detail}", markup=False)
        for host in found.hosts:
            out.print(f"  {host.address}  {host.state}  {host.detail}".rstrip(), markup=False)
        for event in found.events:
            out.print(f"  {event}", markup=False)
        if found.persist:
            out.print(f"after a reboot it continues by {found.persist}", markup=False)
        if found.failures:
            lost_s = sum(failure.lost_s for failure in found.failures)
            plural = "s" if len(found.failures) > 1 else ""
            out.print(f"{lost_s:.0f} s were lost to {len(found.failures)} interruption{plural}:", markup=False)
            for failure in found.failures:
                out.print(f"  {failure}", markup=False)
    raise typer.Exit(1 if found.state in (JobState.FAILED, JobState.LOST, JobState.UNKNOWN) else 0)


def logs(
    handle: HandleArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log until the run ends.")] = False,
    rank: Annotated[int | None, typer.Option(min=0, help="Only the lines of this rank.", show_default=False)] = None,
) -> None:
    """The log of all ranks of a job, from its beginning."""
    from maskfleet.launch.backend import backend_of, parse_handle

    parsed = parse_handle(handle)
    for line in backend_of(parsed).logs(parsed, follow=follow, rank=rank):
        print_raw(line)


def explain(handle: HandleArgument) -> None:
    """Why a job failed or waits: the first failing rank, the cause and the next step."""
    from maskfleet.launch.backend import backend_of, parse_handle

    parsed = parse_handle(handle)
    out.print(backend_of(parsed).explain(parsed), markup=False)


def cancel(handle: HandleArgument) -> None:
    """Stop a job after it has saved a checkpoint. Cancelling a finished job does nothing."""
    from maskfleet.launch.backend import backend_of, parse_handle
    from maskfleet.launch.job import JobState

    parsed = parse_handle(handle)
    backend = backend_of(parsed)
    backend.cancel(parsed)
    found = backend.status(parsed)
    match found.state:
        case JobState.UNKNOWN:
            message = f"nothing to cancel: {found.detail}"
        case JobState.DONE | JobState.FAILED | JobState.LOST:
            message = f"nothing to cancel: it is {found.state}"
        case _:
            message = "cancelled"
    out.print(message, markup=False)
