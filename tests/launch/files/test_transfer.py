"""Files of a run through the agent, which runs for real as the process that it is in a pod."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from maskfleet.cli.main import app
from maskfleet.errors import ConnectionBrokenError, LaunchError
from maskfleet.launch.backend import backend_of
from maskfleet.launch.files.agent import DRAFT
from maskfleet.launch.files.transfer import AGENT, Fetched, RunFiles, Stream, Volume
from maskfleet.launch.job import JobHandle
from maskfleet.launch.local.files import local_agent


def asked(request: dict[str, Any], more: bytes = b"") -> list[dict[str, Any]]:
    """What the agent answers, line by line."""
    done = subprocess.run(
        [sys.executable, *AGENT], input=json.dumps(request).encode() + b"\n" + more, capture_output=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A volume with a run, and next to it something that nobody may see."""
    (tmp_path / "secret.txt").write_text("secret")
    volume = tmp_path / "fsx"
    run = volume / "logs" / "r50"
    (run / "checkpoints").mkdir(parents=True)
    (run / "log.txt").write_text("hello\n")
    (run / "empty").touch()
    (run / "checkpoints" / "step-1.pt").write_bytes(os.urandom(300_000))
    (run / "with space é").write_text("x")
    return volume


def volume_at(root: Path, path: str, opener: Any = local_agent) -> Volume:
    return Volume(opener, {"root": str(root), "path": path}, pause_s=0)


def fetched(root: Path, path: str, folder: Path, opener: Any = local_agent) -> Fetched:
    return asyncio.run(volume_at(root, path, opener).fetch(folder))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


def test_a_folder_is_listed_with_kinds_sizes_and_times(root: Path) -> None:
    (root / "logs" / "r50" / "link").symlink_to("log.txt")
    entries = asyncio.run(volume_at(root, "logs/r50").entries())
    kinds = {one.path: (one.kind, one.size) for one in entries}
    assert kinds == {"checkpoints": ("folder", 0), "empty": ("file", 0), "link": ("link", 0), "log.txt": ("file", 6),
                     "with space é": ("file", 1)}  # fmt: skip
    assert entries[3].mtime_ns == (root / "logs" / "r50" / "log.txt").stat().st_mtime_ns


@pytest.mark.parametrize("path", ["..", "../secret.txt", "logs/../../secret.txt", "./logs", "logs/r50/..", "a\0b"])
def test_no_path_leads_out_of_the_volume(path: str, root: Path) -> None:
    for op in ({"op": "list"}, {"op": "send", "files": [["", 0, ""]]}, {"op": "receive", "size": 1, "sha256": ""}):
        answer = asked({"root": str(root), "path": path, **op}, b'{"offset": 0}\nx')
        assert "leaves the folder" in answer[0]["error"]
    named = asked({"op": "send", "root": str(root), "path": "logs", "files": [[path, 0, ""]]})
    assert "leaves the folder" in named[0]["error"]


def test_no_link_is_followed_not_even_to_a_place_inside(root: Path, tmp_path: Path) -> None:
    (root / "out").symlink_to(tmp_path)
    (root / "file").symlink_to(tmp_path / "secret.txt")
    (root / "inside").symlink_to(root / "logs")
    for path in ("out/secret.txt", "file", "inside/r50/log.txt", "out"):
        for op in ({"op": "list"}, {"op": "receive", "size": 1, "sha256": ""}):
            (answer,) = asked({"root": str(root), "path": path, **op}, b'{"offset": 0}\nx')[:1]
            assert "error" in answer or answer == {"have": 0, "sha256": hashlib.sha256().hexdigest()}
        sent = asked({"op": "send", "root": str(root), "path": "", "files": [[path, 0, ""]]})
        assert "goes through a link" in sent[0]["error"]
    assert (tmp_path / "secret.txt").read_text() == "secret"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["fsx", "secret.txt"]


def test_a_link_in_place_of_the_draft_does_not_overwrite_its_target(root: Path, tmp_path: Path) -> None:
    (root / f"a{DRAFT}").symlink_to(tmp_path / "secret.txt")
    source = tmp_path / "source"
    source.write_text("new")
    with pytest.raises(LaunchError, match="link"):
        asyncio.run(volume_at(root, "a").put(source))
    assert (tmp_path / "secret.txt").read_text() == "secret"


