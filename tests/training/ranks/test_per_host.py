"""One rank per host reads the checkpoint and compiles first; the others get what it has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from by_hand import outputs, start_ranks

from maskfleet.model.weights.checkpoint import CheckpointFolder, Snapshot
from maskfleet.training.checkpoint import write_checkpoint
from maskfleet.training.distributed import Ranks, Worker
from maskfleet.training.ranks.per_host import first_on_host, newest_snapshot

TENSORS = {
    "model/a": torch.randn(3, 5),
    "model/count": torch.tensor(7),
    "rng/cpu": torch.arange(9, dtype=torch.uint8),
    "half": torch.randn(4).to(torch.bfloat16),
}


@pytest.mark.slow
def test_one_rank_per_host_reads_the_checkpoint_and_goes_first(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoints" / "step-000000006.safetensors", Snapshot(6, TENSORS, {"lr": 0.1}))
    hosts = {"MASKFLEET_HOSTS": '[["oak", 2], ["elm", 1]]'}
    script = [str(Path(__file__).with_name("read_once.py")), str(tmp_path)]
    ranks = start_ranks([script] * 3, env=hosts)
    printed = outputs(ranks)
    assert [process.returncode for process in ranks] == [0, 0, 0], "\n".join(printed)
    gathered = json.loads((tmp_path / "gathered.json").read_text())
    assert [reads for reads, *_ in gathered] == [1, 0, 1]
    assert gathered[0][1:] == gathered[1][1:] == gathered[2][1:]
    assert gathered[0][1:3] == [6, {"lr": 0.1}]
    order = (tmp_path / "order").read_text().split()
    assert order.index("0") < order.index("1")


@pytest.mark.slow
def test_hosts_without_a_shared_folder_get_the_checkpoint_of_rank_0(tmp_path: Path) -> None:
    oak, elm = tmp_path / "oak", tmp_path / "elm"
    elm.mkdir()
    write_checkpoint(oak / "checkpoints" / "step-000000006.safetensors", Snapshot(6, TENSORS, {"lr": 0.1}))
    older = {name: tensor + 1 for name, tensor in TENSORS.items()}
    write_checkpoint(elm / "checkpoints" / "step-000000003.safetensors", Snapshot(3, older, {"lr": 0.2}))
    hosts = {"MASKFLEET_HOSTS": '[["oak", 2], ["elm", 1]]'}
    script = str(Path(__file__).with_name("read_once.py"))
    ranks = start_ranks([[script, str(oak)], [script, str(oak)], [script, str(elm)]], env=hosts)
    printed = outputs(ranks)
    assert [process.returncode for process in ranks] == [0, 0, 0], "\n".join(printed)
    gathered = json.loads((oak / "gathered.json").read_text())
    assert [step for _, step, *_ in gathered] == [6, 6, 6]
    assert gathered[0][2:] == gathered[1][2:] == gathered[2][2:]


@pytest.mark.slow
def test_a_newer_checkpoint_than_that_of_rank_0_is_an_error(tmp_path: Path) -> None:
    oak, elm = tmp_path / "oak", tmp_path / "elm"
    oak.mkdir()
    write_checkpoint(elm / "checkpoints" / "step-000000003.safetensors", Snapshot(3, TENSORS, {}))
    script = str(Path(__file__).with_name("read_once.py"))
    ranks = start_ranks([[script, str(oak)], [script, str(elm)]], env={"MASKFLEET_HOSTS": '[["oak", 1], ["elm", 1]]'})
    printed = outputs(ranks)
    assert all(process.returncode for process in ranks)
    assert all(
        "the newest checkpoint is step 3 for rank 1 on elm, but none for rank 0 on oak" in one for one in printed
    )


def test_one_rank_reads_its_own_checkpoint(tmp_path: Path) -> None:
    alone = Ranks(Worker(), None)
    folder = CheckpointFolder(tmp_path)
    assert newest_snapshot(folder, alone) is None
    write_checkpoint(tmp_path / "step-000000006.safetensors", Snapshot(6, TENSORS, {"lr": 0.1}))
    with first_on_host(alone):
        snapshot = newest_snapshot(folder, alone)
    assert snapshot is not None
    assert snapshot.tensors.keys() == TENSORS.keys()
    assert all(torch.equal(snapshot.tensors[name], tensor) for name, tensor in TENSORS.items())
