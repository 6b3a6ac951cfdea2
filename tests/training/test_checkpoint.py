"""Checkpoints are whole or not there."""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from maskfleet.errors import TrainingError
from maskfleet.model.weights.checkpoint import DamagedCheckpointError, Snapshot, read_checkpoint
from maskfleet.training import checkpoint
from maskfleet.training.checkpoint import CheckpointStore, HostCopies, write_checkpoint


def snapshot(step: int) -> Snapshot:
    tensors = {"model/w": torch.arange(6.0).reshape(2, 3) + step, "rng": torch.arange(5, dtype=torch.uint8)}
    return Snapshot(step, tensors, {"scale": 0.1 + step, "none": None, "list": [1, 2.5]})


def store(folder: Path, keep_last: int = 3) -> CheckpointStore:
    return CheckpointStore(folder, keep_last=keep_last)


def save_all(target: CheckpointStore, *steps: int, best: int | None = None) -> None:
    for step in steps:
        target.save(snapshot(step))
        if step == best:
            target.update(step, {}, best=True)
    target.wait()


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "step-000000007.safetensors", snapshot(7))
    found = read_checkpoint(tmp_path / "step-000000007.safetensors")
    assert found.step == 7
    assert found.numbers == {"scale": 7.1, "none": None, "list": [1, 2.5]}
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in snapshot(7).tensors.items())
    assert found.tensors.keys() == snapshot(7).tensors.keys()


def test_the_newest_are_kept_and_the_best_besides(tmp_path: Path) -> None:
    target = store(tmp_path, keep_last=2)
    save_all(target, 1, 2, 3, 4, 5, best=2)
    assert target.saved.steps() == [2, 4, 5]
    assert target.saved.best_step() == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        f"step-00000000{step}.{suffix}" for step in (2, 4, 5) for suffix in ("json", "safetensors")
    )


