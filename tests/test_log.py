from __future__ import annotations

import json
import logging
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskfleet.errors import TrainingError
from maskfleet.log import (
    SAGEMAKER_METRICS,
    close_logging,
    console_replaced,
    duration_text,
    errors_in_file,
    log_metrics,
    logger,
    metric_line,
    number_text,
    setup_logging,
)

# What users of the old SageMaker notebooks have in their estimators, letter for letter.
GREEDY = {
    "fastrcnn_losses/box_loss": r".*fastrcnn_losses/box_loss:\s*(\S+).*",
    "fastrcnn_losses/label_loss": r".*fastrcnn_losses/label_loss:\s*(\S+).*",
    "fastrcnn_losses/label_metrics/accuracy": r".*fastrcnn_losses/label_metrics/accuracy:\s*(\S+).*",
    "fastrcnn_losses/label_metrics/false_negative": r".*fastrcnn_losses/label_metrics/false_negative:\s*(\S+).*",
    "fastrcnn_losses/label_metrics/fg_accuracy": r".*fastrcnn_losses/label_metrics/fg_accuracy:\s*(\S+).*",
    "fastrcnn_losses/num_fg_label": r".*fastrcnn_losses/num_fg_label:\s*(\S+).*",
    "maskrcnn_loss/accuracy": r".*maskrcnn_loss/accuracy:\s*(\S+).*",
    "maskrcnn_loss/fg_pixel_ratio": r".*maskrcnn_loss/fg_pixel_ratio:\s*(\S+).*",
    "maskrcnn_loss/maskrcnn_loss": r".*maskrcnn_loss/maskrcnn_loss:\s*(\S+).*",
    "maskrcnn_loss/pos_accuracy": r".*maskrcnn_loss/pos_accuracy:\s*(\S+).*",
    "mAP(bbox)/IoU=0.5": r".*mAP\(bbox\)/IoU=0\.5:\s*(\S+).*",
    "mAP(bbox)/IoU=0.5:0.95": r".*mAP\(bbox\)/IoU=0\.5:0\.95:\s*(\S+).*",
    "mAP(bbox)/IoU=0.75": r".*mAP\(bbox\)/IoU=0\.75:\s*(\S+).*",
    "mAP(bbox)/large": r".*mAP\(bbox\)/large:\s*(\S+).*",
    "mAP(bbox)/medium": r".*mAP\(bbox\)/medium:\s*(\S+).*",
    "mAP(bbox)/small": r".*mAP\(bbox\)/small:\s*(\S+).*",
    "mAP(segm)/IoU=0.5": r".*mAP\(segm\)/IoU=0\.5:\s*(\S+).*",
    "mAP(segm)/IoU=0.5:0.95": r".*mAP\(segm\)/IoU=0\.5:0\.95:\s*(\S+).*",
    "mAP(segm)/IoU=0.75": r".*mAP\(segm\)/IoU=0\.75:\s*(\S+).*",
    "mAP(segm)/large": r".*mAP\(segm\)/large:\s*(\S+).*",
    "mAP(segm)/medium": r".*mAP\(segm\)/medium:\s*(\S+).*",
    "mAP(segm)/small": r".*mAP\(segm\)/small:\s*(\S+).*",
}
GOLDENS = Path(__file__).parent / "goldens"
AP_NAMES = [name for name in GREEDY if name.startswith("mAP")]


@pytest.fixture(autouse=True)
def quiet_afterwards() -> Iterator[None]:
    yield
    close_logging()


def assert_all_patterns_read(line: str, values: dict[str, float]) -> None:
    for name, exact in SAGEMAKER_METRICS:
        for pattern in (GREEDY[name], exact):
            found = re.search(pattern, line)
            if name in values:
                assert found is not None, (name, pattern)
                assert float(found[1]) == values[name], (name, pattern)
        if name not in values:
            assert re.search(exact, line) is None
        if name in values:
            assert float(re.match(GREEDY[name], line)[1]) == values[name]


def test_the_22_names_are_the_old_ones() -> None:
    assert [name for name, _ in SAGEMAKER_METRICS] == list(GREEDY)
    assert len(GREEDY) == 22


@pytest.mark.parametrize("kind", ["c4_mask", "fpn_mask", "fpn_cascade_mask"])
@pytest.mark.parametrize("backwards", [False, True])
def test_every_pattern_reads_a_real_training_line(kind: str, backwards: bool) -> None:
    names = json.loads((GOLDENS / f"summaries_{kind}.json").read_text())
    values = {name: 1.0 / (place + 3) for place, name in enumerate(reversed(names) if backwards else names)}
    line = metric_line(values, prefix="2026-11-15T11:36:48.000+00:00 INFO step 20/90000  epoch 1  ")
    assert_all_patterns_read(line, values)
    assert "\n" not in line


def test_every_pattern_reads_an_evaluation_line_in_any_order() -> None:
    values = {name: (place + 1) / 13 for place, name in enumerate(AP_NAMES)}
    for order in (AP_NAMES, AP_NAMES[::-1], sorted(AP_NAMES), sorted(AP_NAMES, key=len)):
        line = metric_line({name: values[name] for name in order}, prefix="step 7330  ")
        assert_all_patterns_read(line, values)


def test_ap50_never_reads_ap_of_all_thresholds() -> None:
    values = {"mAP(bbox)/IoU=0.5": 0.6, "mAP(bbox)/IoU=0.5:0.95": 0.4}
    line = metric_line(values)
    assert line == "mAP(bbox)/IoU=0.5:0.95: 0.4  mAP(bbox)/IoU=0.5: 0.6"
    exact = dict(SAGEMAKER_METRICS)["mAP(bbox)/IoU=0.5"]
    assert re.findall(exact, line) == ["0.6"]
    assert re.search(exact, "mAP(bbox)/IoU=0.5:0.95: 0.4") is None


