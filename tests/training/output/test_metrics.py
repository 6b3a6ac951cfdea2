from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import IMAGES, SCALARS, EventAccumulator
from torch import Tensor

from maskfleet.errors import TrainingError
from maskfleet.log import SAGEMAKER_METRICS, close_logging, logger, setup_logging
from maskfleet.training.output.measurement import Measurement
from maskfleet.training.output.metrics import Metrics, read_metrics
from maskfleet.training.output.sinks import MetricLog, MetricsFile, ShortLog, Sink, open_sinks

GOLDENS = Path(__file__).parents[2] / "goldens"
HOST = {
    "learning_rate": 0.02,
    "images_per_s": 7.5,
    "data_wait_s": 0.25,
    "checkpoint_s": 0.0,
    "memory_mib": 1024.0,
}
SCORES = {
    f"mAP({kind})/{name}": (place + 1) / 17
    for kind in ("bbox", "segm")
    for place, name in enumerate(("IoU=0.5", "IoU=0.5:0.95", "IoU=0.75", "small", "medium", "large"))
}


@pytest.fixture(autouse=True)
def quiet_afterwards() -> Iterator[None]:
    yield
    close_logging()


def new_metrics(run_dir: Path, *, tensorboard: bool = False, after_step: int = 0) -> Metrics:
    sinks: tuple[Sink, ...] = (MetricsFile(run_dir, after_step=after_step), MetricLog())
    return Metrics(
        open_sinks(run_dir, MetricLog(), after_step=after_step) if tensorboard else sinks, clock=lambda: 1000.0
    )


def losses_of(step: int) -> dict[str, Tensor]:
    noise = torch.rand(3, generator=torch.Generator().manual_seed(step), requires_grad=False)
    return {
        "rpn_losses/label_loss": noise[0],
        "rpn_losses/box_loss": noise[1] * 1e-3,
        "maskrcnn_loss/maskrcnn_loss": noise[2] * 1e3,
    }


def run_steps(metrics: Metrics, start: int, stop: int, *, every: int = 5) -> None:
    for step in range(start + 1, stop + 1):
        metrics.add(losses_of(step))
        if step % every == 0:
            metrics.write(step, epoch=1, host=HOST)


def test_a_write_holds_means_since_the_last_one_and_their_sum(tmp_path: Path) -> None:
    metrics = new_metrics(tmp_path)
    for value in (1.0, 2.0, 6.0):
        metrics.add({"a": torch.tensor(value, requires_grad=True), "b": torch.tensor(0.5)})
    first = metrics.write(3, epoch=1, host=HOST, extra={"grad_norm": 4.0})
    assert (first["a"], first["b"], first["total_cost"], first["grad_norm"]) == (3.0, 0.5, 3.5, 4.0)
    metrics.add({"a": torch.tensor(8.0), "b": torch.tensor(0.25)})
    second = metrics.write(4, epoch=2, host=HOST, network={"num_fg": torch.tensor(12)})
    assert (second["a"], second["b"], second["total_cost"], second["num_fg"]) == (8.0, 0.25, 8.25, 12.0)
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0]) == {
        "step": 3,
        "epoch": 1,
        "time": 1000.0,
        "learning_rate": 0.02,
        "images_per_s": 7.5,
        "data_wait_s": 0.25,
        "checkpoint_s": 0.0,
        "memory_mib": 1024.0,
        "total_cost": 3.5,
        "a": 3.0,
        "b": 0.5,
        "grad_norm": 4.0,
    }
    assert read_metrics(tmp_path)[1]["epoch"] == 2


def test_adding_reads_nothing_back_and_keeps_no_graph(tmp_path: Path) -> None:
    metrics = new_metrics(tmp_path)
    # Tensors on the meta device have no values: any attempt to read one raises.
    for _ in range(3):
        metrics.add({"a": torch.empty((), device="meta", requires_grad=True), "b": torch.empty((), device="meta")})
    assert metrics._sums is not None
    assert metrics._sums.device.type == "meta"
    assert not metrics._sums.requires_grad


def test_buffers_that_the_next_step_overwrites_are_copied(tmp_path: Path) -> None:
    metrics, loss = new_metrics(tmp_path), torch.zeros((), dtype=torch.float64)
    for value in (1.0, 3.0):
        loss.fill_(value)
        metrics.add({"a": loss})
    assert metrics.write(2, epoch=1, host=HOST)["a"] == 2.0


def test_one_step_a_write_tells_any_two_float32_losses_apart(tmp_path: Path) -> None:
    metrics = new_metrics(tmp_path)
    loss = torch.tensor(0.6931472)
    texts = []
    for value in (loss, torch.nextafter(loss, torch.tensor(1.0))):
        metrics.add({"a": value})
        written = metrics.write(1, epoch=1, host=HOST)["a"]
        assert torch.tensor(written, dtype=torch.float32) == value
        texts.append(written)
    assert texts[0] != texts[1]


