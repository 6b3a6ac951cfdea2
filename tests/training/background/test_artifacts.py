"""Files of compiled code: what they say, when they are refused, and that they save another machine the compiler."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from maskfleet.cli.main import app
from maskfleet.errors import MaskfleetError
from maskfleet.training.background import artifacts, save
from maskfleet.training.background.artifacts import (
    CompiledCanvas,
    expect_only_own,
    load_artifacts,
    load_if_there,
    read_header,
    write_artifacts,
)
from maskfleet.training.background.child import CompileJob
from maskfleet.training.background.children import Children
from maskfleet.training.background.save import record_jobs
from maskfleet.training.background.target import Target

CPU = torch.device("cpu")
CAPACITY = {"objects": 4, "crowds": 0, "edges": 16, "parts": 1}
JOB = CompileJob({}, 2, (800, 1344), CAPACITY, True, "fp32", "cpu", False)
PARTS = [CompiledCanvas(JOB, b"one"), CompiledCanvas(dataclasses.replace(JOB, canvas=(1344, 800)), b"three")]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What torch was given to load."""
    parts: list[bytes] = []
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", parts.append)
    return parts


def test_a_file_says_what_it_is_for_and_its_parts_are_loaded_one_by_one(tmp_path: Path, loaded: list[bytes]) -> None:
    path = tmp_path / "file"
    write_artifacts(path, Target.of(CPU), PARTS)
    header = read_header(path)
    assert (header.target, header.canvases) == (Target.of(CPU), ((800, 1344), (1344, 800)))
    assert not loaded
    load_artifacts(path, CPU)
    assert loaded == [b"one", b"three"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_code_for_another_gpu_or_version_is_not_loaded(
    tmp_path: Path, loaded: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    write_artifacts(path, dataclasses.replace(Target.of(CPU), device="NVIDIA H200", pytorch="1.0"), PARTS)
    with pytest.raises(MaskfleetError, match=r"device CPU instead of NVIDIA H200"):
        load_artifacts(path, CPU)
    load_if_there(path, CPU)
    assert "another target" in caplog.text
    load_if_there(tmp_path / "none", CPU)
    assert not loaded


@pytest.mark.parametrize("damage", [b"", b"x" * 100, (5).to_bytes(8, "little") + b"[1,2]"])
def test_a_damaged_file_is_an_error(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(damage)
    with pytest.raises(MaskfleetError, match="damaged"):
        read_header(path)


@pytest.mark.parametrize("jobs", [[], [1], [{"canvas": ["\x1b[2J", 8]}], [{}]])
def test_a_header_that_does_not_describe_the_parts_is_an_error(tmp_path: Path, jobs: list[Any]) -> None:
    path = tmp_path / "file"
    write_artifacts(path, Target.of(CPU), PARTS[:1])
    text = json.dumps(dataclasses.asdict(read_header(path)) | {"jobs": jobs}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"one")
    with pytest.raises(MaskfleetError, match="damaged"):
        read_header(path)


def test_a_changed_byte_is_noticed(tmp_path: Path, loaded: list[bytes]) -> None:
    path = tmp_path / "file"
    write_artifacts(path, Target.of(CPU), PARTS)
    path.write_bytes(path.read_bytes()[:-1] + b"X")
    with pytest.raises(MaskfleetError, match="damaged"):
        load_artifacts(path, CPU)
    assert not loaded


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_other_users_could_have_written_is_not_loaded(tmp_path: Path, loaded: list[bytes], what: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o755)
    path = folder / "file"
    write_artifacts(path, Target.of(CPU), PARTS)
    expect_only_own(path)
    (path if what == "file" else folder).chmod(0o777)
    with pytest.raises(MaskfleetError, match="other users can write") as caught:
        load_artifacts(path, CPU)
    assert "chmod go-w" in caught.value.remedy
    assert not loaded


def test_cache_info_prints_the_header(tmp_path: Path) -> None:
    write_artifacts(tmp_path / "file", Target.of(CPU), PARTS)
    result = CliRunner().invoke(app, ["cache", "info", str(tmp_path / "file")])
    assert result.exit_code == 0
    assert "800 x 1344, 1344 x 800" in result.stdout
    assert torch.__version__ in result.stdout


def test_cache_save_compiles_what_the_run_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [dataclasses.replace(JOB, canvas=(64, width)) for width in (96, 64)]
    record_jobs(tmp_path, jobs)
    text = "import sys, json; open(sys.argv[2], 'w').write(str(json.load(open(sys.argv[1]))['canvas'][1]))"
    monkeypatch.setattr(save, "Children", partial(Children, command=(sys.executable, "-S", "-c", text)))
    result = CliRunner().invoke(app, ["cache", "save", str(tmp_path), str(tmp_path / "file")])
    assert result.exit_code == 0, result.output
    assert read_header(tmp_path / "file").canvases == ((64, 96), (64, 64))
    assert (tmp_path / "file").read_bytes().endswith(b"9664")


def test_cache_save_that_cannot_write_is_an_error_although_an_older_file_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    write_artifacts(file, Target.of(CPU), [CompiledCanvas(dataclasses.replace(JOB, canvas=(1, 8)), b"older")])
    record_jobs(tmp_path, [JOB])
    text = "import sys; open(sys.argv[2], 'w').close()"
    monkeypatch.setattr(save, "Children", partial(Children, command=(sys.executable, "-S", "-c", text)))

    def full(path: Path, content: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(artifacts, "write_atomically", full)
    result = CliRunner().invoke(app, ["cache", "save", str(tmp_path), str(file)])
    assert isinstance(result.exception, MaskfleetError)
    assert result.exception.what == f"cannot write {file}: No space left on device"
    assert read_header(file).canvases == ((1, 8),)


def test_cache_save_of_a_run_that_compiled_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MaskfleetError, match="holds no run that compiled"):
        save.save_compiled(tmp_path, tmp_path / "file")


@pytest.mark.slow
def test_compiled_code_spares_another_machine_the_compiler(tmp_path: Path) -> None:
    # A whole model takes minutes with Inductor's C++, so this compiles one line.
    text = (
        "import sys, torch; from pathlib import Path; from torch._dynamo.utils import counters\n"
        "from maskfleet.training.background.artifacts import *\n"
        "from maskfleet.training.background.child import CompileJob\n"
        "path, cpu = Path(sys.argv[2]), torch.device('cpu')\n"
        "job = CompileJob({}, 1, (1, 8), {}, True, 'fp32', 'cpu', False)\n"
        "if sys.argv[1] == 'load': load_artifacts(path, cpu)\n"
        "torch.compile(lambda x: torch.sin(x) * 2)(torch.ones(8))\n"
        "if sys.argv[1] == 'save':\n"
        "    parts = [CompiledCanvas(job, torch.compiler.save_cache_artifacts()[0])]\n"
        "    write_artifacts(path, Target.of(cpu), parts)\n"
        "print(counters['inductor']['fxgraph_cache_hit'], counters['inductor']['fxgraph_cache_miss'])"
    )
    seen = []
    for action in ("save", "load"):
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / action)}
        argv = [sys.executable, "-c", text, action, str(tmp_path / "file")]
        seen.append(subprocess.run(argv, env=env, check=True, capture_output=True, text=True).stdout.strip())
    assert seen == ["0 1", "1 0"]
