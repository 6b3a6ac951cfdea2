"""Folders of compiled code, on a shared file system and in images."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from maskfleet.errors import ConfigError
from maskfleet.inference.device import CACHE_VARIABLE
from maskfleet.system.rank_variables import COMPILED_CODE
from maskfleet.training.background import shared
from maskfleet.training.background.artifacts import CompiledCanvas, write_artifacts
from maskfleet.training.background.child import CompileJob
from maskfleet.training.background.children import Children
from maskfleet.training.background.compiled_before import all_compiled_before, mark_compiled
from maskfleet.training.background.shared import files_to_write, load_compiled, named_for_runs, shared_name
from maskfleet.training.background.target import Target

JOB = CompileJob({"mask": True}, 2, (64, 64), {"objects": 4}, masks=True, precision="fp32", device="cpu", split=False)
JOBS = [JOB, replace(JOB, canvas=(64, 96))]
TARGET = Target.of(torch.device("cpu"))
COMPILE = "import json, sys; open(sys.argv[2], 'w').write(str(json.load(open(sys.argv[1]))['canvas'][1]))"


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[bytes]:
    """What torch was given to load, on a machine whose own cache and image are empty."""
    parts: list[bytes] = []
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda part: parts.append(part) or parts)
    monkeypatch.setattr(shared, "IMAGE_FOLDER", tmp_path / "image")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return parts


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    write_artifacts(path, TARGET, [CompiledCanvas(job, content) for job in JOBS])


def test_a_run_on_another_machine_finds_what_the_first_one_compiled(tmp_path: Path, loaded: list[bytes]) -> None:
    env = {**os.environ, COMPILED_CODE: str(tmp_path / "shared")}
    (tmp_path / "first").mkdir()
    files = files_to_write(JOBS, tmp_path / "first", env)
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o700
    elsewhere = {**env, CACHE_VARIABLE: str(tmp_path / "other cache")}
    children = Children(JOBS, (sys.executable, "-S", "-c", COMPILE), files, elsewhere)
    try:
        while not children.poll()[0]:
            pass
    finally:
        children.stop()
    assert [file.read_bytes()[-4:] for file in files] == [b"6496", b"6496"]
    assert files[0] == tmp_path / "first" / "compiled.cache"
    assert not all_compiled_before(JOBS)
    load_compiled(JOBS, tmp_path / "second", env)
    assert loaded == [b"64", b"96"]
    assert all_compiled_before(JOBS)
    load_compiled(JOBS, tmp_path / "third", env)
    assert len(loaded) == 2, "the cache of this machine has it by now"


def test_the_shared_folder_comes_first_then_the_image_then_the_run(tmp_path: Path, loaded: list[bytes]) -> None:
    env = {**os.environ, COMPILED_CODE: str(tmp_path / "shared")}
    name = shared_name(JOBS, TARGET)
    files = [tmp_path / "shared" / name, tmp_path / "image" / name, tmp_path / "run" / "compiled.cache"]
    for content, file in enumerate(files):
        write(file, str(content).encode())
    for file in files:
        load_compiled(JOBS, tmp_path / "run", env)
        for mark in (tmp_path / "cache").rglob("*"):
            if mark.is_file():
                mark.unlink()
        file.unlink()
    load_compiled(JOBS, tmp_path / "run", env)
    assert loaded == [b"0", b"0", b"1", b"1", b"2", b"2"]


def test_a_file_that_cannot_be_used_does_not_hide_the_next_one(
    tmp_path: Path, loaded: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    env = {**os.environ, COMPILED_CODE: str(tmp_path / "shared")}
    name = shared_name(JOBS, TARGET)
    write(tmp_path / "shared" / name, b"of another user")
    (tmp_path / "shared" / name).chmod(0o666)
    write(tmp_path / "image" / name, b"of the image")
    load_compiled(JOBS, tmp_path, env)
    assert "other users can write" in caplog.text
    assert loaded == [b"of the image"] * 2


def test_without_a_folder_only_the_run_keeps_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert files_to_write(JOBS, tmp_path, {}) == [tmp_path / "compiled.cache"]
    (tmp_path / "file").write_text("")
    env = {COMPILED_CODE: str(tmp_path / "file" / "folder")}
    assert files_to_write(JOBS, tmp_path, env) == [tmp_path / "compiled.cache"]
    assert "compiled code is not shared" in caplog.text


def test_another_step_gpu_or_version_has_another_name() -> None:
    others = [[JOB], [replace(JOB, num_images=4), JOBS[1]], JOBS[::-1]]
    names = {shared_name(jobs, TARGET) for jobs in [JOBS, *others]}
    names |= {shared_name(JOBS, replace(TARGET, device="NVIDIA H200")), shared_name(JOBS, replace(TARGET, pytorch="2"))}
    assert len(names) == 6


def test_files_for_an_image_get_the_names_that_runs_seek(tmp_path: Path) -> None:
    write(tmp_path / "mine", b"code")
    assert named_for_runs([tmp_path / "mine"]) == {shared_name(JOBS, TARGET): tmp_path / "mine"}
    write_artifacts(tmp_path / "old", replace(TARGET, maskfleet="0.0.1"), [CompiledCanvas(JOB, b"code")])
    with pytest.raises(ConfigError, match=r"compiled by maskfleet 0\.0\.1"):
        named_for_runs([tmp_path / "old"])


def test_a_cache_that_has_it_needs_no_file(tmp_path: Path, loaded: list[bytes]) -> None:
    write(tmp_path / "compiled.cache", b"code")
    mark_compiled(JOBS)
    load_compiled(JOBS, tmp_path)
    assert not loaded
