"""Services that collect metrics: never twice the same step, never a failure or a pause of training."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from maskfleet.config.base import replaced
from maskfleet.config.load import METRICS_FILE
from maskfleet.config.run import RunConfig
from maskfleet.errors import ConfigError
from maskfleet.training.output.measurement import Measurement
from maskfleet.training.output.trackers import background, check_packages
from maskfleet.training.output.trackers.background import TrackerSink
from maskfleet.training.output.trackers.mlflow import flattened, metric_name
from tools import ROOT

PACKAGES = ROOT / ".tools" / "trackers" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
# Appended, so that the packages of the tests come first.
PREAMBLE = f"import sys; sys.path.append({str(PACKAGES)!r})\n"

needs_packages = pytest.mark.skipif(
    not PACKAGES.is_dir(), reason="wandb and mlflow are not here: make test-tools installs them into .tools/trackers"
)


class Recorder:
    """A service in memory."""

    name, file_name = "Recorder", "recorder.json"

    def __init__(self, *, failures: int = 0, is_down: bool = False) -> None:
        self.sent: list[tuple[int, bool]] = []
        self.opened: list[str | None] = []
        self.closed = False
        self.may_send = threading.Event()
        self.may_send.set()
        self._failures, self._is_down = failures, is_down

    def open(self, run_id: str | None) -> str:
        if self._is_down:
            raise PermissionError("no key\nand a long explanation")
        self.opened.append(run_id)
        return run_id or "id-1"

    def send(self, measurement: Measurement) -> None:
        self.may_send.wait()
        if self._failures:
            self._failures -= 1
            raise ConnectionError("no network")
        self.sent.append((measurement.step, measurement.is_evaluation))

    def close(self) -> None:
        self.closed = True


def measured(step: int, *, evaluation: bool = False) -> Measurement:
    values = {"mAP(bbox)/IoU=0.5:0.95": 0.5} if evaluation else {"total_cost": 1.0 / step}
    return Measurement(step, 1000.0 + step, values, is_evaluation=evaluation)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_resumed_run_continues_without_repeating_steps(tmp_path: Path) -> None:
    first = Recorder()
    sink = TrackerSink(first, tmp_path)
    for step in (5, 10, 15):
        sink.write(measured(step))
    sink.write(measured(10, evaluation=True))
    sink.close()
    assert first.sent == [(5, False), (10, False), (15, False), (10, True)]
    assert first.closed

    second = Recorder()
    sink = TrackerSink(second, tmp_path)  # after step 10
    sink.write(measured(10, evaluation=True))
    for step in (15, 20):
        sink.write(measured(step))
    sink.write(measured(20, evaluation=True))
    sink.close()
    assert second.opened == ["id-1"]
    assert second.sent == [(20, False), (20, True)]


def test_what_an_earlier_process_could_not_send_is_sent_by_the_next(tmp_path: Path) -> None:
    lines = [{"step": step, "total_cost": 1.0, "time": 3.0} for step in (5, 10)]
    lines.append({"step": 10, "mAP(bbox)/IoU=0.5:0.95": None, "time": 4.0})
    (tmp_path / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 15, "to')
    (tmp_path / Recorder.file_name).write_text('{"run_id": "id-7", "step": 5, "evaluation": 0}')
    recorder = Recorder()
    sink = TrackerSink(recorder, tmp_path)
    sink.write(measured(15))
    sink.close()
    assert recorder.opened == ["id-7"]
    assert recorder.sent == [(10, False), (10, True), (15, False)]


def test_a_service_that_cannot_be_opened_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(is_down=True)
    sink = TrackerSink(recorder, tmp_path)
    for step in range(1, 50):
        sink.write(measured(step))
    sink.close()
    [warning] = warnings_of(caplog)
    assert "Recorder does not get all metrics: PermissionError: no key;" in warning
    assert not (tmp_path / Recorder.file_name).exists()


def test_a_failed_transfer_is_repeated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(failures=3)
    sink = TrackerSink(recorder, tmp_path, retry_after_s=(0.0,))
    for step in (1, 2):
        sink.write(measured(step))
    while len(recorder.sent) < 2:
        time.sleep(0.001)
    sink.close()
    assert recorder.sent == [(1, False), (2, False)]
    assert len(warnings_of(caplog)) == 1


def test_a_service_that_hangs_holds_up_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "CLOSE_S", 0.05)
    monkeypatch.setattr(background, "QUEUE_SIZE", 10)
    recorder = Recorder()
    recorder.may_send.clear()
    sink = TrackerSink(recorder, tmp_path)
    for step in range(1, 1000):
        sink.write(measured(step))
    sink.close()
    [warning] = warnings_of(caplog)
    assert "too slow" in warning
    recorder.may_send.set()
    while not recorder.closed:
        time.sleep(0.001)
    assert 10 <= len(recorder.sent) <= 11


def test_a_missing_package_is_refused_before_training(micro: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_packages(micro)
    for field in ("wandb", "mlflow"):
        with pytest.raises(ConfigError, match=f"log.{field} needs the Python package {field}") as caught:
            check_packages(replaced(micro, {f"log.{field}": "detectors"}))
        assert f"maskfleet[{field}]" in caught.value.remedy


def test_names_that_mlflow_allows() -> None:
    assert metric_name("mAP(bbox)/IoU=0.5:0.95") == "mAP_bbox/IoU_0.5_0.95"
    assert metric_name("val2-mAP(segm)/small") == "val2-mAP_segm/small"
    assert metric_name("rpn_losses/label_loss") == "rpn_losses/label_loss"
    assert dict(flattened({"a": {"b": 1, "c": {"d": [2]}}, "e": None})) == {"a.b": 1, "a.c.d": [2], "e": None}


def python(code: str, folder: Path, **environment: str) -> str:
    """What a process with both packages prints."""
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "MLFLOW_"))}
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + code],
        cwd=folder,
        env={**keep, "HOME": str(folder), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


KILLED_RUN = """
import os, time
from pathlib import Path
from maskfleet.training.output.trackers import background
background.CLOSE_S = {close_s}
from maskfleet.config.recipes import recipe
from maskfleet.config.base import replaced
from maskfleet.training.output.measurement import Measurement
from maskfleet.training.output.trackers import open_trackers

