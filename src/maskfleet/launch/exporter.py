"""Offers the newest metrics of a run to Prometheus: `python -m maskfleet.launch.exporter RUN_DIR ADDRESS PORT [INDEX]`.

It reads RUN_DIR/metrics.jsonl on every request, and listens on the one address that it is given. A worker whose INDEX
is not 0 offers nothing: all workers share the folder, and one of them is enough.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from maskfleet.errors import LaunchError
from maskfleet.system.network import listening_socket
from maskfleet.system.signals import handled
from maskfleet.system.web.same_site import path_of

METRICS_FILE = "metrics.jsonl"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TAIL_BYTES = 256 * 1024  # holds the last measurement and the last evaluation, unless thousands of lines are between
# Our name -> name, factor and help for Prometheus, which counts in seconds and bytes.
GAUGES: dict[str, tuple[str, float, str]] = {
    "step": ("maskfleet_step", 1, "Last step that was logged."),
    "epoch": ("maskfleet_epoch", 1, "Epoch of that step."),
    "learning_rate": ("maskfleet_learning_rate", 1, "Learning rate at that step."),
    "images_per_s": ("maskfleet_images_per_second", 1, "Images trained per second, all ranks together."),
    "data_wait_s": ("maskfleet_data_wait_seconds", 1, "Time per step that the ranks waited for data."),
    "checkpoint_s": (
        "maskfleet_checkpoint_wait_seconds",
        1,
        "Time that steps waited for checkpoints since the last line.",
    ),
    "memory_mib": ("maskfleet_memory_bytes", 2**20, "Peak memory of a rank: of its GPU, or of the process on a CPU."),
    "total_cost": ("maskfleet_loss", 1, "Total loss, the mean since the last line."),
    "time": ("maskfleet_last_update_timestamp_seconds", 1, "When the last line was logged."),
}
OTHER = "maskfleet_metric"


def latest(path: Path) -> dict[str, float]:
    """The newest value of each metric near the end of the file; empty without one."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}
    found: dict[str, float] = {}
    for line in lines:
        record = _record(line)
        found |= {name: math.nan if value is None else float(value) for name, value in record.items()}
    return found


def _record(line: bytes) -> Mapping[str, Any]:
    """The numbers of a line; none if it is incomplete, as the first and the last one may be."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return {}
    return {name: value for name, value in record.items() if value is None or isinstance(value, int | float)}


def exposition(values: Mapping[str, float], run: str) -> str:
    """`values` in Prometheus's text format."""
    return "".join(_lines(values, f'run="{_escaped(run)}"'))


def _lines(values: Mapping[str, float], label: str) -> Iterator[str]:
    for ours, (name, factor, text) in GAUGES.items():
        if ours in values:
            yield f"# HELP {name} {text}\n# TYPE {name} gauge\n{name}{{{label}}} {_number(values[ours] * factor)}\n"
    others = sorted(set(values) - set(GAUGES))
    if others:
        yield f"# HELP {OTHER} Loss terms, other metrics of the network, and scores.\n# TYPE {OTHER} gauge\n"
    for ours in others:
        yield f'{OTHER}{{{label},name="{_escaped(ours)}"}} {_number(values[ours])}\n'


def _number(value: float) -> str:
    return repr(float(value)).replace("inf", "Inf").replace("nan", "NaN")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class Exporter(ThreadingHTTPServer):
    """Serves /metrics of one run on one address; port 0 takes a free one."""

    daemon_threads = True

    def __init__(self, run_dir: Path, address: str, port: int, *, is_empty: bool = False) -> None:
        self.run_dir, self.is_empty = run_dir, is_empty
        super().__init__((address, port), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening_socket(address, port)
        self.server_address = self.socket.getsockname()[:2]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing for a connection that broke."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def page(self) -> str:
        return "" if self.is_empty else exposition(latest(self.run_dir / METRICS_FILE), self.run_dir.name)


class _Handler(BaseHTTPRequestHandler):
    server: Exporter
    timeout = 10  # a client that sends nothing must not keep a thread

    def do_GET(self) -> None:
        if (path_of(self.path) or "").partition("?")[0] != "/metrics":
            self.send_error(404)
            return
        body = self.server.page().encode()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        """Print nothing: Prometheus asks every few seconds."""


def main(arguments: Sequence[str]) -> None:
    """Serve until SIGTERM."""
    run_dir, address, port, *index = arguments
    if address in ("", "0.0.0.0", "::"):  # noqa: S104 - refused, not used
        raise LaunchError(
            "the exporter listens on one address only", remedy="name the address of the pod or of this machine"
        )
    exporter = Exporter(Path(run_dir), address, int(port), is_empty=index not in ([], ["0"]))
    # As the first process of a container it would not be ended by a signal that it does not handle.
    with handled({signal.SIGTERM: lambda number, frame: sys.exit(0)}), exporter:
        exporter.serve_forever(poll_interval=0.5)


if __name__ == "__main__":
    main(sys.argv[1:])