@pytest.mark.parametrize("stop", [5, 7, 14])
@pytest.mark.parametrize("through_json", [False, True])
def test_a_resumed_run_writes_the_same_bytes(tmp_path: Path, stop: int, through_json: bool) -> None:
    run_steps(whole := new_metrics(tmp_path / "whole"), 0, 20)
    run_steps(killed := new_metrics(tmp_path / "killed"), 0, stop)
    state = killed.state_dict()
    as_json = json.loads(json.dumps(state))
    run_steps(killed, stop, 18)  # it lived on after the checkpoint, and died in the middle of a line
    with (tmp_path / "killed" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 20, "epo')
    resumed = new_metrics(tmp_path / "killed", after_step=stop)
    resumed.load_state_dict(as_json if through_json else state)
    run_steps(resumed, stop, 20)
    assert (tmp_path / "killed" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    for metrics in (whole, resumed):
        assert metrics.state_dict() == {"names": [], "sums": [], "count": 0}
    assert [path.name for path in (tmp_path / "killed").iterdir()] == ["metrics.jsonl"]


def test_truncating_leaves_an_intact_file_alone(tmp_path: Path) -> None:
    run_steps(new_metrics(tmp_path), 0, 10)
    before = (tmp_path / "metrics.jsonl").stat()
    new_metrics(tmp_path, after_step=10)
    after = (tmp_path / "metrics.jsonl").stat()
    assert (before.st_ino, before.st_mtime_ns, before.st_size) == (after.st_ino, after.st_mtime_ns, after.st_size)
    new_metrics(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_a_line_that_lacks_only_its_newline_is_kept_and_completed(tmp_path: Path) -> None:
    run_steps(new_metrics(tmp_path), 0, 10)
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    new_metrics(tmp_path, after_step=10)
    assert path.read_bytes() == whole


def test_a_cut_last_line_is_not_read(tmp_path: Path) -> None:
    run_steps(new_metrics(tmp_path), 0, 10)
    path = tmp_path / "metrics.jsonl"
    for cut in range(1, 40):
        path.write_bytes(path.read_bytes()[:-1])
        assert [record["step"] for record in read_metrics(tmp_path)] == ([5, 10] if cut == 1 else [5])
    assert read_metrics(tmp_path / "elsewhere") == []


def test_ranks_are_averaged_by_one_vector_and_only_the_chief_writes(tmp_path: Path) -> None:
    sent: list[Tensor] = []

    def with_a_peer_of_zeros(vector: Tensor) -> Tensor:
        sent.append(vector)
        return vector / 2

    for name, is_chief in (("chief", True), ("other", False)):
        sinks = [MetricsFile(tmp_path / name, after_step=0)] if is_chief else []
        metrics = Metrics(sinks, mean_over_ranks=with_a_peer_of_zeros)
        metrics.add({"a": torch.tensor(3.0), "b": torch.tensor(1.0)})
        values = metrics.write(1, epoch=1, host=HOST, network={"c": torch.tensor(8.0)})
        assert (values["a"], values["b"], values["c"], values["total_cost"]) == (1.5, 0.5, 4.0, 2.0)
        metrics.write_eval(1, 1, SCORES)
    assert [vector.shape for vector in sent] == [(3,), (3,)]
    assert (tmp_path / "chief" / "metrics.jsonl").exists()
    assert not (tmp_path / "other").exists()


def test_every_logged_line_gives_the_patterns_what_the_file_holds(tmp_path: Path) -> None:
    setup_logging(tmp_path, 0)
    names = json.loads((GOLDENS / "summaries_fpn_mask.json").read_text())
    losses = [name for name in names if name.count("/") == 1 and name.endswith("_loss")]
    others = [name for name in names if name not in losses and name != "total_cost"]
    metrics = new_metrics(tmp_path)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 7):
        metrics.add({name: torch.rand((), generator=generator) for name in losses})
        if step % 2 == 0:
            more = {name: torch.rand((), generator=generator) * 100 for name in others}
            metrics.write(step, epoch=1, host=HOST, network=more)
    metrics.write_eval(6, 1, SCORES)
    records, lines = read_metrics(tmp_path), (tmp_path / "log.txt").read_text().splitlines()
    assert len(records) == len(lines) == 4
    read = 0
    for record, line in zip(records, lines, strict=True):
        for name, pattern in SAGEMAKER_METRICS:
            greedy = f".*{re.escape(name)}:\\s*(\\S+).*"
            assert (re.search(pattern, line) is not None) == (name in record)
            if name in record:
                assert float(re.search(pattern, line)[1]) == float(re.match(greedy, line)[1]) == record[name]
                read += 1
        assert f"step: {record['step']}  epoch: 1  " in line
    assert read == 3 * 10 + 12


def test_what_is_not_finite_is_null_in_the_file_and_nan_when_read(tmp_path: Path) -> None:
    metrics = new_metrics(tmp_path)
    metrics.add({"a": torch.tensor(math.inf), "b": torch.tensor(-math.inf)})
    metrics.write(1, epoch=1, host=HOST)

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    raw = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert (raw["a"], raw["b"], raw["total_cost"]) == (None, None, None)
    assert math.isnan(read_metrics(tmp_path)[0]["total_cost"])


def test_a_file_that_cannot_be_written_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(TrainingError, match=r"metrics\.jsonl: Is a directory") as caught:
        new_metrics(tmp_path).write_eval(1, 1, SCORES)
    assert "continue" in caught.value.remedy


def test_the_documented_examples_are_what_is_written(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "train" / "metrics.md").read_text()
    example = json.loads(re.search(r"```json\n(.*?)```", page, re.DOTALL)[1])
    metrics = new_metrics(tmp_path)
    metrics.add({"rpn_losses/label_loss": torch.tensor(0.5)})
    metrics.write(20, epoch=0, host=HOST)
    assert list(example) == list(json.loads((tmp_path / "metrics.jsonl").read_text()))
    line = re.search(r"```\n(evaluation .*)\n```", page)[1]
    read = {name: re.search(pattern, line)[1] for name, pattern in SAGEMAKER_METRICS if re.search(pattern, line)}
    assert read == {"mAP(bbox)/IoU=0.5:0.95": "0.213", "mAP(bbox)/IoU=0.5": "0.384", "mAP(bbox)/IoU=0.75": "0.214"}


def board_of(run_dir: Path) -> EventAccumulator:
    board = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={SCALARS: 0, IMAGES: 0})
    board.Reload()
    return board


def test_tensorboard_shows_scalars_by_their_names_and_images_in_their_colours(tmp_path: Path) -> None:
    metrics = new_metrics(tmp_path, tensorboard=True)
    run_steps(metrics, 0, 10)
    metrics.write_eval(10, 1, SCORES)
    image = np.zeros((4, 6, 3), dtype=np.uint8)
    image[..., 2] = 255  # red, as BGR
    metrics.write_picture(10, "predictions/0", image)
    board = board_of(tmp_path)  # before close: a live TensorBoard sees it too
    metrics.close()
    records = read_metrics(tmp_path)
    for name in ("total_cost", "learning_rate", "images_per_s", "rpn_losses/label_loss"):
        shown = [(event.step, event.wall_time, event.value) for event in board.Scalars(name)]
        assert shown == [(r["step"], 1000.0, pytest.approx(r[name], rel=1e-6)) for r in records[:2]]
    assert [event.value for event in board.Scalars("mAP(bbox)/IoU=0.5:0.95")] == [pytest.approx(2 / 17)]
    (picture,) = board.Images("predictions/0")
    assert (picture.step, picture.height, picture.width) == (10, 4, 6)
    assert _decoded(picture.encoded_image_string)[0, 0].tolist() == [0, 0, 255]


def test_tensorboard_hides_what_a_killed_run_wrote_after_its_checkpoint(tmp_path: Path) -> None:
    killed = new_metrics(tmp_path, tensorboard=True)
    run_steps(killed, 0, 20)
    killed.close()
    resumed = new_metrics(tmp_path, tensorboard=True, after_step=10)
    run_steps(resumed, 10, 15)
    resumed.close()
    assert [event.step for event in board_of(tmp_path).Scalars("total_cost")] == [5, 10, 15]


def _decoded(png: bytes) -> np.ndarray:
    import cv2

    return cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_COLOR)


