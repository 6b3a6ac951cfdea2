"""The logger of a run, and the format of metric lines, from which SageMaker's regular expressions are derived."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from maskfleet.errors import MaskfleetError, TrainingError

logger = logging.getLogger("maskfleet")

FABRIC_MARK = "fabric: "  # before each line of JSON that a fabric test prints
BETWEEN = "  "  # between two `name: value` pairs of a metric line
_AP_VALUES = ("IoU=0.5", "IoU=0.5:0.95", "IoU=0.75", "large", "medium", "small")
_TENSORPACK_NAMES = (
    "fastrcnn_losses/box_loss",
    "fastrcnn_losses/label_loss",
    "fastrcnn_losses/label_metrics/accuracy",
    "fastrcnn_losses/label_metrics/false_negative",
    "fastrcnn_losses/label_metrics/fg_accuracy",
    "fastrcnn_losses/num_fg_label",
    "maskrcnn_loss/accuracy",
    "maskrcnn_loss/fg_pixel_ratio",
    "maskrcnn_loss/maskrcnn_loss",
    "maskrcnn_loss/pos_accuracy",
    *(f"mAP({kind})/{value}" for kind in ("bbox", "segm") for value in _AP_VALUES),
)


def metric_pattern(name: str) -> str:
    """A regular expression that finds `name` in a metric line, but no name that contains it; group 1 is the value.

    The space after the colon excludes `IoU=0.5:0.95` for `IoU=0.5`; the one before the name excludes prefixed names.
    """
    return rf"(?:^|\s){re.escape(name)}: (\S+)"


# The metrics that AWS's SageMaker notebooks define, with a regular expression for each.
SAGEMAKER_METRICS: tuple[tuple[str, str], ...] = tuple((name, metric_pattern(name)) for name in _TENSORPACK_NAMES)


def number_text(value: float) -> str:
    """A number as in metric lines and metrics.jsonl: the shortest text that reads back as `value`."""
    return repr(value) if isinstance(value, int) else repr(float(value))


def count_text(count: int, noun: str, plural: str | None = None) -> str:
    """A count for people: `1 warning`, `1,200 warnings`; `plural` is for nouns that do not take an s."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def duration_text(seconds: float) -> str:
    """A duration for people: `8.3 s`, `4 min 05 s`, `3 h 12 min`, `2 d 03 h`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02d} h"
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def metric_line(values: Mapping[str, float], *, prefix: str = "") -> str:
    """All of `values` as `name: value` pairs on one line, after `prefix`.

    The pairs keep their order, except that a name comes after those that contain it. Users' greedy patterns such as
    `.*IoU=0\\.5:\\s*(\\S+).*` match the last occurrence in a line, and so find the right one.
    """
    names = _containers_first(list(values))
    for name in names:
        assert not re.search(r"\s", name), f"a metric's name has no whitespace: {name!r}"
        # Without AP50 on the same line, a greedy pattern for AP50 would match AP.
        assert not name.endswith("IoU=0.5:0.95") or name.removesuffix(":0.95") in values, f"{name} needs AP50 beside it"
    return prefix + BETWEEN.join(f"{name}: {number_text(values[name])}" for name in names)


def _containers_first(names: list[str]) -> list[str]:
    """`names`, each after all names whose text, up to the colon that follows it, contains it."""
    ordered: list[str] = []
    remaining = list(names)
    while remaining:
        name = next(one for one in remaining if not any(f"{one}:" in f"{other}:" for other in {*remaining} - {one}))
        remaining.remove(name)
        ordered.append(name)
    return ordered


def setup_logging(run_dir: Path | None, rank: int, *, level: int = logging.INFO) -> logging.Logger:
    """Configure the logger of this rank, replacing any earlier configuration.

    Rank 0 logs metrics to standard output, messages to standard error, and both to RUN_DIR/log.txt; the others log to
    RUN_DIR/log-rankN.txt, and to standard error only from WARNING up. A resumed run appends to the same files.
    """
    close_logging()
    logger.setLevel(level)
    logger.propagate = False
    logger.addHandler(_console(rank))
    if rank == 0:
        logger.addHandler(_metrics_output())
    if run_dir is not None:
        logger.addHandler(_file(run_dir / ("log.txt" if rank == 0 else f"log-rank{rank}.txt")))
    return logger


def close_logging() -> None:
    """Undo `setup_logging`: close the files and restore the default logger."""
    for handler in list(logger.handlers):
        if handler.name in (_CONSOLE, _METRICS, _FILE):
            logger.removeHandler(handler)
            handler.close()
    logger.propagate = True


@contextmanager
def errors_in_file() -> Iterator[None]:
    """Log the error that ends the block, only in the file: the command line prints it too."""
    try:
        yield
    except MaskfleetError as error:
        logger.error("%s", error, extra={IN_FILE_ONLY: True})
        raise
    except Exception:
        logger.exception("the run failed", extra={IN_FILE_ONLY: True})
        raise


@contextmanager
def console_replaced(by: logging.Handler) -> Iterator[None]:
    """Send to `by` what would go to the terminal, while a live display owns it.

    Metrics still go to standard output if that is a file or a pipe.
    """
    replaced = (_CONSOLE, _METRICS) if sys.stdout.isatty() else (_CONSOLE,)
    consoles = [handler for handler in logger.handlers if handler.name in replaced]
    for console in consoles:
        logger.removeHandler(console)
    logger.addHandler(by)
    try:
        yield
    finally:
        logger.removeHandler(by)
        for console in consoles:
            logger.addHandler(console)


def log_metrics(values: Mapping[str, float], *, prefix: str = "") -> None:
    """Log the metric line of `values`."""
    log_line(metric_line(values, prefix=prefix))


def log_line(line: str) -> None:
    """Log a line of metrics, marked so that a live display, which shows them itself, leaves it out."""
    logger.info("%s", line, extra={IS_METRICS: True})


# Attributes of log records: metric lines, and messages that are not for the terminal.
IS_METRICS, IN_FILE_ONLY = "is_metrics", "in_file_only"
_CONSOLE, _METRICS, _FILE = "maskfleet console", "maskfleet metrics", "maskfleet file"


class _StampedLines(logging.Formatter):
    """A time stamp before every line of a message, so that log files can be sorted, merged and split anywhere."""

    def __init__(self, *, short: bool, sender: str = "") -> None:
        super().__init__()
        self._short = short
        self._sender = sender

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created).astimezone()
        stamp = f"{moment:%H:%M:%S}" if self._short else moment.isoformat(timespec="milliseconds")
        plain = self._short and record.levelno == logging.INFO
        start = f"{stamp} {self._sender}" if plain else f"{stamp} {self._sender}{record.levelname} "
        return "\n".join(start + line for line in super().format(record).splitlines() or [""])


def _console(rank: int) -> logging.Handler:
    console = logging.StreamHandler(sys.stderr)
    console.set_name(_CONSOLE)
    console.setFormatter(_StampedLines(short=True, sender=f"[rank {rank}] " if rank else ""))
    console.addFilter(lambda record: not _is_metrics(record) and not getattr(record, IN_FILE_ONLY, False))
    if rank:
        console.setLevel(logging.WARNING)
    return console


def _metrics_output() -> logging.Handler:
    output = logging.StreamHandler(sys.stdout)
    output.set_name(_METRICS)
    output.setFormatter(_StampedLines(short=True))
    output.addFilter(_is_metrics)
    return output


def _is_metrics(record: logging.LogRecord) -> bool:
    return bool(getattr(record, IS_METRICS, False))


class _LogFile(logging.FileHandler):
    """A log that cannot be written, on a full disk, costs one warning and not the run."""

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self._warn(error)
        else:
            super().handleError(record)

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:  # its last lines are lost
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            logger.warning("cannot write the log %s: %s", self.baseFilename, error.strerror)


def _file(path: Path) -> logging.Handler:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _LogFile(path, mode="a", encoding="utf-8")
    except OSError as error:
        raise TrainingError(
            f"cannot write the log {path}: {error.strerror}", remedy="choose a run directory with write access"
        ) from error
    file.set_name(_FILE)
    file.setFormatter(_StampedLines(short=False))
    return file
