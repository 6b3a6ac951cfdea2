"""The logger of a run, and the one format of a metric line, which SageMaker's regular expressions are derived from."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from maskfleet.errors import TrainingError

logger = logging.getLogger("maskfleet")

BETWEEN = "  "  # between two `name: value` pairs of a metric line
_AP_VALUES = ("IoU=0.5", "IoU=0.5:0.95", "IoU=0.75", "large", "medium", "small")
_SEED_NAMES = (
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
    """A regular expression that finds `name` in a metric line, and no name that only contains it; group 1 is the value.

    The blank after the colon keeps `IoU=0.5` off `IoU=0.5:0.95`; the one before the name keeps out prefixed names.
    """
    return rf"(?:^|\s){re.escape(name)}: (\S+)"


SEED_METRICS: tuple[tuple[str, str], ...] = tuple((name, metric_pattern(name)) for name in _SEED_NAMES)


def number_text(value: float) -> str:
    """The one spelling of a number, in metric lines and in metrics.jsonl: the shortest that reads back as `value`."""
    return repr(value) if isinstance(value, int) else repr(float(value))


def duration_text(seconds: float) -> str:
    """A duration as people say it: `8.3 s`, `4 min 05 s`, `3 h 12 min`, `2 d 03 h`."""
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

    The pairs keep their order, except that a name stands after those that contain it. Users' greedy patterns such as
    `.*IoU=0\\.5:\\s*(\\S+).*` take the last hit of a line, and so read the right one.
    """
    names = _containers_first(list(values))
    for name in names:
        assert not re.search(r"\s", name), f"a metric's name has no blanks: {name!r}"
        # Alone on a line, AP would be read as the AP50 that is not there.
        assert not name.endswith("IoU=0.5:0.95") or name.removesuffix(":0.95") in values, f"{name} needs AP50 beside it"
    return prefix + BETWEEN.join(f"{name}: {number_text(values[name])}" for name in names)


def _containers_first(names: list[str]) -> list[str]:
    """`names`, each after all names whose text, up to the colon that follows it, contains it."""
    ordered: list[str] = []
    waiting = list(names)
    while waiting:
        free = next(one for one in waiting if not any(_contains(other, one) for other in waiting if other != one))
        waiting.remove(free)
        ordered.append(free)
    return ordered


def _contains(longer: str, shorter: str) -> bool:
    return f"{shorter}:" in f"{longer}:"


def setup_logging(run_dir: Path | None, rank: int, *, level: int = logging.INFO) -> logging.Logger:
    """Send what a rank says to where people look for it, in place of any earlier set-up.

    Rank 0 speaks on standard error and in RUN_DIR/log.txt; the others in RUN_DIR/log-rankN.txt, and on standard error
    only from WARNING up. Files are appended to, so that a resumed run goes on in the same ones.
    """
    close_logging()
    logger.setLevel(level)
    logger.propagate = False
    logger.addHandler(_console(rank))
    if run_dir is not None:
        logger.addHandler(_file(run_dir / ("log.txt" if rank == 0 else f"log-rank{rank}.txt")))
    return logger


def close_logging() -> None:
    """Undo `setup_logging`: close the files and be an ordinary logger again."""
    for handler in list(logger.handlers):
        if handler.name in (_CONSOLE, _FILE):
            logger.removeHandler(handler)
            handler.close()
    logger.propagate = True


@contextmanager
def console_replaced(by: logging.Handler) -> Iterator[None]:
    """Let `by` show what would go to standard error, while a live display owns the screen."""
    consoles = [handler for handler in logger.handlers if handler.name == _CONSOLE]
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
    """Log the metric line of `values`, marked so that a live display, with its own way to show them, leaves it out."""
    logger.info("%s", metric_line(values, prefix=prefix), extra={IS_METRICS: True})


IS_METRICS = "is_metrics"  # attribute of log records that are metric lines
_CONSOLE, _FILE = "maskfleet console", "maskfleet file"


class _StampedLines(logging.Formatter):
    """Every line of a message after its own time stamp, so that a log file can be sorted, merged and cut anywhere."""

    def __init__(self, *, short: bool, who: str = "") -> None:
        super().__init__()
        self._short = short
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created).astimezone()
        stamp = f"{moment:%H:%M:%S}" if self._short else moment.isoformat(timespec="milliseconds")
        plain = self._short and record.levelno == logging.INFO
        start = f"{stamp} {self._who}" if plain else f"{stamp} {self._who}{record.levelname} "
        return "\n".join(start + line for line in super().format(record).splitlines() or [""])


def _console(rank: int) -> logging.Handler:
    console = logging.StreamHandler(sys.stderr)
    console.set_name(_CONSOLE)
    console.setFormatter(_StampedLines(short=True, who=f"[rank {rank}] " if rank else ""))
    if rank:
        console.setLevel(logging.WARNING)
    return console


def _file(path: Path) -> logging.Handler:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(path, mode="a", encoding="utf-8")
    except OSError as error:
        raise TrainingError(
            f"cannot write the log {path}: {error.strerror}", remedy="choose a run directory that you may write to"
        ) from error
    file.set_name(_FILE)
    file.setFormatter(_StampedLines(short=False))
    return file