def test_a_pipe_in_the_folder_neither_hangs_nor_is_sent(root: Path, tmp_path: Path) -> None:
    os.mkfifo(root / "logs" / "r50" / "pipe")
    done = fetched(root, "logs/r50", tmp_path / "here")
    assert done.left_out == ["pipe: a other"]
    sent = asked({"op": "send", "root": str(root), "path": "logs/r50", "files": [["pipe", 0, ""]]})
    assert "is not a file" in sent[0]["error"]


def test_a_fetched_folder_is_the_same_and_a_second_fetch_sends_nothing(root: Path, tmp_path: Path) -> None:
    run, here = root / "logs" / "r50", tmp_path / "here"
    first = fetched(root, "logs/r50", here)
    assert contents(here) == contents(run)
    assert (first.files, first.bytes_read, first.unchanged) == (4, 300_007, 0)
    assert (here / "log.txt").stat().st_mtime_ns == (run / "log.txt").stat().st_mtime_ns
    second = fetched(root, "logs/r50", here)
    assert (second.files, second.bytes_read, second.unchanged) == (0, 0, 4)


def test_a_file_that_grew_sends_only_its_new_end_and_one_that_changed_all(root: Path, tmp_path: Path) -> None:
    run, here = root / "logs" / "r50", tmp_path / "here"
    fetched(root, "logs/r50", here)
    with (run / "log.txt").open("a") as log:
        log.write("more\n")
    (run / "checkpoints" / "step-1.pt").write_bytes(b"y" * 300_001)
    done = fetched(root, "logs/r50", here)
    assert contents(here) == contents(run)
    assert done.bytes_read == 5 + 300_001


@contextlib.asynccontextmanager
async def _cut(limit: list[int]) -> AsyncIterator[Stream]:
    """An agent whose connection breaks once after so many bytes."""

    class Cut:
        def __init__(self, inner: Stream) -> None:
            self._inner = inner

        async def read(self) -> bytes:
            data = await self._inner.read()
            if limit:
                limit[0] -= len(data)
                if limit[0] < 0:
                    limit.clear()
                    raise ConnectionBrokenError("cut", remedy="")
            return data

        async def write(self, data: bytes) -> None:
            if limit and len(data) > 1000:
                limit[0] -= len(data)
                if limit[0] < 0:
                    limit.clear()
                    raise ConnectionBrokenError("cut", remedy="")
            await self._inner.write(data)

    async with local_agent() as stream:
        yield Cut(stream)


def test_a_broken_fetch_resumes_where_it_broke(root: Path, tmp_path: Path) -> None:
    big = root / "logs" / "r50" / "checkpoints" / "step-2.pt"
    big.write_bytes(os.urandom(5_000_000))
    here, limit = tmp_path / "here", [3_000_000]
    done = fetched(root, "logs/r50", here, lambda: _cut(limit))
    assert limit == []
    assert contents(here) == contents(root / "logs" / "r50")
    assert done.bytes_read < 5_300_007 + 200_000  # not twice


def test_a_fetch_that_was_killed_is_continued_by_the_next(root: Path, tmp_path: Path) -> None:
    big = root / "big"
    big.write_bytes(os.urandom(2_000_000))
    here = tmp_path / "here"
    here.mkdir()
    (here / f"big{DRAFT}").write_bytes(big.read_bytes()[:1_500_000])
    done = asyncio.run(volume_at(root, "big").get(here / "big"))
    assert (done.bytes_read, (here / "big").read_bytes()) == (500_000, big.read_bytes())
    (here / "big").unlink()
    (here / f"big{DRAFT}").write_bytes(b"other" * 1000)
    done = asyncio.run(volume_at(root, "big").get(here / "big"))
    assert (done.bytes_read, (here / "big").read_bytes()) == (2_000_000, big.read_bytes())
    assert sorted(one.name for one in here.iterdir()) == ["big"]


