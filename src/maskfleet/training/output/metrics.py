"""What a run measures: summed on the device, read once per write, kept in metrics.jsonl, the log and TensorBoard.

Shapes: L loss terms, M other metrics.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskfleet.errors import TrainingError
from maskfleet.log import log_metrics, logger, number_text
from maskfleet.training.output.tensorboard import TensorBoard

FILE = "metrics.jsonl"
TOTAL = "total_cost"


class Metrics:
    """The measurements of a run so far, and where they go.

    Every rank has one and calls the same methods; only the chief's touches files. `mean_over_ranks` takes a float64
    vector on the host and returns its mean over the ranks; without it each rank's numbers are its own.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        is_chief: bool,
        tensorboard: bool = True,
        mean_over_ranks: Callable[[Tensor], Tensor] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = run_dir / FILE
        self._board_folder = run_dir / "tensorboard"
        self._is_chief = is_chief
        self._wants_board = tensorboard and is_chief
        self._board: TensorBoard | None = None
        self._purge_step: int | None = None
        self._mean_over_ranks = mean_over_ranks
        self._clock = clock
        self._names: list[str] = []
        self._sums: Tensor | None = None  # [L] float64
        self._count = 0

    def add(self, losses: Mapping[str, Tensor]) -> None:
        """Add one step's loss terms, scalars; nothing is read back from the device."""
        values = torch.stack([loss.detach() for loss in losses.values()]).double()  # [L]
        if self._sums is None:
            self._names, self._sums = list(losses), values
        else:
            assert self._names == list(losses), "every step has the same loss terms"
            self._sums = self._sums.to(values.device) + values
        self._count += 1

    def write(
        self,
        step: int,
        *,
        epoch: int,
        lr: float,
        images_per_s: float,
        data_wait_s: float,
        memory_mib: float,
        extra: Mapping[str, float] | None = None,
        metrics: Mapping[str, Tensor] | None = None,
    ) -> dict[str, float]:
        """Write down the mean of each loss term since the last write, their sum `total_cost`, and the rest.

        This is the one time that the host waits for the device. `data_wait_s` is of one step, on average. The answer
        holds what was written.
        """
        means = self._read_means(metrics or {})
        values: dict[str, float] = {"step": step, "epoch": epoch, "learning_rate": lr}
        values |= {"images_per_s": round(images_per_s, 3), "data_wait_s": round(data_wait_s, 6)}
        values |= {"memory_mib": round(memory_mib, 1), **means, **(extra or {})}
        self._record(values)
        return values

    def write_eval(self, step: int, epoch: int, scores: Mapping[str, float]) -> None:
        """Write down the scores of an evaluation after `step`, all on one line."""
        self._record({"step": step, "epoch": epoch, **scores}, prefix="evaluation  ")

    def write_images(self, step: int, tag: str, image: NDArray[np.uint8]) -> None:
        """Show `image` [H, W, 3] BGR in TensorBoard."""
        if self._wants_board:
            self._open_board().image(step, tag, image, at=self._clock())

    def truncate_after(self, step: int) -> None:
        """Forget what was written after `step`, because the run goes on from there; 0 to begin anew.

        A line that a kill cut short goes too. TensorBoard is told to hide what it has of later steps.
        """
        if not self._is_chief:
            return
        if self._board_folder.exists():
            self._purge_step = step + 1
        if self._path.exists():
            lines = self._path.read_bytes().splitlines(keepends=True)
            kept = [line.rstrip(b"\n") + b"\n" for line in lines if _step_of(line) <= step]
            if kept != lines:
                _replace(self._path, b"".join(kept))
                logger.info(
                    "dropped %d lines from the end of %s: the run goes on at step %d",
                    len(lines) - len(kept),
                    FILE,
                    step,
                )

    def state_dict(self) -> dict[str, Any]:
        """This rank's sums since the last write: names, a float64 tensor and a count."""
        sums = torch.zeros(0, dtype=torch.float64) if self._sums is None else self._sums.clone()
        return {"names": list(self._names), "sums": sums, "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, so that the next write has the same digits as if there had been no interruption.

        The sums may also be a list of numbers, as a checkpoint in JSON keeps them to the last bit.
        """
        self._names, self._count = list(state["names"]), int(state["count"])
        self._sums = torch.as_tensor(state["sums"], dtype=torch.float64).clone() if self._count else None

    def close(self) -> None:
        """Finish what TensorBoard's thread has still to write."""
        if self._board is not None:
            self._board.close()
            self._board = None

    def _read_means(self, metrics: Mapping[str, Tensor]) -> dict[str, float]:
        """Means of the loss terms over steps, then `metrics`, by name and over ranks; the sums start afresh."""
        parts = []
        if self._sums is not None:
            parts.append(self._sums / self._count)  # [L]
        if metrics:
            parts.append(torch.stack([value.detach().double() for value in metrics.values()]))  # [M]
        names, num_losses = self._names, 0 if self._sums is None else len(self._names)
        self._names, self._sums, self._count = [], None, 0
        if not parts:
            return {}
        device = parts[-1].device  # sums that come from a checkpoint are still on the host
        vector = torch.cat([part.to(device) for part in parts]).cpu()  # [L + M]
        if self._mean_over_ranks is not None:
            vector = self._mean_over_ranks(vector)
        numbers: list[float] = vector.tolist()
        means = {TOTAL: _rounded(sum(numbers[:num_losses]))} if num_losses else {}
        return means | {name: _rounded(number) for name, number in zip([*names, *metrics], numbers, strict=True)}

    def _record(self, values: Mapping[str, float], *, prefix: str = "") -> None:
        if not self._is_chief:
            return
        now = round(self._clock(), 3)
        _append(self._path, _json_line({**values, "time": now}))
        log_metrics(values, prefix=prefix)
        if self._wants_board:
            shown = {name: value for name, value in values.items() if name != "step"}
            self._open_board().scalars(int(values["step"]), shown, at=now)

    def _open_board(self) -> TensorBoard:
        if self._board is None:
            self._board = TensorBoard(self._board_folder, purge_step=self._purge_step)
        return self._board


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The lines of RUN_DIR/metrics.jsonl, oldest first; none if there is no file, and none for a line cut short."""
    path = run_dir / FILE
    if not path.exists():
        return []
    try:
        records = [_parsed(line) for line in path.read_bytes().splitlines()]
    except OSError as error:
        raise TrainingError(
            f"cannot read {path}: {error.strerror}", remedy="check that you may read the run directory"
        ) from error
    return [record for record in records if record is not None]


def _rounded(number: float) -> float:
    """`number` to nine digits: as many as tell any two float32 values apart, and no more to read than that."""
    return float(f"{number:.9g}")


def _json_line(record: Mapping[str, float]) -> bytes:
    """`record` as strict JSON, which has no NaN: what is not finite becomes null."""
    fields = (
        f"{json.dumps(name)}: {number_text(value) if math.isfinite(value) else 'null'}"
        for name, value in record.items()
    )
    return f"{{{', '.join(fields)}}}\n".encode()


def _parsed(line: bytes) -> dict[str, float] | None:
    """The record of a line, with NaN for null; None if the line is not a record."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    return {name: math.nan if value is None else value for name, value in record.items()}


def _step_of(line: bytes) -> float:
    record = _parsed(line)
    return math.inf if record is None else record["step"]


def _append(path: Path, line: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(line)
    except OSError as error:
        raise _cannot_write(path, error) from error


def _replace(path: Path, content: bytes) -> None:
    """Give `path` new content; whoever looks, even after a power cut, sees the old or the new, whole."""
    draft = path.with_name(f"{path.name}.part")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> TrainingError:
    return TrainingError(
        f"cannot write {path}: {error.strerror}",
        remedy="make room or give yourself write access there, then start the same command again to continue",
    )
