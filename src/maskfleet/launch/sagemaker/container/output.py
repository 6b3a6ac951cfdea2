"""The lines of the ranks: relayed to standard output for CloudWatch, and the last ones kept for the failure reason."""

from __future__ import annotations

import signal
import sys
import threading
from collections import deque
from typing import BinaryIO

from maskfleet.launch.explain import first_failure
from maskfleet.launch.sagemaker.container.tree import MAX_FAILURE_BYTES, shortened

KEPT_LINES = 4000
_FIRST_RANK = b"[rank0]: "


class RelayedLines:
    """Lines of the ranks, as `RankProcesses` adds them; those of rank 0 are relayed as it wrote them."""

    def __init__(self, target: BinaryIO | None = None) -> None:
        self._target = target or sys.stdout.buffer
        self._lock = threading.Lock()
        self._last: deque[bytes] = deque(maxlen=KEPT_LINES)

    def add(self, line: bytes) -> None:
        """Relay `line`: a time stamp, the tag of its rank, and what it wrote."""
        tagged = line.split(b" ", 1)[1]
        with self._lock:
            self._last.append(tagged)
            self._target.write(tagged.removeprefix(_FIRST_RANK))
            self._target.flush()

    def failure(self, code: int, who: str) -> str:
        """Why the ranks of this host failed: the words of the first one that did; `who` ended with `code`."""
        with self._lock:
            lines = [line.decode(errors="replace").rstrip("\n") for line in self._last]
        rank, words = first_failure(lines)
        if not words:
            return f"{who} {_ending(code)}"
        name = f"rank {rank}" if rank is not None else who
        head, text = f"{name}: ", "\n".join(words)
        space = MAX_FAILURE_BYTES - len(head.encode())
        # A traceback says most at its end; an error of ours at its beginning, and in its last line what to do.
        return head + shortened(
            text.removeprefix("error: "), space, start=0 if text.startswith("Traceback") else space // 2
        )


def _ending(code: int) -> str:
    """How a process ended, for people."""
    if code == 128 + signal.SIGKILL:
        return "was killed (signal 9), most often because the host ran out of memory"
    if code > 128:
        return f"was ended by signal {code - 128}"
    return f"ended with code {code} and no error message"
