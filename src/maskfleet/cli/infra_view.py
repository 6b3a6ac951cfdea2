"""What `maskfleet infra` shows while its tool works: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from maskfleet.cli.console import err
from maskfleet.errors import MaskfleetError
from maskfleet.infra.view import InfraProgress, ProgressEvent

LINE_EVERY_S = 60.0
STYLES = {"failed": "bold red", "running": "cyan", "done": "green", "planned": "dim"}  # in the order of the table
STOPPING = "stopping: terraform finishes the operations it has started and saves its state"
STILL_STOPPING = "still stopping; killing terraform would lose the state of what it is creating now"


class TerminalView:
    """The user at the command line; everything goes to standard error, which leaves standard output to results."""

    def __init__(self, *, yes: bool = False, console: Console = err) -> None:
        self._yes = yes
        self._console = console
        self._live: Live | None = None
        self._title = ""
        self._began = 0.0
        self._said: dict[str, float] = {}

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    @contextmanager
    def watching(self, title: str, progress: InfraProgress) -> Iterator[None]:
        self._title, self._began, self._said = title, time.monotonic(), {}
        if not self._console.is_terminal:
            yield
            return
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            self._live = live
            try:
                yield
            finally:
                self._live = None
        self._console.print(Text(f"{title}: {headline(progress, time.monotonic() - self._began)}", style="dim"))

    def event(self, event: ProgressEvent, progress: InfraProgress) -> None:
        if self._live is None and (line := self._line(event, progress)):
            self.say(line)

    def tick(self, progress: InfraProgress) -> None:
        if self._live is not None:
            now = time.monotonic()
            self._live.update(
                live_table(self._title, progress, now, now - self._began, self._console.height), refresh=True
            )

    def stopping(self, times: int) -> None:
        self.say(STOPPING if times == 1 else STILL_STOPPING)

    def confirm(self, question: str) -> bool:
        return self._yes or self._answer(f"{question} [y/N] ").lower() in ("y", "yes")

    def confirm_name(self, question: str, name: str) -> bool:
        return self._yes or self._answer(f"{question} ({name}): ") == name

    def _answer(self, question: str) -> str:
        if not sys.stdin.isatty():
            raise MaskfleetError("there is nobody to ask: standard input is not a terminal", remedy="give --yes")
        self._console.print(question, markup=False, end="")
        return sys.stdin.readline().strip()

    def _line(self, event: ProgressEvent, progress: InfraProgress) -> str | None:
        """The line that a log shows about `event`, if any."""
        if event.action == "read":
            return None
        now, elapsed = time.monotonic(), clock(event.elapsed_s or 0)
        what = f"{event.address}: {event.action}"
        match event.kind:
            case "planned_change" if event.action != "none" and not self._title.endswith("apply"):
                return f"{event.address}: to {event.action}"
            case "apply_start":
                self._said[event.address] = now
                return f"{what} started"
            case "apply_progress" if now - self._said.get(event.address, now) >= LINE_EVERY_S:
                self._said[event.address] = now
                return f"{what} still running, {elapsed}"
            case "apply_complete":
                return f"{what} done after {elapsed} ({progress.completed}/{progress.steps})"
            case "apply_errored":
                return f"{what} failed after {elapsed}"
        return None


def headline(progress: InfraProgress, elapsed_s: float) -> str:
    """Counts and time in one line."""
    parts = [f"{progress.completed}/{progress.steps} done"] if progress.steps else [f"{progress.read} read"]
    parts += [f"{len(rows)} {state}" for state in ("running", "failed") if (rows := progress.in_state(state))]
    return f"{', '.join(parts)}, {clock(elapsed_s)}"


def live_table(title: str, progress: InfraProgress, now: float, elapsed_s: float, height: int) -> Group:
    """The table at time `now`: failed and running resources first, as many rows as fit."""
    table = Table(box=None, pad_edge=False)
    for column in ("resource", "action", "state"):
        table.add_column(column, no_wrap=True, overflow="ellipsis")
    table.add_column("elapsed", justify="right")
    rows = [row for state in STYLES for row in progress.in_state(state)]
    shown = rows[: max(3, height - 4)]
    for row in shown:
        seconds = row.seconds(now)
        elapsed = "" if seconds is None else clock(seconds)
        table.add_row(row.address, row.action, Text(row.state, style=STYLES[row.state]), elapsed)
    head = Text(f"{title}: {headline(progress, elapsed_s)}", style="bold")
    hidden = [Text(f"and {len(rows) - len(shown)} more", style="dim")] if len(rows) > len(shown) else []
    return Group(head, table, *hidden)


def clock(seconds: float) -> str:
    """Such as 42s or 12m03s."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