def test_a_newer_best_replaces_the_older_one(tmp_path: Path) -> None:
    target = store(tmp_path, keep_last=1)
    save_all(target, 1, best=1)
    save_all(target, 2, 3, best=2)
    assert target.saved.steps() == [2, 3]


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "manifest"])
def test_a_damaged_newest_falls_back_to_the_one_before(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = store(tmp_path)
    save_all(target, 1, 2)
    path = target.saved.path(2)
    match damage:
        case "flip":
            data = bytearray(path.read_bytes())
            data[-3] ^= 1
            path.write_bytes(data)
        case "cut":
            os.truncate(path, path.stat().st_size - 1)
        case "gone":
            path.unlink()
        case "manifest":
            path.with_suffix(".json").write_text('{"size": 1')
    found = target.saved.newest()
    assert found is not None
    assert found.step == 1
    assert "using step 1" in caplog.text
    assert str(path) in caplog.text


@contextmanager
def unreadable(path: Path, number: int) -> Iterator[None]:
    """Inside the block the file system answers with error `number` whenever `path` is opened or listed."""

    def refusing(function: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(file: Any, *arguments: Any, **options: Any) -> Any:
            if file == path:
                raise OSError(number, os.strerror(number))
            return function(file, *arguments, **options)

        return guarded

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "open", refusing(io.open))
        patch.setattr(os, "listdir", refusing(os.listdir))
        patch.setattr(os, "scandir", refusing(os.scandir))
        yield


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
@pytest.mark.parametrize("what", ["step-000000002.safetensors", "step-000000002.json", ""])
def test_what_cannot_be_read_now_is_neither_damaged_nor_absent(tmp_path: Path, what: str, number: int) -> None:
    target = store(tmp_path)
    save_all(target, 1, 2)
    path = tmp_path / what
    with unreadable(path, number), pytest.raises(TrainingError, match="cannot be read") as caught:
        target.saved.newest()
    assert caught.value.what == f"{path} cannot be read: {os.strerror(number)}"
    assert ("right to read" if number == errno.EACCES else "run the same command again") in caught.value.remedy
    newest = target.saved.newest()
    assert newest is not None
    assert newest.step == 2


def test_a_checkpoint_that_cannot_be_read_now_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = store(tmp_path, keep_last=1)
    for step in (1, 2):
        write_checkpoint(target.saved.path(step), snapshot(step))
    with unreadable(tmp_path / "step-000000002.json", errno.ESTALE):
        save_all(target, 3)
    assert target.saved.steps() == [2, 3]
    assert "step-000000002.safetensors cannot be read now; it is kept" in caplog.text


def test_all_damaged_is_an_error_and_deletes_nothing(tmp_path: Path) -> None:
    target = store(tmp_path)
    save_all(target, 1)
    target.saved.path(1).write_bytes(b"rubbish")
    with pytest.raises(TrainingError, match="all 1 checkpoints"):
        target.saved.newest()
    assert target.saved.path(1).exists()


def test_a_file_without_its_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    target = store(tmp_path)
    save_all(target, 1, 2)
    target.saved.path(2).with_suffix(".json").unlink()
    assert target.saved.steps() == [1]


def test_a_full_disk_is_an_error_with_a_remedy_and_spares_the_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = store(tmp_path)
    save_all(target, 1)

    def full(tensors: object, path: Path, **options: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    target.save(snapshot(2))
    with pytest.raises(TrainingError) as caught:
        target.wait()
    assert "No space left on device" in caught.value.what
    assert "the older checkpoints are intact" in caught.value.what
    assert "keep_last" in caught.value.remedy
    assert target.saved.steps() == [1]
    assert not list(tmp_path.glob(".*"))


def test_copies_do_not_follow_the_training() -> None:
    weight = torch.zeros(3)
    copies = HostCopies().of({"w": weight})
    weight.add_(1)
    assert copies["w"].tolist() == [0, 0, 0]


def test_copies_reuse_their_buffers() -> None:
    copies = HostCopies()
    first = copies.of({"w": torch.zeros(3)})["w"].data_ptr()
    assert copies.of({"w": torch.ones(3)})["w"].data_ptr() == first
    assert copies.of({"w": torch.ones(4)})["w"].tolist() == [1, 1, 1, 1]


def test_a_save_waits_for_the_one_before_it(tmp_path: Path) -> None:
    target = store(tmp_path)
    weight = torch.zeros(1_000_000)
    for step in (1, 2, 3):
        weight.fill_(step)
        target.save(Snapshot(step, {"w": weight}, {}))
    target.wait()
    assert [float(read_checkpoint(target.saved.path(step)).tensors["w"][-1]) for step in (1, 2, 3)] == [1, 2, 3]


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "FORMAT", 99)
    path = tmp_path / "step-000000001.safetensors"
    write_checkpoint(path, snapshot(1))
    monkeypatch.setattr(checkpoint, "FORMAT", 1)
    assert json.loads(path.with_suffix(".json").read_text())["format"] == 99
    with pytest.raises(TrainingError, match="newer maskfleet"):
        read_checkpoint(path)
    write_checkpoint(tmp_path / "step-000000000.safetensors", snapshot(0))
    with pytest.raises(TrainingError, match="newer maskfleet"):
        store(tmp_path).saved.newest()  # older steps are not used silently


def bare(folder: Path, step: int) -> Path:
    """Tensors without their manifest, as a kill at the right moment leaves them."""
    path = folder / f"step-{step:09d}.safetensors"
    write_checkpoint(path, snapshot(step))
    path.with_suffix(".json").unlink()
    return path


@pytest.mark.parametrize("failure", [RuntimeError("a bug"), MemoryError(), KeyError("w")])
def test_whatever_fails_in_the_writer_reaches_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise failure

    target = store(tmp_path)
    monkeypatch.setattr(checkpoint, "save_file", fail)
    target.save(snapshot(2))
    with pytest.raises((type(failure), TrainingError)):
        target.wait()


def test_older_checkpoints_are_only_called_intact_if_there_are_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    target = store(tmp_path)
    monkeypatch.setattr(checkpoint, "save_file", fail)
    target.save(snapshot(2))
    with pytest.raises(TrainingError, match="there is no older checkpoint"):
        target.wait()


@pytest.mark.parametrize(
    "content",
    [
        "",
        '{"size": 1',
        "null",
        "[1]",
        "{}",
        '{"size": "1", "sha256": 2}',
        '{"size": 1, "sha256": "a", "numbers": 3}',
        "\ud800",
    ],
)
def test_a_damaged_manifest_is_a_damaged_checkpoint(tmp_path: Path, content: str) -> None:
    target = store(tmp_path)
    save_all(target, 1, 2, 3, best=2)
    target.saved.path(1).with_suffix(".json").write_text(content, errors="surrogatepass")
    with pytest.raises(DamagedCheckpointError, match="no readable manifest"):
        read_checkpoint(target.saved.path(1))
    assert target.saved.best_step() == 2
    assert target.saved.intact_steps() == [2, 3]
    newest = target.saved.newest()
    assert newest is not None
    assert newest.step == 3


def test_damaged_checkpoints_do_not_count_as_kept_and_are_deleted_once_a_newer_one_is_complete(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = store(tmp_path, keep_last=2)
    for step in (1, 2, 3, 4):
        write_checkpoint(target.saved.path(step), snapshot(step), best=step == 1)
    target.saved.path(3).with_suffix(".json").write_text("")
    os.truncate(target.saved.path(4), 5)
    save_all(target, 5)
    assert target.saved.steps() == [1, 2, 5]
    for step in (3, 4):
        assert f"deleting checkpoint {target.saved.path(step)}, which is damaged" in caplog.text
        assert not target.saved.path(step).exists()


def test_checkpoints_after_the_one_that_was_resumed_from_are_deleted(tmp_path: Path) -> None:
    target = store(tmp_path)
    save_all(target, 1, 2, 3)
    data = bytearray(target.saved.path(3).read_bytes())
    data[-3] ^= 1  # its size is right, so that it looks intact
    target.saved.path(3).write_bytes(data)
    resumed = target.saved.newest()
    assert resumed is not None
    target.clean_up(resumed.step)
    assert target.saved.steps() == [1, 2]


def test_what_killed_processes_left_is_deleted_at_the_start(tmp_path: Path) -> None:
    target = store(tmp_path, keep_last=1)
    for step in (1, 3, 4):
        write_checkpoint(target.saved.path(step), snapshot(step))
    older, newer = bare(tmp_path, 2), bare(tmp_path, 9)
    temporaries = [tmp_path / ".step-000000005.safetensors.1f.tmp", tmp_path / ".tmpnz7B3S"]
    for path in temporaries:
        path.write_bytes(b"half")
    target.clean_up(4)
    assert not older.exists()
    assert newer.exists()  # it may be all there is of a later state
    assert not any(path.exists() for path in temporaries)
    assert target.saved.steps() == [4]  # so that a lower keep_last frees a full disk


def test_without_an_intact_checkpoint_only_temporary_files_are_deleted(tmp_path: Path) -> None:
    target = store(tmp_path / "absent")
    target.clean_up(None)
    target = store(tmp_path)
    left = bare(tmp_path, 2)
    (tmp_path / ".tmpnz7B3S").write_bytes(b"half")
    target.clean_up(None)
    assert list(tmp_path.iterdir()) == [left]


def test_an_update_marks_the_best_and_replaces_numbers(tmp_path: Path) -> None:
    target = store(tmp_path, keep_last=1)
    save_all(target, 1, best=1)
    target.save(snapshot(2))
    target.update(2, {"none": 0.5}, best=True)
    assert target.saved.steps() == [2]
    assert target.saved.best_step() == 2
    assert read_checkpoint(target.saved.path(2)).numbers == snapshot(2).numbers | {"none": 0.5}
