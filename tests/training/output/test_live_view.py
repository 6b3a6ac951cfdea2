from __future__ import annotations

import io
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from maskfleet.log import close_logging, log_metrics, logger, setup_logging
from maskfleet.training.output.live_view import LiveView, sparkline, trend
from maskfleet.training.output.metrics import Metrics
from maskfleet.training.output.sinks import MetricLog

VALUES = {
    "epoch": 2,
    "learning_rate": 0.02,
    "images_per_s": 38.25,
    "data_wait_s": 0.02,  # of steps that take 0.2 s
    "memory_mib": 14540.8,
    "total_cost": 1.25,
    "rpn_losses/label_loss": 0.5,
    "rpn_losses/level2/label_loss": 0.125,
    "maskrcnn_loss/maskrcnn_loss": math.nan,
}
SCORES = {
    "mAP(bbox)/IoU=0.5:0.95": 0.377,
    "mAP(bbox)/IoU=0.5": 0.59,
    "mAP(segm)/IoU=0.5:0.95": -1.0,
    "mAP(segm)/IoU=0.5": -1.0,
}


@pytest.fixture(autouse=True)
def quiet_afterwards() -> Iterator[None]:
    yield
    close_logging()


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def terminal(width: int = 120) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=40, highlight=False, _environ={})


def screen(view: LiveView, width: int = 120) -> str:
    """The display as plain text."""
    paper = Console(file=io.StringIO(), width=width, highlight=False, color_system=None, _environ={})
    paper.print(view.render())
    return paper.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [80, 120])
def test_the_display_shows_all_that_a_run_measures(width: int) -> None:
    clock = Clock()
    with LiveView(1000, 100, enabled=False, console=terminal(width), clock=clock) as view:
        clock.now_s += 20
        view.step(200)
        view.metrics(VALUES)
        view.saved(180)
        view.evaluation(SCORES)
        clock.now_s += 5
        text = screen(view, width)
    assert max(len(line) for line in text.splitlines()) <= width
    for words in (
        "200 / 1,000 steps  20.0%",
        "total_cost",
        "1.2500",
        "rpn_losses/label_loss",
        "38.2 images/s",
        "14.2 GiB",
        "step 180, 5.0 s ago",
        "37.7  best 37.7 at step 200",
        "59.0",
    ):
        assert words in text
    assert "level2" not in text
    assert [line.split("waiting for data")[1].split()[0] for line in text.splitlines() if "waiting" in line] == ["10%"]
    assert any("maskrcnn_loss/maskrcnn_loss" in line and "nan" in line for line in text.splitlines())
    assert any("mask AP " in line and "–" in line for line in text.splitlines())


def test_the_time_left_goes_by_the_speed_of_the_last_minute() -> None:
    clock = Clock()
    with LiveView(10_000, 0, enabled=False, console=terminal(), clock=clock) as view:
        assert "measuring speed" in screen(view)
        for step in range(1, 101):  # slow at first: 10 s a step
            clock.now_s += 10
            view.step(step)
        assert "1 d 03 h left" in screen(view)  # 9,900 steps of 10 s
        for step in range(101, 301):  # then 1 s a step
            clock.now_s += 1
            view.step(step)
        assert "2 h 41 min left" in screen(view)  # 9,700 steps of 1 s
        clock.now_s += 60  # stuck: the estimate doubles
        assert "5 h 23 min left" in screen(view)
        view.doing("evaluating")
        assert "evaluating" in screen(view)
        view.doing("")
        view.step(10_000)
        assert "done" in screen(view)


def test_the_best_ap_stays_when_a_later_one_is_worse() -> None:
    with LiveView(100, 0, enabled=False, console=terminal()) as view:
        for step, ap in ((10, 0.2), (20, 0.4), (30, 0.3)):
            view.step(step)
            view.evaluation({"mAP(bbox)/IoU=0.5:0.95": ap})
        assert "30.0  best 40.0 at step 20" in screen(view)
        view.step(40)
        view.evaluation({"mAP(bbox)/IoU=0.5:0.95": 0.5})
        assert "50.0  best 50.0 at step 40" in screen(view)


def test_an_evaluation_does_not_count_as_a_slow_step() -> None:
    clock = Clock()
    with LiveView(100, 0, enabled=False, console=terminal(), clock=clock) as view:
        clock.now_s += 500
        view.evaluation(SCORES)
        clock.now_s += 10
        view.step(10)
        view.metrics({"data_wait_s": 0.5})
        assert "waiting for data  50%" in screen(view)


def test_a_view_of_a_run_without_measurements_can_be_drawn() -> None:
    with LiveView(0, 0, enabled=False, console=terminal(), clock=Clock()) as view:
        assert "0 / 0 steps  100.0%  done" in screen(view)


def test_messages_scroll_above_the_display_and_metric_lines_do_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging(tmp_path, 0)
    console = terminal()
    with LiveView(10, 0, enabled=True, console=console):
        logger.info("hello [bold]world[/]")
        logger.warning("careful")
        log_metrics({"total_cost": 77.0})
    logger.info("afterwards")
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "hello [bold]world[/]" in shown
    assert "careful" in shown
    assert "steps" in shown
    assert "77.0" not in shown
    assert "afterwards" not in shown
    assert "afterwards" in (errors := capsys.readouterr().err)
    assert "hello" not in errors
    assert "total_cost: 77.0" in (tmp_path / "log.txt").read_text()


def test_without_a_terminal_messages_and_metrics_are_plain_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging(tmp_path, 0)
    console = Console(file=io.StringIO(), _environ={})
    with LiveView(10, 0, console=console) as view:
        assert not view.enabled
        view.step(1)
        logger.info("hello")
        host = {"learning_rate": 0.1, "images_per_s": 1.0, "data_wait_s": 0.0, "memory_mib": 1.0}
        view.metrics(Metrics([MetricLog()]).write(1, epoch=1, host=host, extra={"a": 2.0}))
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]
    shown = capsys.readouterr()
    assert shown.err.endswith(" hello\n")
    assert shown.out.rstrip().endswith(
        " step: 1  epoch: 1  learning_rate: 0.1  images_per_s: 1.0  data_wait_s: 0.0  memory_mib: 1.0  a: 2.0"
    )


def test_a_terminal_turns_the_display_on_and_a_dumb_one_does_not() -> None:
    assert LiveView(1, 0, console=terminal()).enabled
    dumb = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    assert not LiveView(1, 0, console=dumb).enabled


def test_the_display_goes_away_when_the_run_fails(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(None, 0)
    with pytest.raises(ValueError, match="boom"), LiveView(10, 0, enabled=True, console=terminal()):
        raise ValueError("boom")
    logger.info("still heard")
    assert "still heard" in capsys.readouterr().err


def test_a_sparkline_goes_from_the_lowest_to_the_highest_mean() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 2, 14, 16], 2) == "▁█"
    assert sparkline([5, 5, 5], 10) == "▁▁▁"
    assert sparkline([math.nan, 1, math.inf, 2], 10) == "▁█"
    assert sparkline([], 10) == ""
    assert len(sparkline(list(range(1000)), 24)) == 24


def test_a_trend_compares_the_last_tenth_with_the_one_before() -> None:
    assert str(trend([1.0])) == ""
    assert str(trend([2.0, 1.0])) == "↓"
    assert str(trend([1.0, 2.0])) == "↑"
    assert str(trend([1.0, 1.005])) == "→"
    assert str(trend([9.0] * 16 + [2.0, 2.0] + [1.0, 2.0])) == "↓"
    assert str(trend([1.0, math.nan])) == "→"