sinks = open_trackers(Path("run"), replaced(recipe("demo"), {{"log.{field}": "detectors"}}))
for step in range({first}, {last} + 1):
    values = {{"total_cost": 1 / step, "mAP(bbox)/IoU=0.5:0.95": 0.01 * step}}
    for sink in sinks:
        sink.write(Measurement(step, 1700000000.0 + step, values))
if {killed}:
    def keeps_last_step():  # as a record of W&B's, or a line of MLflow's
        files = [*Path().glob("run/wandb/offline*/*.wandb"), *Path().glob("mlruns/*/*/metrics/mAP_bbox/IoU*0.95")]
        return any(b"\\x030.2" in file.read_bytes() or b" 0.05 5\\n" in file.read_bytes() for file in files)

    while not keeps_last_step():
        time.sleep(0.1)
    os._exit(0)
for sink in sinks:
    sink.close()
"""
FILE_STORE = {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_TRACKING_URI": "mlruns"}
READ_MLFLOW = """
import json
from mlflow.tracking import MlflowClient
client = MlflowClient()
[experiment] = [one for one in client.search_experiments() if one.name == "detectors"]
[run] = client.search_runs([experiment.experiment_id])
steps = {name: [point.step for point in client.get_metric_history(run.info.run_id, name)] for name in run.data.metrics}
print(json.dumps([steps, run.info.status, run.data.params, run.info.run_name, run.data.metrics]))
"""


@needs_packages
@pytest.mark.slow
def test_mlflow_has_every_step_once_after_a_kill(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    python(KILLED_RUN.format(field="mlflow", first=1, last=5, killed=True, close_s=600.0), tmp_path, **FILE_STORE)
    python(KILLED_RUN.format(field="mlflow", first=4, last=8, killed=False, close_s=600.0), tmp_path, **FILE_STORE)
    steps, status, parameters, name, metrics = json.loads(python(READ_MLFLOW, tmp_path, **FILE_STORE).splitlines()[-1])
    assert steps == {"total_cost": [*range(1, 9)], "mAP_bbox/IoU_0.5_0.95": [*range(1, 9)]}
    assert (status, name) == ("FINISHED", "run")
    assert parameters["recipe"] == "demo"
    assert metrics["total_cost"] == 1 / 8


def wandb_records(path: Path) -> Iterator[bytes]:
    """The records of an offline run: blocks of 32 KiB with parts that have checksum, length and type in front."""
    data, position, parts = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or last part
            yield parts
            parts = b""


READ_WANDB = """
import json, sys
from wandb.proto.wandb_internal_pb2 import Record
rows, ids = [], set()
for line in open("records.hex"):
    record = Record.FromString(bytes.fromhex(line))
    if record.HasField("history"):
        rows.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item})
    if record.HasField("run"):
        ids.add((record.run.run_id, record.run.project, record.run.display_name))
print(json.dumps([rows, sorted(ids)]))
"""


@needs_packages
@pytest.mark.slow
def test_wandb_has_every_step_once_after_a_kill(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    python(
        KILLED_RUN.format(field="wandb", first=1, last=5, killed=True, close_s=600.0), tmp_path, WANDB_MODE="offline"
    )
    python(
        KILLED_RUN.format(field="wandb", first=4, last=8, killed=False, close_s=600.0), tmp_path, WANDB_MODE="offline"
    )
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    assert len(files) == 2
    records = [record.hex() for file in files for record in wandb_records(file)]
    (tmp_path / "records.hex").write_text("\n".join(records))
    rows, ids = json.loads(python(READ_WANDB, tmp_path).splitlines()[-1])
    assert [row["step"] for row in rows] == [*range(1, 9)], [path.stat().st_size for path in files]
    assert rows[-1]["total_cost"] == 1 / 8
    assert rows[-1]["mAP(bbox)/IoU=0.5:0.95"] == 0.08
    run_id = json.loads((tmp_path / "run" / "wandb.json").read_text())["run_id"]
    assert ids == [[run_id, "detectors", "run"]]


@needs_packages
@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "environment", "reason"),
    [
        ("wandb", {}, "there is no API key"),
        ("wandb", {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}, ""),
        ("mlflow", {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}, ""),
    ],
    ids=["wandb_no_key", "wandb_no_network", "mlflow_no_network"],
)
def test_without_a_service_there_is_one_warning(
    tmp_path: Path, field: str, environment: dict[str, Any], reason: str
) -> None:
    (tmp_path / "run").mkdir()
    # Where nothing will answer, less time than usual to wait for it at the end.
    close_s = 600.0 if reason else 3.0
    said = python(
        KILLED_RUN.format(field=field, first=1, last=3, killed=False, close_s=close_s), tmp_path, **environment
    )
    assert said.count("does not get all metrics") == 1
    assert reason in said
    assert "Traceback" not in said
    assert "0" * 40 not in said
