"""What a run does until its first steps: where the main thread is, sampled fifty times a second.

    python benchmarks/start_trace.py TRACE train RUN_DIR
    python benchmarks/start.py --cases cold --program "benchmarks/start_trace.py TRACE"

Runs `maskfleet train RUN_DIR` and writes to the file TRACE, after a minute or when the run ends: seconds by kind of
work, and then a line for each stretch of time that the main thread spent at one place of maskfleet.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import FrameType

SAMPLE_S, TRACED_S, SHORTEST_S = 0.02, 60.0, 0.1
DEPTH = 5  # frames of maskfleet in a line
KINDS = (  # the first whose text is in a file name of the stack
    ("waiting for a batch", "torch/utils/data/dataloader.py"),
    ("Triton", "/triton/compiler/"),
    ("Triton", "/triton/backends/"),
    ("imports of torch._dynamo", "torch/_dynamo/__init__.py"),
    ("imports", "<frozen importlib"),
    ("other", ""),
)


def frames_of(frame: FrameType | None) -> list[tuple[str, str]]:
    """File and function of each frame, innermost first."""
    found = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_code.co_name))
        frame = frame.f_back
    return found


def kind_of(frames: list[tuple[str, str]]) -> str:
    return next(kind for kind, text in KINDS if any(text in file for file, _ in frames))


def place_of(frames: list[tuple[str, str]]) -> str:
    """The innermost functions of maskfleet, outermost first."""
    own = [f"{file.split('/maskfleet/')[-1]}:{name}" for file, name in frames if "/maskfleet/" in file]
    return " > ".join(reversed(own[:DEPTH]))


def traced(thread: int, started_at: float, done: threading.Event, path: Path) -> None:
    """Sample until `done` or for a minute; then write."""
    samples: list[tuple[float, str, str]] = []
    while not done.wait(SAMPLE_S) and time.monotonic() - started_at < TRACED_S:
        frames = frames_of(sys._current_frames().get(thread))
        samples.append((time.monotonic() - started_at, kind_of(frames), place_of(frames)))
    path.write_text("\n".join(lines_of(samples)) + "\n", encoding="utf-8")


def lines_of(samples: list[tuple[float, str, str]]) -> list[str]:
    """Seconds by kind of work, then the stretches at one place; of samples (time, kind, place)."""
    seconds: defaultdict[str, float] = defaultdict(float)
    stretches: list[tuple[float, float, str]] = []  # begin, end, kind and place
    before = 0.0
    for now, kind, place in samples:
        seconds[kind] += now - before
        where, begin = f"[{kind}] {place}", before
        if stretches and stretches[-1][2] == where:
            begin = stretches.pop()[0]
        stretches.append((begin, now, where))
        before = now
    lines = [f"{value:7.2f} s {kind}" for kind, value in sorted(seconds.items(), key=lambda item: -item[1])]
    return lines + [
        f"{begin:7.2f} +{end - begin:6.2f} {where}" for begin, end, where in stretches if end - begin >= SHORTEST_S
    ]


def main() -> None:
    started_at, done, path = time.monotonic(), threading.Event(), Path(sys.argv.pop(1))
    own = threading.main_thread().ident
    assert own is not None
    tracer = threading.Thread(target=traced, args=(own, started_at, done, path), daemon=True)
    tracer.start()
    from maskfleet.cli.main import main as maskfleet  # imports are part of what is traced

    try:
        maskfleet()
    finally:
        done.set()
        tracer.join()


if __name__ == "__main__":
    main()
