"""Ranks that differ from rank 0 are refused before the first step, on all ranks, with both values."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import outputs, start_ranks, train_argv
from processes import prepared

from maskfleet.config.base import replaced
from maskfleet.config.run import RunConfig
from maskfleet.data.store.annotations import open_store
from maskfleet.data.store.splits import split_from_paths
from maskfleet.data.synthetic.dataset import make_shapes
from maskfleet.errors import TrainingError
from maskfleet.model.weights.checkpoint import Snapshot
from maskfleet.training.checkpoint import write_checkpoint
from maskfleet.training.distributed import Ranks, Worker
from maskfleet.training.ranks.agreement import (
    config_facts,
    expect_same,
    expect_same_data,
    kinds_text,
    warn_if_gpus_differ,
)

HOSTS = {"MASKFLEET_HOSTS": '[["oak", 1], ["elm", 1]]'}
OTHER_VERSION = """
import sys, maskfleet
maskfleet.__version__ = "9.9.9"
from maskfleet.cli.main import main
sys.argv = ["maskfleet", "train", *sys.argv[1:]]
main()
"""


def refused(first: list[str], second: list[str]) -> str:
    """What rank 0 prints when it and another rank, on other hosts, refuse to train together."""
    ranks = start_ranks([first, second], env=HOSTS)
    printed = outputs(ranks)
    assert [process.returncode for process in ranks] == [2, 2], "\n".join(printed)
    assert "Traceback" not in "".join(printed)
    for text in printed:
        assert "the ranks differ" in text, text
        assert "rank 1 on elm" in text, text
        assert "rank 0 on oak" in text, text
    return " ".join(printed[0].split())


@pytest.mark.slow
def test_another_version_or_config_is_refused(tmp_path: Path, micro: RunConfig) -> None:
    run_dir = prepared(tmp_path, micro)
    changed = ["-c", OTHER_VERSION, str(run_dir), "--set", "train.momentum=0.25", "--set", "data.num_workers=1"]
    text = refused(train_argv(run_dir), changed)
    assert "maskfleet is 9.9.9 for rank 1" in text
    assert "0.1.0" in text
    assert "train.momentum is 0.25 for rank 1" in text
    assert "but 0.9 for rank 0" in text
    assert "num_workers" not in text  # differs from host to host without changing the result
    assert not (run_dir / "checkpoints").exists() or not list((run_dir / "checkpoints").iterdir())


@pytest.mark.slow
def test_another_data_set_is_refused(tmp_path: Path, micro: RunConfig, shapes_root: Path) -> None:
    other = tmp_path / "other"
    make_shapes(other, num_train=7, num_val=5, height=(64, 64), width=(64, 64), num_categories=2, max_objects=3, seed=4)
    run_dir = prepared(tmp_path / "run", micro)
    text = refused(train_argv(run_dir), train_argv(run_dir, "--data", str(other)))
    assert "SHA-256" in text
    assert "(7 images)" in text
    assert "(12 images)" in text


@pytest.mark.slow
def test_a_newer_checkpoint_than_rank_0_has_is_refused(tmp_path: Path, micro: RunConfig) -> None:
    trained, empty = prepared(tmp_path / "trained", micro), prepared(tmp_path / "empty", micro)
    write_checkpoint(trained / "checkpoints" / "step-000000006.safetensors", Snapshot(6, {"a": torch.zeros(1)}, {}))
    text = refused(train_argv(empty), train_argv(trained))
    assert "the newest checkpoint is step 6 for rank 1" in text
    assert "but none for rank 0" in text


class TwoRanks(Ranks):
    """Rank 0 of two, whose peer sends what the test says."""

    def __init__(self, other: object) -> None:
        super().__init__(Worker(0, 2), None, ["oak", "elm"])
        self.other = other

    def gather(self, value: object) -> list[object]:
        return [value, self.other]


def test_a_difference_names_the_fact_the_rank_the_host_and_both_values() -> None:
    with pytest.raises(TrainingError, match="colour is red for rank 1 on elm, but blue for rank 0 on oak"):
        expect_same(TwoRanks([["colour", "red", "blue"]]), {"colour": "blue"}, remedy="paint it")
    expect_same(TwoRanks([]), {"colour": "blue"}, remedy="paint it")


class SentByChief(TwoRanks):
    """Records what rank 0 sends."""

    def __init__(self) -> None:
        super().__init__([])
        self.sent: list[Any] = []

    def broadcast(self, value: Any) -> Any:
        self.sent.append(value)
        return value


def test_data_sets_whose_files_have_one_name_are_all_compared(tmp_path: Path, shapes_root: Path) -> None:
    stores = []
    for split in ("train", "val"):
        file = tmp_path / split / "_annotations.coco.json"
        file.parent.mkdir()
        shutil.copy(shapes_root / "annotations" / f"instances_{split}.json", file)
        stores.append(open_store(split_from_paths(file, shapes_root / split)))
    chief = SentByChief()
    expect_same_data(chief, stores)
    assert list(chief.sent[0].values()) == [f"{store.source_sha256} ({len(store)} images)" for store in stores]


def test_one_rank_agrees_with_itself() -> None:
    expect_same(Ranks(Worker(), None), {"colour": "blue"}, remedy="paint it")


def test_config_facts_are_fields_without_those_of_a_host(micro: RunConfig) -> None:
    facts = config_facts(micro)
    assert facts["train.momentum"] == "0.9"
    assert facts["model.fpn.channels"] == "16"
    assert facts == config_facts(replaced(micro, {"data.root": "/elsewhere", "data.num_workers": 3}))


def test_gpus_of_different_kinds_are_listed_once(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(Worker(0, 4), None, ["oak", "oak", "elm", "elm"])
    kinds = ["H100 with 80 GiB"] * 2 + ["A100 with 40 GiB"] * 2
    listed = "H100 with 80 GiB: ranks 0-1 on oak; A100 with 40 GiB: ranks 2-3 on elm"
    assert kinds_text(ranks, kinds) == listed
    with caplog.at_level(logging.WARNING):
        warn_if_gpus_differ(TwoRanks("A100 with 40 GiB"), torch.device("cpu"))
        warn_if_gpus_differ(TwoRanks("CPU"), torch.device("cpu"))
    assert [record.message for record in caplog.records] == [
        "the ranks have different devices, and the slowest sets the pace: "
        "CPU: rank 0 on oak; A100 with 40 GiB: rank 1 on elm"
    ]
