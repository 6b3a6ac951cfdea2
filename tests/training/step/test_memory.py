"""A training step that does not fit into the memory of the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist

from maskfleet.config.base import replaced
from maskfleet.config.run import RunConfig
from maskfleet.errors import TrainingError
from maskfleet.launch.explain import explain_lines
from maskfleet.training.distributed import Ranks, Worker
from maskfleet.training.ranks.watchdog import Watchdog
from maskfleet.training.run import train
from maskfleet.training.step.eager import StepRunner
from maskfleet.training.step.memory import explaining_full_memory

CPU = torch.device("cpu")
ERRORS = [
    torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 1.17 GiB. GPU 3 has a total capacity of 15.77 GiB of which 870.44 MiB "
        "is free. Of the allocated memory 13.62 GiB is allocated by PyTorch, and 312.55 MiB is reserved by PyTorch but "
        "unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    ),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other call"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    dist.DistBackendError(
        "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error, NCCL version 2.28.9\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
    ),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: str(error).partition("\n")[0][:40])
def test_whoever_says_that_the_memory_is_full_the_error_names_settings(error: Exception) -> None:
    config = RunConfig.model_validate({"train": {"images_per_gpu": 4}, "model": {"max_size_px": 1333}})
    with (
        pytest.raises(TrainingError, match="does not fit into the memory") as caught,
        explaining_full_memory(config, CPU),
    ):
        raise error
    assert "train.images_per_gpu=4, train.precision=fp32 and long sides of up to 1333 px" in caught.value.what
    for field in ("train.images_per_gpu", "train.precision=bf16", "data.train_short_edge_px", "model.max_size_px"):
        assert field in caught.value.remedy
    explanation = explain_lines([f"[rank0]: error: {caught.value.what}"])
    assert explanation.cause is not None
    assert explanation.cause.name == "gpu memory"


def test_the_figures_stay_and_the_advice_for_programmers_goes() -> None:
    with pytest.raises(TrainingError) as caught, explaining_full_memory(RunConfig(), CPU):
        raise ERRORS[0]
    assert "870.44 MiB is free" in caught.value.what
    assert "PYTORCH_CUDA_ALLOC_CONF" not in caught.value.what


def test_what_cannot_be_lowered_is_not_advised() -> None:
    config = replaced(RunConfig(), {"train.images_per_gpu": 1, "train.precision": "bf16"})
    with pytest.raises(TrainingError) as caught, explaining_full_memory(config, CPU):
        raise ERRORS[0]
    assert "images_per_gpu" not in caught.value.remedy
    assert "bf16" not in caught.value.remedy


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="shape mismatch"), explaining_full_memory(RunConfig(), CPU):
        raise RuntimeError("shape mismatch")


def test_a_full_memory_inside_nccl_is_no_lost_rank() -> None:
    dog = Watchdog(dist.HashStore(), 0, ["oak"], timeout_s=60)
    ranks = Ranks(Worker(), None, ["oak"], dog)
    with pytest.raises(dist.DistBackendError), ranks.reporting_lost_ranks("in a step"):
        raise ERRORS[-1]
    dog.stop()


@pytest.mark.slow
def test_a_run_whose_step_does_not_fit_ends_with_a_remedy(
    tmp_path: Path, micro: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **options: object) -> NoReturn:
        raise ERRORS[0]

    monkeypatch.setattr(StepRunner, "step", full)
    with pytest.raises(TrainingError, match=r"870\.44 MiB is free") as caught:
        train(micro, tmp_path)
    assert "train.images_per_gpu" in caught.value.remedy