def test_the_short_line_has_progress_losses_rate_speed_and_time_left() -> None:
    values = {
        "epoch": 2,
        "learning_rate": 0.02,
        "images_per_s": 15.45,
        "data_wait_s": 0.005,
        "total_cost": 1.10074135,
        "rpn_losses/label_loss": 0.0264582947,
        "rpn_losses/level2/label_loss": 0.01,
        "cascade_loss_stage1/fastrcnn_losses/box_loss": 0.25,
        "fastrcnn_losses/box_loss": 0.486201644,
        "maskrcnn_loss/maskrcnn_loss": 0.260517478,
        "maskrcnn_loss/accuracy": 0.9,
        "ranks": 1,
    }
    log = ShortLog(total_steps=1000, images_per_step=4)
    assert log.line(Measurement(320, 0.0, values)) == (
        "step: 320/1000  epoch: 2  loss: 1.101  rpn_label: 0.02646  cascade_stage1_fastrcnn_box: 0.25  "
        "fastrcnn_box: 0.4862  maskrcnn: 0.2605  lr: 0.02  15.45 images/s  2 min 56 s left"
    )
    assert log.line(Measurement(1000, 0.0, values)).endswith("  15.45 images/s")


def test_metrics_go_to_standard_output_and_messages_to_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging(tmp_path, 0)
    logger.info("a message")
    ShortLog(10, 4).write(Measurement(3, 0.0, {"epoch": 0, **HOST}))
    ShortLog(10, 4).write(Measurement(3, 0.0, {"epoch": 0, **SCORES}, is_evaluation=True))
    shown = capsys.readouterr()
    assert [line.split(" ", 1)[1] for line in shown.err.splitlines()] == ["a message"]
    steps, evaluation = (line.split(" ", 1)[1] for line in shown.out.splitlines())
    assert steps.startswith("step: 3/10  epoch: 0  lr: ")
    assert all(f"  {name}: {value}" in evaluation for name, value in SCORES.items())