def test_a_connection_that_always_breaks_is_an_error_in_the_end(root: Path, tmp_path: Path) -> None:
    opened = []

    @contextlib.asynccontextmanager
    async def never() -> AsyncIterator[Stream]:
        opened.append(1)
        if len(opened) == 1:  # the list comes through
            async with local_agent() as stream:
                yield stream
            return
        raise ConnectionBrokenError("cut", remedy="try again")
        yield

    with pytest.raises(ConnectionBrokenError, match="cut"):
        fetched(root, "logs/r50", tmp_path / "here", never)
    assert len(opened) == 6


@pytest.mark.parametrize(
    "damage", [lambda data: data.replace(b"hello", b"hullo"), lambda data: data.replace(b"hello", b"hell")]
)
def test_damage_on_the_way_is_seen_and_nothing_is_kept(
    damage: Callable[[bytes], bytes], root: Path, tmp_path: Path
) -> None:
    @contextlib.asynccontextmanager
    async def damaged() -> AsyncIterator[Stream]:
        class Damaged:
            def __init__(self, inner: Stream) -> None:
                self._inner = inner

            async def read(self) -> bytes:
                data = await self._inner.read()
                return damage(data) if b"hello" in data else data

            async def write(self, data: bytes) -> None:
                await self._inner.write(data)

        async with local_agent() as stream:
            yield Damaged(stream)

    with pytest.raises(LaunchError):
        asyncio.run(volume_at(root, "logs/r50/log.txt", damaged).get(tmp_path / "log.txt"))
    assert not (tmp_path / "log.txt").exists()


def test_a_huge_file_passes_in_pieces(root: Path, tmp_path: Path) -> None:
    size = 2**28 + 5
    with (root / "huge").open("wb") as file:
        file.truncate(size)  # a sparse file: it takes no disk space, and reads as zeros
    script = (
        "import asyncio, sys; from pathlib import Path; from maskfleet.launch.files.transfer import Volume;"
        "from maskfleet.launch.local.files import local_agent;"
        "v = Volume(local_agent, {'root': sys.argv[1], 'path': 'huge'});"
        "asyncio.run(v.get(Path(sys.argv[2])));"
        # ru_maxrss would count the process that started this one, which may be a large one.
        "print(next(line.split()[1] for line in Path('/proc/self/status').open() if line.startswith('VmHWM')))"
    )
    target = tmp_path / "huge"
    done = subprocess.run(
        [sys.executable, "-c", script, str(root), str(target)], capture_output=True, text=True, check=True
    )
    assert target.stat().st_size == size
    assert int(done.stdout) < 150_000  # KiB


def test_a_full_disk_here_is_told_as_such(root: Path) -> None:
    with pytest.raises(LaunchError, match="cannot write /dev/full/here: Not a directory"):
        asyncio.run(volume_at(root, "logs/r50/log.txt").get(Path("/dev/full/here")))


def test_names_from_an_agent_that_lies_stay_in_the_folder(tmp_path: Path) -> None:
    class Liar:
        def __init__(self, path: str) -> None:
            line = {"path": path, "kind": "file", "size": 1, "mtime_ns": 0}
            self._answers = [json.dumps(line).encode() + b"\n", b'{"end": true}\n']

        async def read(self) -> bytes:
            return self._answers.pop(0)

        async def write(self, data: bytes) -> None:
            return

    for path in ("../x", "/etc/x", "a/../../x", "a//b", "."):

        @contextlib.asynccontextmanager
        async def liar(path: str = path) -> AsyncIterator[Stream]:
            yield Liar(path)

        with pytest.raises(LaunchError, match="leaves the folder"):
            asyncio.run(Volume(liar, {}).fetch(tmp_path / "here"))


