"""Failures as they were recorded, each mapped to its cause.

Most were provoked with the real trainer and the real torchrun, mpirun and ssh on a machine without a GPU. Those that
need GPUs or a broken file system are put together from the messages that torch, NCCL and the kernel print.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from maskfleet.launch.causes import CAUSES
from maskfleet.launch.explain import explain_lines

FOLDER = Path(__file__).parent / "golden" / "failures"

EXPECTED = {
    "bad-annotations": "bad data",
    "bad-config": "bad config",
    "bus-error": "shared memory",
    "data-worker": "data worker died",
    "disk-full": "disk full",
    "gpu-assert": "gpu code",
    "gpu-driver": "gpu driver",
    "gpu-ecc": "gpu broken",
    "gpu-memory": "gpu memory",
    "host-memory": "host memory",
    "kernel-oom": "host memory",
    "killed": "killed",
    "killed-one-of-two": "killed",
    "missing-annotations": "missing data",
    "missing-data-folder": "missing data",
    "missing-images": "missing data",
    "missing-weights": "weights",
    "mpi-host-down": "host unreachable",
    "mpi-slots": "mpi slots",
    "nccl-network": "nccl network",
    "nccl-timeout": "nccl timeout",
    "no-module": "version mismatch",
    "not-a-number": "not a number",
    "not-shared": "run directory not shared",
    "port-in-use": "port in use",
    "rendezvous-timeout": "rendezvous",
    "run-directory-in-use": "run directory in use",
    "segfault": "crash",
    "shared-memory": "shared memory",
    "stale-nfs": "file system",
    "stopped": "stopped",
    "too-few-gpus": "gpu missing",
    "unknown-host": "host unreachable",
    "wrong-categories": "bad config",
}
FIRST_RANK = {
    "gpu-memory": 3,
    "nccl-network": 8,
    "gpu-ecc": 2,
    "gpu-assert": 1,
    "too-few-gpus": 7,
    "disk-full": 0,
    "killed-one-of-two": 1,
}


def lines_of(name: str) -> list[str]:
    return (FOLDER / f"{name}.log").read_text().splitlines()


def test_every_recorded_failure_has_a_verdict() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(EXPECTED)
    assert len(EXPECTED) >= 20


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_recorded_failure_is_mapped_to_its_cause(name: str) -> None:
    explanation = explain_lines(lines_of(name))
    found = explanation.cause.name if explanation.cause else None
    assert found == EXPECTED[name], explanation.render()
    text = explanation.render()
    assert f"cause: {found}." in text
    assert "→" in text
    assert explanation.evidence.strip()[:20] in "\n".join(lines_of(name))


@pytest.mark.parametrize("name", sorted(FIRST_RANK))
def test_the_first_rank_that_failed_is_named_with_its_own_words(name: str) -> None:
    explanation = explain_lines(lines_of(name))
    assert explanation.rank == FIRST_RANK[name]
    assert explanation.trace
    assert "torch.distributed.elastic" not in "\n".join(explanation.trace)


def test_a_run_that_went_well_has_no_cause() -> None:
    lines = [line for line in lines_of("stopped") if "step: " in line]
    assert lines
    explanation = explain_lines(lines)
    assert explanation.cause is None
    assert "not known" in explanation.render()


def test_the_first_failure_wins_over_what_others_say_about_it() -> None:
    lines = lines_of("gpu-memory")
    echo_first = [lines[-2], lines[-1], *lines[:-2]]
    explanation = explain_lines(echo_first)
    assert (explanation.rank, explanation.cause and explanation.cause.name) == (3, "gpu memory")


def test_causes_have_names_of_their_own() -> None:
    assert len({cause.name for cause in CAUSES}) == len(CAUSES) >= 25


def test_the_page_on_troubleshooting_lists_every_cause() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "troubleshooting.md").read_text()
    for cause in CAUSES:
        next_step = cause.next_step.replace("|", "\\|")  # in a table a pipe ends the cell, in backticks too
        assert f"| {cause.name} | {cause.meaning} | {next_step} |\n" in page