def test_a_line_with_ap_but_without_ap50_is_refused() -> None:
    with pytest.raises(AssertionError, match="AP50"):
        metric_line({"mAP(segm)/IoU=0.5:0.95": 0.4})


def test_training_and_evaluation_on_one_line_with_other_sets_before() -> None:
    values = {name: place / 29 for place, name in enumerate(GREEDY)}
    others = {f"second-{name}": 9.0 for name in GREEDY}
    line = metric_line({**values, **others})
    assert_all_patterns_read(line, values)


def test_values_keep_their_order_where_nothing_can_be_confused() -> None:
    assert metric_line({"b": 1, "a": 0.5, "c": 1e-5}, prefix="step 1  ") == "step 1  b: 1  a: 0.5  c: 1e-05"


def test_a_name_with_a_blank_is_refused() -> None:
    with pytest.raises(AssertionError, match="whitespace"):
        metric_line({"two words": 1.0})


@given(st.floats(allow_nan=False))
def test_the_text_of_a_number_reads_back_as_the_number(value: float) -> None:
    assert float(number_text(value)) == value
    assert float(re.search(r"x: (\S+)", metric_line({"x": value}))[1]) == value


def test_numbers_that_are_not_finite_have_a_text_that_reads_back() -> None:
    assert math.isnan(float(number_text(math.nan)))
    assert float(number_text(-math.inf)) == -math.inf
    assert number_text(3) == "3"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (8.26, "8.3 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (245, "4 min 05 s"),
        (3599.6, "1 h 00 min"),
        (11_530, "3 h 12 min"),
        (86_400 * 2 + 3 * 3600 + 59, "2 d 03 h"),
    ],
)
def test_durations_read_as_people_say_them(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_rank_0_speaks_on_stderr_and_in_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(tmp_path, 0)
    logger.info("first\nsecond")
    logger.warning("mind this")
    logger.debug("unheard")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.fullmatch(r"\d\d:\d\d:\d\d first\n\d\d:\d\d:\d\d second\n\d\d:\d\d:\d\d WARNING mind this\n", shown.err)
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == ["INFO first", "INFO second", "WARNING mind this"]
    assert all(datetime.fromisoformat(line.split(" ", 1)[0]).tzinfo is not None for line in lines)


def test_other_ranks_speak_in_their_file_and_warn_by_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(tmp_path, 3)
    logger.info("detail")
    logger.error("trouble")
    assert re.fullmatch(r"\d\d:\d\d:\d\d \[rank 3\] ERROR trouble\n", capsys.readouterr().err)
    assert [line.split(" ", 1)[1] for line in (tmp_path / "log-rank3.txt").read_text().splitlines()] == [
        "INFO detail",
        "ERROR trouble",
    ]
    assert not (tmp_path / "log.txt").exists()


def test_setting_up_again_appends_and_does_not_double_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(tmp_path, 0)
    logger.info("one")
    setup_logging(tmp_path, 0)
    logger.info("two")
    assert [line.split()[-1] for line in (tmp_path / "log.txt").read_text().splitlines()] == ["one", "two"]
    assert capsys.readouterr().err.count("two") == 1


def test_without_a_run_directory_only_stderr_hears(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(None, 0)
    logger.info("hello")
    assert capsys.readouterr().err.endswith(" hello\n")


@pytest.mark.parametrize(
    ("error", "logged"),
    [
        (TrainingError("no GPU", remedy="find one"), ["ERROR no GPU", "ERROR   → find one"]),
        (ValueError("seven"), ["ERROR ValueError: seven"]),
    ],
)
def test_the_error_that_ends_a_run_is_in_its_file_and_not_twice_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: Exception, logged: list[str]
) -> None:
    setup_logging(tmp_path, 0)
    with pytest.raises(type(error)), errors_in_file():
        raise error
    lines = [line.split(" ", 1)[1] for line in (tmp_path / "log.txt").read_text().splitlines()]
    assert lines[-len(logged) :] == logged
    assert capsys.readouterr().err == ""


def test_a_full_disk_costs_the_log_and_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.txt").symlink_to("/dev/full")
    setup_logging(tmp_path, 0)
    for line in ("one", "two"):
        logger.info(line)
    close_logging()
    shown = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 1)[1] for line in shown] == [
        "one",
        f"WARNING cannot write the log {tmp_path}/log.txt: No space left on device",
        "two",
    ]


def test_a_log_that_cannot_be_written_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match="cannot write the log") as caught:
        setup_logging(tmp_path / "file", 0)
    assert "run directory" in caught.value.remedy


def test_a_display_takes_the_place_of_stderr_and_gives_it_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[logging.LogRecord] = []
    display = logging.Handler()
    display.emit = seen.append  # type: ignore[method-assign]
    setup_logging(tmp_path, 0)
    with console_replaced(display):
        logger.info("inside")
        log_metrics({"a": 1.0}, prefix="step 1  ")
    logger.info("outside")
    assert [(record.getMessage(), getattr(record, "is_metrics", False)) for record in seen] == [
        ("inside", False),
        ("step 1  a: 1.0", True),
    ]
    shown = capsys.readouterr()
    assert "inside" not in shown.err
    assert "outside" in shown.err
    assert shown.out.endswith(" step 1  a: 1.0\n"), "standard output is no terminal, so it still gets the metrics"
    assert [line.split(" ", 2)[2] for line in (tmp_path / "log.txt").read_text().splitlines()] == [
        "inside",
        "step 1  a: 1.0",
        "outside",
    ]


def test_logging_needs_no_torch() -> None:
    code = "import sys, maskfleet.log; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
