"""`ls`, `cp` and `fetch` of a job: its archives in S3, extracted without trusting them, and its checkpoints."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from sagemaker_world import REGION, World, launch

from maskfleet.config.recipes import recipe
from maskfleet.errors import ConfigError, LaunchError
from maskfleet.launch.backend import backend_of, parse_handle
from maskfleet.launch.files.transfer import Fetched
from maskfleet.launch.sagemaker import files as job_files
from maskfleet.launch.sagemaker.backend import SageMakerBackend
from maskfleet.launch.sagemaker.files import extract

HANDLE = f"sagemaker://{REGION}/r50"

pytestmark = pytest.mark.slow  # it loads the service model of S3


def archive(files: dict[str, bytes], *extra: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for one in extra:
            tar.addfile(one)
    return buffer.getvalue()


@pytest.fixture
def finished(world: World) -> World:
    """A finished job with a model, and checkpoints."""
    backend = SageMakerBackend(launch())
    backend.submit(backend.render(backend.job(recipe("demo"), name="r50")))
    world.move("r50", "Completed", "", "Completed")
    world.objects["lab", "out/r50/output/model.tar.gz"] = archive({"./weights/a.safetensors": b"w", "log.txt": b"l"})
    world.objects["lab", "out/r50/output/output.tar.gz"] = archive({"data/report.html": b"r"})
    world.objects["lab", "out/r50/checkpoints/step-10.json"] = b"c"
    world.objects["lab", "out/r50-2/output/model.tar.gz"] = b"of another job"
    return world


def fetch(folder: Path, place: str = HANDLE) -> Fetched:
    handle = parse_handle(place)
    with backend_of(handle).files(handle) as files:
        return files.fetch(folder)


def names(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_fetch_extracts_what_the_job_left(finished: World, tmp_path: Path) -> None:
    done = fetch(tmp_path / "r50")
    assert names(tmp_path / "r50") == {"weights/a.safetensors": b"w", "log.txt": b"l", "data/report.html": b"r"}
    assert (done.files, done.left_out) == (3, [])


def test_of_a_job_that_has_not_finished_the_checkpoints_are_fetched(finished: World, tmp_path: Path) -> None:
    finished.move("r50", "Stopped", "", "Stopped")
    del finished.objects["lab", "out/r50/output/model.tar.gz"], finished.objects["lab", "out/r50/output/output.tar.gz"]
    assert fetch(tmp_path / "r50").files == 1
    assert names(tmp_path / "r50") == {"checkpoints/step-10.json": b"c"}
    assert fetch(tmp_path / "r50").unchanged == 1
    assert fetch(tmp_path / "c", f"{HANDLE}/checkpoints").files == 1
    assert names(tmp_path / "c") == {"step-10.json": b"c"}


def test_ls_and_cp(finished: World, tmp_path: Path) -> None:
    handle = parse_handle(HANDLE)
    with backend_of(handle).files(handle) as files:
        assert [(one.path, one.kind) for one in files.entries()] == [
            ("model.tar.gz", "file"),
            ("output.tar.gz", "file"),
        ]
    one = parse_handle(f"{HANDLE}/model.tar.gz")
    with backend_of(one).files(one, is_file=True) as files:
        files.get(tmp_path / "m.tar.gz")
    assert tarfile.is_tarfile(tmp_path / "m.tar.gz")
    with backend_of(one).files(one, is_file=True) as files, pytest.raises(LaunchError, match="cannot be sent"):
        files.put(tmp_path / "m.tar.gz")
    with pytest.raises(ConfigError, match="names a run"), backend_of(handle).files(handle, is_file=True):
        pass
    absent = parse_handle(f"{HANDLE}/nothing")
    with backend_of(absent).files(absent) as files, pytest.raises(LaunchError, match="has no such file"):
        files.entries()


def test_an_unknown_job_and_one_without_files(world: World, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="there is no job r50"):
        fetch(tmp_path / "a")
    backend = SageMakerBackend(launch())
    backend.submit(backend.render(backend.job(recipe("demo"), name="r50")))
    with pytest.raises(LaunchError, match="has no such file"):
        fetch(tmp_path / "a")
    assert not (tmp_path / "a").exists()


def link(name: str, target: str, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    "data",
    [
        archive({"../evil": b"x", "good": b"g"}),
        archive({"/tmp/evil": b"x", "good": b"g"}),
        archive({"a/../../evil": b"x", "good": b"g"}),
        archive({"good": b"g"}, link("evil", "/etc/passwd", tarfile.SYMTYPE)),
        archive({"good": b"g"}, link("evil", "../../outside", tarfile.LNKTYPE)),
        archive({"good": b"g"}, link("evil", "", tarfile.CHRTYPE)),
    ],
)
def test_what_leads_outside_is_left_out_and_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.tar.gz").write_bytes(data)
    folder = tmp_path / "to" / "here"
    folder.mkdir(parents=True)
    left_out: list[str] = []
    assert extract(tmp_path / "a.tar.gz", folder, left_out) == 1
    assert names(folder) == {"good": b"g"}
    assert len(left_out) == 1
    assert "evil" in left_out[0]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.tar.gz", "good", "here", "to"]


def test_a_link_that_was_there_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(archive({"sub/file": b"x"}))
    (tmp_path / "outside").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "sub").symlink_to(tmp_path / "outside")
    with pytest.raises(LaunchError, match="leads elsewhere"):
        extract(tmp_path / "a.tar.gz", tmp_path / "here", [])
    assert list((tmp_path / "outside").iterdir()) == []


def test_archives_out_of_proportion_or_damaged_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_files, "MAX_RATIO", 2)
    file = tmp_path / "a.tar.gz"
    file.write_bytes(archive({"zeros": bytes(3 << 20)}))
    with pytest.raises(LaunchError, match="the archive"):
        extract(file, tmp_path, [])
    for damaged in (b"", b"not an archive", archive({"a": bytes(range(256)) * 100})[:200]):
        file.write_bytes(damaged)
        with pytest.raises(LaunchError, match="damaged"):
            extract(file, tmp_path, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar.gz"]