def test_a_link_here_is_not_written_through(root: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "checkpoints").symlink_to(tmp_path)
    with pytest.raises(LaunchError, match="leads elsewhere"):
        fetched(root, "logs/r50", here)
    (here / "checkpoints").unlink()
    (here / "log.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(LaunchError, match="is a link"):
        fetched(root, "logs/r50", here)
    assert (tmp_path / "secret.txt").read_text() == "secret"


def test_a_file_is_sent_whole_and_into_new_folders(root: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(200_000))
    assert asyncio.run(volume_at(root, "a/b/c").put(source)) == 200_000
    assert (root / "a" / "b" / "c").read_bytes() == source.read_bytes()
    with pytest.raises(LaunchError, match="is a folder"):
        asyncio.run(volume_at(root, "a/b").put(source))


def test_a_broken_upload_resumes_where_it_broke(root: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(3_000_000))
    limit = [2_000_000]
    sent = asyncio.run(volume_at(root, "there", lambda: _cut(limit)).put(source))
    assert (root / "there").read_bytes() == source.read_bytes()
    assert sent < 3_000_000
    assert sorted(one.name for one in root.iterdir()) == ["logs", "there"]


def test_an_upload_that_arrives_damaged_changes_nothing(root: Path) -> None:
    (root / "there").write_text("old")
    request = {"op": "receive", "root": str(root), "path": "there", "size": 3, "sha256": "0" * 64}
    assert "not what was sent" in asked(request, b'{"offset": 0}\nnew')[-1]["error"]
    assert (root / "there").read_text() == "old"


def test_the_pods_own_process_ends_when_nobody_asks_any_more() -> None:
    # Alone in a namespace of its own, as in a pod.
    began = time.monotonic()
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, *AGENT, "wait", "1.5"],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    if done.returncode != 0 and "unshare" in done.stderr:
        pytest.skip(f"namespaces cannot be made here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began > 1.4


def files_of(handle: JobHandle) -> AbstractContextManager[RunFiles]:
    return backend_of(handle).files(handle)


@pytest.fixture
def local_run(tmp_path: Path) -> Path:
    run = tmp_path / "runs" / "r50"
    (run / "launch").mkdir(parents=True)
    (run / "launch" / "job.json").write_text("{}")
    (run / "log.txt").write_text("hello\n")
    return run


def test_local_handles_list_copy_and_fetch_too(local_run: Path, tmp_path: Path) -> None:
    handle = str(JobHandle("local", "", str(local_run)))
    cli = CliRunner()
    listed = cli.invoke(app, ["ls", handle, "--json"])
    assert [one["path"] for one in json.loads(listed.stdout)] == ["launch", "log.txt"]
    assert "log.txt" in cli.invoke(app, ["ls", f"{handle}/log.txt"]).stdout
    copied = cli.invoke(app, ["cp", f"{handle}/log.txt", str(tmp_path)])
    assert (copied.exit_code, (tmp_path / "log.txt").read_text()) == (0, "hello\n")
    fetched = cli.invoke(app, ["fetch", handle, str(tmp_path / "here")])
    assert fetched.exit_code == 0
    assert contents(tmp_path / "here") == contents(local_run)
    (tmp_path / "notes").write_text("n")
    cli.invoke(app, ["cp", str(tmp_path / "notes"), f"{handle}/sub/"], catch_exceptions=False)
    assert (local_run / "sub" / "notes").read_text() == "n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["cp", "a", "b"], "one file here and one of a run"),
        (["cp", "eks://k/a/b", "eks://k/a/c"], "one file here and one of a run"),
        (["cp", "/nowhere", "eks://k/a/c"], "is not a file"),
        (["cp", "eks://k/a/b", "/nowhere/deep/x"], "there is no folder"),
        (["cp", "eks://k/a", "."], "not a file in it"),
        (["ls", "local:///nowhere/at/all"], "there is no run in /nowhere"),
        (["fetch", "sagemaker://nowhere/job"], "names no AWS region"),
    ],
)
def test_what_cannot_be_copied_is_refused_with_a_reason(arguments: list[str], words: str) -> None:
    with pytest.raises(Exception, match=words):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_a_run_is_not_fetched_onto_itself(local_run: Path) -> None:
    with pytest.raises(Exception, match="the run itself"):
        CliRunner().invoke(app, ["fetch", f"local://{local_run}", str(local_run)], catch_exceptions=False)


def test_a_local_handle_never_shows_what_is_beside_the_run(local_run: Path) -> None:
    with pytest.raises(LaunchError, match="leaves the folder"), files_of(
        JobHandle("local", "", f"{local_run}/../other")
    ) as files:  # fmt: skip
        files.entries()
