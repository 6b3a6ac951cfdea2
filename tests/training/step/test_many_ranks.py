"""Several ranks, eager and compiled with a stand-in for CUDA graphs: the same weights as one rank, and one fate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import ENV, LONG_S, as_ranks, copy_of_first_checkpoint, losses, prepared, same_weights
from safetensors.torch import load_file

from maskfleet.config.base import replaced
from maskfleet.config.run import RunConfig

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("many_ranks.py")
ACCURACY = 1e-6  # of weights that moved by about 0.1


class Results:
    """What `many_ranks.py` saved."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reports: dict[str, list[dict[str, Any]]] = json.loads((folder / "reports.json").read_text())

    def weights(self, case: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / f"{case}.safetensors")


def results(folder: Path, micro: RunConfig, ranks: int) -> Results:
    prepared(folder, micro)
    env = {**ENV, "PYTHONPATH": os.pathsep.join(map(str, (SCRIPT.parents[1], SCRIPT.parents[2])))}
    arguments = [str(SCRIPT), str(folder), str(folder)]
    argv = as_ranks(ranks, folder, arguments) if ranks > 1 else [sys.executable, *arguments]
    subprocess.run(argv, env=env, check=True, timeout=LONG_S)
    return Results(folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, micro: RunConfig) -> Results:
    return results(tmp_path_factory.mktemp("alone"), micro, 1)


@pytest.fixture(scope="module", params=[2, 4])
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, micro: RunConfig) -> Results:
    return results(tmp_path_factory.mktemp("together"), micro, request.param)


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((value - other[name]).abs().max()) for name, value in one.items())


def test_all_ranks_end_with_the_same_bits(together: Results) -> None:
    assert {case: [r["same_weights"] for r in reports] for case, reports in together.reports.items()} == {
        case: [True] * len(reports) for case, reports in together.reports.items()
    }


@pytest.mark.parametrize("how", ["eager", "whole"])
@pytest.mark.parametrize("rest", ["", "_accumulated", "_sync", "_sync_accumulated"])
def test_images_of_several_ranks_move_the_weights_like_those_of_one(
    how: str, rest: str, alone: Results, together: Results
) -> None:
    case = f"{how}{rest}"
    assert largest_difference(alone.weights(case), together.weights(case)) <= ACCURACY


RECORDED = ["whole", "in_parts", "whole_accumulated", "in_parts_accumulated", "whole_sync", "whole_sync_accumulated"]


@pytest.mark.parametrize("recorded", RECORDED)
def test_recorded_steps_are_the_eager_ones(recorded: str, together: Results) -> None:
    eager = recorded.replace("whole", "eager").replace("in_parts", "eager")
    for expected, report in zip(together.reports[eager], together.reports[recorded], strict=True):
        assert report["runner"] == "CompiledStepRunner"
        assert report["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert largest_difference(together.weights(eager), together.weights(recorded)) <= ACCURACY


def test_gradients_sent_as_bf16_are_near_those_of_fp32(together: Results) -> None:
    exact, rounded = together.weights("whole"), together.weights("whole_bf16")
    assert 0 < largest_difference(exact, rounded) < 0.05
    for expected, report in zip(together.reports["whole"], together.reports["whole_bf16"], strict=True):
        assert report["losses"] == pytest.approx(expected["losses"], rel=0.02)


EAGER_ON_ALL_RANKS = {
    "one_rank_cannot_compile": "eager",
    "one_rank_cannot_record": "eager",
    "in_parts_sync": "eager_sync",  # statistics cannot wait for the end of a recording
    "one_rank_has_another_order": "eager_sync",
}


@pytest.mark.parametrize("case", EAGER_ON_ALL_RANKS)
def test_if_one_rank_cannot_compile_all_are_eager(case: str, together: Results) -> None:
    eager = EAGER_ON_ALL_RANKS[case]
    for expected, report in zip(together.reports[eager], together.reports[case], strict=True):
        assert report["runner"] == "StepRunner"
        assert report["losses"] == expected["losses"]
    assert largest_difference(together.weights(eager), together.weights(case)) == 0


@pytest.mark.parametrize("how", ["eager", "whole", "in_parts"])
@pytest.mark.parametrize(("accumulated", "step"), [("", 2), ("_accumulated", 3)])
def test_a_loss_that_is_not_finite_stops_all_ranks_and_names_the_images_of_its_rank(
    how: str, accumulated: str, step: int, together: Results
) -> None:
    reports = together.reports[f"{how}_nan{accumulated}"]
    good = together.reports[f"{how}{accumulated}"]
    for report, unharmed in zip(reports, good, strict=True):
        assert report["failed_at"] == step
        assert report["unchanged"]
        assert report["losses"][:2] == unharmed["losses"][:2]
        assert "box_loss = nan" in report["error"]
        assert report["error"] == reports[0]["error"]
    images = ", ".join(map(str, reports[1]["bad_images"]))
    assert f"on rank 1, images {images}; the weights are unchanged" in reports[0]["error"]


def compiled_run(run_dir: Path) -> str:
    argv = as_ranks(2, run_dir, [str(SCRIPT.with_name("rerun_train.py")), "train", str(run_dir)])
    done = subprocess.run(argv, env=ENV, capture_output=True, text=True, check=False, timeout=LONG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_compiled_run_of_two_ranks_resumes_with_the_same_bits(tmp_path: Path, micro: RunConfig) -> None:
    changes = {"train.images_per_gpu": 1, "train.accumulate_to_images": 4, "train.ema_decay": 0.9}
    config = replaced(micro, changes | {"train.compile": True, "eval.every_epochs": 0})
    whole = prepared(tmp_path / "whole", config)
    output = compiled_run(whole)
    assert "compiled the step for images of 64 x 64" in output
    assert "eager" not in output
    resumed = copy_of_first_checkpoint(whole, tmp_path / "resumed")
    assert "resuming after step 6" in compiled_run(resumed)
    assert losses(resumed) == losses(whole)
    assert same_weights(resumed, whole)
