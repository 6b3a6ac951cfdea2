"""What Prometheus reads from a run, scraped over HTTP."""

from __future__ import annotations

import json
import math
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from maskfleet.errors import LaunchError
from maskfleet.launch.exporter import GAUGES, Exporter, main
from maskfleet.system.deploy_files import deploy_path
from maskfleet.training.output.metrics import HOST_METRICS
from ports import free_port

LINES = (
    {"step": 10, "epoch": 1, "images_per_s": 120.5, "data_wait_s": 0.002, "memory_mib": 2.0, "total_cost": 1.5},
    {"step": 10, "epoch": 1, "mAP(bbox)/IoU=0.5:0.95": 0.377, "time": 1700000000.0},
    {"step": 20, "epoch": 2, "images_per_s": 130.0, "total_cost": None, 'odd "name"\\': 3, "time": 1700000060.5},
)
SAMPLE = re.compile(r'^(\w+)\{run="r50"(?:,name="((?:[^"\\]|\\.)*)")?\} (\S+)$')


@pytest.fixture
def exporter(tmp_path: Path) -> Iterator[Exporter]:
    run = tmp_path / "r50"
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES) + '{"step": 21, "epo')
    with Exporter(run, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def scraped(server: Exporter, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_address[1]}{path}", timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return str(answer.read().decode())


def samples(page: str) -> dict[tuple[str, str], float]:
    """Values by name and by the label that differs, as Prometheus's own parser reads them if it is installed."""
    try:
        from prometheus_client.parser import text_string_to_metric_families as families
    except ImportError:
        matches = [SAMPLE.match(line) for line in page.splitlines() if not line.startswith("#")]
        assert all(matches), page
        return {(m[1], re.sub(r"\\(.)", r"\1", m[2] or "")): float(m[3]) for m in matches if m is not None}
    found = {}
    for one in (sample for family in families(page) for sample in family.samples):
        assert one.labels["run"] == "r50"
        found[one.name, one.labels.get("name", "")] = one.value
    return found


def test_the_newest_value_of_every_metric_is_scraped(exporter: Exporter) -> None:
    found = samples(scraped(exporter))
    assert found["maskfleet_step", ""] == 20
    assert found["maskfleet_images_per_second", ""] == 130.0
    assert found["maskfleet_data_wait_seconds", ""] == 0.002, "of the last line that has it"
    assert found["maskfleet_memory_bytes", ""] == 2 * 2**20
    assert math.isnan(found["maskfleet_loss", ""])
    assert found["maskfleet_last_update_timestamp_seconds", ""] == 1700000060.5
    assert found["maskfleet_metric", "mAP(bbox)/IoU=0.5:0.95"] == 0.377
    assert found["maskfleet_metric", 'odd "name"\\'] == 3


def test_a_new_line_is_seen_and_a_missing_file_is_no_error(exporter: Exporter) -> None:
    path = exporter.run_dir / "metrics.jsonl"
    path.write_text('{"step": 30, "epoch": 3, "time": 1}\n')
    assert samples(scraped(exporter))["maskfleet_step", ""] == 30
    path.unlink()
    assert scraped(exporter) == ""
    with pytest.raises(urllib.error.HTTPError, match="404"):
        scraped(exporter, "/")


def test_only_the_first_worker_offers_metrics(exporter: Exporter) -> None:
    with Exporter(exporter.run_dir, "127.0.0.1", 0, is_empty=True) as other:
        assert other.page() == ""
    assert exporter.page() != ""


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("//metrics", 200),
        ("http://pod/metrics", 200),
        ("/%00", 404),
        ("http://[::1/metrics", 404),
        ("/x" * 40_000, 414),
    ],
)
def test_odd_addresses_get_a_clean_answer(
    path: str, status: int, exporter: Exporter, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection(exporter.server_address[:2], timeout=30) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert connection.recv(100).startswith(f"HTTP/1.0 {status} ".encode())
    assert "Traceback" not in capfd.readouterr().err


def test_a_client_that_breaks_off_leaves_no_traceback(exporter: Exporter, capfd: pytest.CaptureFixture[str]) -> None:
    for sent in (b"GET /met", b"GET /metrics HTTP/1.1\r\n\r\n"):
        connection = socket.create_connection(exporter.server_address[:2], timeout=30)
        # Closing so sends a reset, which the server meets while it reads or writes.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(sent)
        connection.close()
    assert scraped(exporter)
    assert "Traceback" not in capfd.readouterr().err


def test_all_interfaces_are_refused() -> None:
    for address in ("", "0.0.0.0", "::"):
        with pytest.raises(LaunchError, match="one address only"):
            main(["runs/r50", address, "9464"])


def test_every_metric_of_the_host_has_a_name_for_prometheus() -> None:
    assert set(HOST_METRICS) <= set(GAUGES)


def test_the_dashboard_shows_only_metrics_that_exist() -> None:
    text = deploy_path("helm", "mpi-operator", "files", "dashboard.json").read_text(encoding="utf-8")
    dashboard = json.loads(text)
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    ours = {name for name, _, _ in GAUGES.values()} | {"maskfleet_metric"}
    used = {name for query in queries for name in re.findall(r"maskfleet_\w+", query)}
    assert {"maskfleet_images_per_second", "maskfleet_loss", "maskfleet_data_wait_seconds"} <= used <= ours
    assert any("DCGM_FI_DEV_GPU_UTIL" in query for query in queries)


@pytest.mark.slow
def test_the_process_serves_until_it_is_terminated(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "epoch": 1}\n')
    port = str(free_port())
    argv = [sys.executable, "-m", "maskfleet.launch.exporter", str(tmp_path), "127.0.0.1", port, "0"]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    for _ in range(1000):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
                page = answer.read().decode()
            break
        except urllib.error.URLError:
            assert process.poll() is None
            threading.Event().wait(0.1)
    assert "maskfleet_step" in page
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=240)[1] == ""
    assert process.returncode == 0
