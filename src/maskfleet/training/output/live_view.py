"""The live view of a run in a terminal; without a terminal, the log has the same information."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from maskfleet.evaluation.report.record import score_text
from maskfleet.log import IS_METRICS, console_replaced, duration_text
from maskfleet.training.output.names import (
    DATA_WAIT_S,
    EPOCH,
    IMAGES_PER_S,
    LEARNING_RATE,
    MEMORY_MIB,
    TOTAL_LOSS,
    loss_names,
)

REFRESHES_PER_S = 4
WIDE = 100  # columns; narrower terminals show the facts below the losses instead of beside them
SPARK_WIDTH = 24
SPARKS = "▁▂▃▄▅▆▇█"
RATE_WINDOW_S = 60.0  # the time left is estimated from the speed of the last minute
KINDS = {"box AP": "mAP(bbox)", "mask AP": "mAP(segm)"}


class LiveView:
    """What a run is doing, redrawn a few times per second by a thread while the `with` block runs.

    `enabled` None means: if standard error is a terminal. A disabled view shows nothing.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int,
        *,
        enabled: bool | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        usable = self._console.is_terminal and not self._console.is_dumb_terminal
        self.enabled = usable if enabled is None else enabled
        self._total_steps = total_steps
        self._step = start_step
        self._clock = clock
        self._samples: deque[tuple[float, int]] = deque()  # (time, step) of the last minute
        self._values: dict[str, float] = {}
        self._measured: tuple[float, int] = (math.nan, start_step)  # time and step of the newest metrics
        self._step_s = math.nan  # average time per step before the newest metrics
        self._history: dict[str, list[float]] = {}  # of each loss term
        self._scores: dict[str, float] = {}
        self._best: dict[str, tuple[float, int]] = {}  # AP and step, by kind
        self._saved: tuple[int, float] | None = None  # step and time of the newest checkpoint
        self._doing = ""
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._measured = (self._clock(), self._step)
        self._samples.append(self._measured)
        if self.enabled:
            self._open.enter_context(console_replaced(_AboveDisplay(self._console)))
            self._open.enter_context(
                Live(get_renderable=self.render, console=self._console, refresh_per_second=REFRESHES_PER_S)
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def step(self, step: int) -> None:
        """Step `step` is done; cheap enough to call after every step."""
        self._step = step
        now = self._clock()
        if now - self._samples[-1][0] >= 1.0:
            self._samples.append((now, step))
            while len(self._samples) > 2 and now - self._samples[0][0] > RATE_WINDOW_S:
                self._samples.popleft()

    def metrics(self, values: Mapping[str, float]) -> None:
        """Show what `Metrics.write` returned."""
        since, step = self._measured
        self._measured = (self._clock(), self._step)
        self._step_s = (self._measured[0] - since) / max(self._step - step, 1)
        for name in loss_names(values):
            self._history.setdefault(name, []).append(values[name])
        self._values = dict(values)

    def evaluation(self, scores: Mapping[str, float]) -> None:
        """Show the scores of an evaluation after the current step, by metric name."""
        self._measured = (self._clock(), self._step)  # the next step's time does not include the evaluation
        self._scores = dict(scores)
        for kind, name in KINDS.items():
            ap = scores.get(f"{name}/IoU=0.5:0.95", -1.0)
            if ap > self._best.get(kind, (-1.0, 0))[0]:
                self._best[kind] = (ap, self._step)

    def saved(self, step: int) -> None:
        """A checkpoint of `step` is on the disk."""
        self._saved = (step, self._clock())

    def doing(self, what: str) -> None:
        """Show what happens between two steps, such as an evaluation; pass "" when it is over."""
        self._doing = what

    def render(self) -> RenderableType:
        """The current display."""
        body: list[RenderableType] = [self._progress(), Text()]
        if self._console.width >= WIDE:
            sides = Table.grid(Column(ratio=1), Column(), expand=True, padding=(0, 2))
            sides.add_row(self._losses(), self._facts())
            body.append(sides)
        else:
            body += [self._losses(), Text(), self._facts()]
        return Panel(Group(*body), title=Text("training", "bold"), title_align="left", border_style="cyan")

    def _progress(self) -> RenderableType:
        share = self._step / self._total_steps if self._total_steps else 1.0
        row = Table.grid(Column(ratio=1), Column(justify="right"), expand=True, padding=(0, 1))
        count = f"{self._step:,} / {self._total_steps:,} steps"
        done = Text.assemble((count, "bold"), (f"  {share:.1%}  ", "cyan"), self._time_left())
        row.add_row(ProgressBar(total=max(self._total_steps, 1), completed=self._step), done)
        return row

    def _time_left(self) -> str:
        if self._doing:
            return self._doing
        if self._step >= self._total_steps:
            return "done"
        (start, first), (_, last) = self._samples[0], self._samples[-1]
        if last == first:
            return "measuring speed"
        # Up to now, not to the last sample: if a step takes long, the time left increases instead of freezing.
        steps_per_s = (last - first) / (self._clock() - start)
        return f"{duration_text((self._total_steps - self._step) / steps_per_s)} left"

    def _losses(self) -> RenderableType:
        columns = [Column(justify=justify, no_wrap=True) for justify in ("left", "right", "left", "left")]
        table = Table.grid(*columns, padding=(0, 2))
        if not self._values:
            table.add_row(Text("waiting for the first metrics", "dim"))
        for name in loss_names(self._values):
            history = self._history[name]
            style = "bold" if name == TOTAL_LOSS else ""
            value = Text(f"{self._values[name]:.4f}", style if math.isfinite(self._values[name]) else "bold red")
            table.add_row(Text(name, style), value, Text(sparkline(history, SPARK_WIDTH), "cyan"), trend(history))
        return table

    def _facts(self) -> RenderableType:
        table = Table.grid(Column(style="dim", no_wrap=True), Column(no_wrap=True), padding=(0, 2))
        for name, text in self._speed_facts() + self._score_facts():
            table.add_row(name, text)
        if self._saved is not None:
            step, saved_at = self._saved
            table.add_row("checkpoint", f"step {step:,}, {duration_text(self._clock() - saved_at)} ago")
        return table

    def _speed_facts(self) -> list[tuple[str, Text]]:
        values = self._values
        facts = []
        if EPOCH in values:
            facts.append(("epoch", Text(f"{values[EPOCH]:g}")))
        if LEARNING_RATE in values:
            facts.append(("learning rate", Text(f"{values[LEARNING_RATE]:.3g}")))
        if IMAGES_PER_S in values:
            facts.append(("speed", Text(f"{values[IMAGES_PER_S]:.1f} images/s")))
        if DATA_WAIT_S in values and self._step_s > 0:
            share = min(values[DATA_WAIT_S] / self._step_s, 1.0)
            facts.append(("waiting for data", Text(f"{share:.0%}", "yellow" if share > 0.1 else "")))
        if MEMORY_MIB in values:
            facts.append(("memory", Text(_memory_text(values[MEMORY_MIB]))))
        return facts

    def _score_facts(self) -> list[tuple[str, Text]]:
        facts = []
        for kind, name in KINDS.items():
            ap = self._scores.get(f"{name}/IoU=0.5:0.95")
            if ap is not None:
                best, step = self._best.get(kind, (ap, self._step))
                text = Text.assemble((score_text(ap), "bold"), f"  best {score_text(best)} at step {step:,}")
                facts.append((kind, text))
            ap50 = self._scores.get(f"{name}/IoU=0.5")
            if ap50 is not None:
                facts.append((f"{kind}50", Text(score_text(ap50))))
        return facts


class _AboveDisplay(logging.Handler):
    """Prints log records above the display, except metric lines, whose content the display shows."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, IS_METRICS, False):
            return
        style = "bold red" if record.levelno >= logging.ERROR else "yellow" if record.levelno >= logging.WARNING else ""
        stamp = time.strftime("%H:%M:%S ", time.localtime(record.created))
        self._console.print(Text.assemble((stamp, "dim"), (self.format(record), style)))


def sparkline(values: Sequence[float], width: int) -> str:
    """`values` as at most `width` bars, each the mean of consecutive values, scaled from lowest to highest."""
    finite = [value for value in values if math.isfinite(value)]
    columns = min(width, len(finite))
    if columns == 0:
        return ""
    edges = [round(column * len(finite) / columns) for column in range(columns + 1)]
    means = [sum(finite[start:stop]) / (stop - start) for start, stop in pairwise(edges)]
    low, high = min(means), max(means)
    if high <= low:
        return SPARKS[0] * columns
    return "".join(SPARKS[min(int((mean - low) / (high - low) * len(SPARKS)), len(SPARKS) - 1)] for mean in means)


def trend(values: Sequence[float]) -> Text:
    """Whether the last tenth of `values` is below, above or within 1% of the tenth before."""
    length = max(len(values) // 10, 1)
    if len(values) < 2 * length:
        return Text()
    last, before = sum(values[-length:]), sum(values[-2 * length : -length])
    if not math.isfinite(last - before) or abs(last - before) <= 0.01 * abs(before):
        return Text("→", "dim")
    return Text("↓", "green") if last < before else Text("↑", "yellow")


def _memory_text(mib: float) -> str:
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.0f} MiB"
