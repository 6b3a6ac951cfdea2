"""Marks of what the compiler's cache holds: for one job, one target and one cache."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from maskfleet.inference.device import CACHE_VARIABLE
from maskfleet.training.background import compiled_before
from maskfleet.training.background.artifacts import CompiledCanvas, load_artifacts, write_artifacts
from maskfleet.training.background.child import CompileJob
from maskfleet.training.background.children import Children
from maskfleet.training.background.compiled_before import all_compiled_before, mark_compiled
from maskfleet.training.background.target import Target

JOB = CompileJob({"mask": True}, 2, (64, 64), {"objects": 4}, masks=True, precision="fp32", device="cpu", split=False)
OTHER = replace(JOB, canvas=(64, 96))
CPU = torch.device("cpu")


def test_a_mark_is_for_one_job_in_one_cache_and_for_one_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = {CACHE_VARIABLE: str(tmp_path / "cache")}
    assert not all_compiled_before([JOB], env)
    mark_compiled([JOB], env)
    assert all_compiled_before([JOB], env)
    assert all_compiled_before([replace(JOB)], env)
    for other in (OTHER, replace(JOB, split=True), replace(JOB, model={"mask": False})):
        assert not all_compiled_before([JOB, other], env)
    assert not all_compiled_before([JOB], {CACHE_VARIABLE: str(tmp_path / "empty")})
    newer = Target("1", "2", "3", "another GPU")
    monkeypatch.setattr(compiled_before, "Target", type("Targets", (), {"of": staticmethod(lambda device: newer)}))
    assert not all_compiled_before([JOB], env)


def test_a_cache_that_cannot_be_written_is_logged_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    mark_compiled([JOB], {CACHE_VARIABLE: str(tmp_path / "file")})
    assert "cannot write to the cache of compiled code" in caplog.text


def test_only_children_that_succeeded_leave_a_mark(tmp_path: Path) -> None:
    env = {**os.environ, CACHE_VARIABLE: str(tmp_path)}
    program = "import json, sys; sys.exit(json.load(open(sys.argv[1]))['canvas'][1] == 96)"
    for job in (JOB, OTHER):
        children = Children([job], (sys.executable, "-S", "-c", program), env=env)
        try:
            while not children.poll()[0]:
                pass
        finally:
            children.stop()
    assert all_compiled_before([JOB], env)
    assert not all_compiled_before([OTHER], env)


@pytest.mark.parametrize("loaded", [True, False])
def test_code_that_was_loaded_from_a_file_needs_no_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: bool
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda content: object() if loaded else None)
    file = tmp_path / "file"
    write_artifacts(file, Target.of(CPU), [CompiledCanvas(JOB, b"one"), CompiledCanvas(OTHER, b"other")])
    assert not all_compiled_before([JOB])
    assert load_artifacts(file, CPU).jobs == (JOB, OTHER)
    assert all_compiled_before([JOB, OTHER]) == loaded
    assert not all_compiled_before([replace(JOB, num_images=4)])
