"""Files of a training job in S3: the archives with its model and output, and its checkpoints."""

from __future__ import annotations

import contextlib
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from maskfleet.errors import ConfigError, LaunchError
from maskfleet.launch.files.transfer import Fetched, FileEntry, Report, RunFiles, ignore
from maskfleet.launch.job import JobHandle
from maskfleet.launch.sagemaker.explain import log_directory
from maskfleet.launch.sagemaker.services import Json, Services, asking
from maskfleet.launch.sagemaker.status import describe_job, state_of
from maskfleet.system.files import replacing_by_path

ARCHIVES = ("model.tar.gz", "output.tar.gz")
CHECKPOINTS = "checkpoints"
MAX_RATIO = 200  # of an archive's files to the archive: weights hardly shrink, logs by about 20


@dataclass(frozen=True, slots=True)
class S3Object:
    """One object, and its path among the run's files."""

    path: str
    bucket: str
    key: str
    size: int
    mtime_ns: int


class JobFiles(RunFiles):
    """What a job has written to S3, below `path`: model.tar.gz, output.tar.gz and checkpoints/…"""

    def __init__(
        self, client: Any, handle: JobHandle, objects: list[S3Object], path: str, *, log_directory: str | None = None
    ) -> None:
        self._client, self._handle, self._path = client, handle, path
        self._log_directory = log_directory
        below = f"{path}/" if path else ""
        self._objects = [one for one in objects if one.path == path or one.path.startswith(below)]

    def entries(self) -> list[FileEntry]:
        if not self._objects:
            raise self._nothing()
        below = f"{self._path}/" if self._path else ""
        found: dict[str, FileEntry] = {}
        for one in self._objects:
            inside = one.path.removeprefix(below) if one.path != self._path else ""
            name, slash, _ = inside.partition("/")
            if slash:
                found.setdefault(name, FileEntry(name, "folder", 0, one.mtime_ns))
            else:
                found[name] = FileEntry(name, "file", one.size, one.mtime_ns)
        return [found[name] for name in sorted(found)]

    def fetch(self, folder: Path, report: Report = ignore) -> Fetched:
        """Copy the objects into `folder`; of the whole job, the files in its archives instead of the archives."""
        if not self._objects:
            raise self._nothing()
        done = Fetched()
        folder.mkdir(parents=True, exist_ok=True)
        for one in self._objects:
            name = one.path.removeprefix(f"{self._path}/") if self._path else one.path
            if name in ARCHIVES and not self._path:
                report(f"{name}: {one.size} bytes")
                archive = folder / f".{name}"
                self._download(one, archive, done)
                try:
                    done.files += extract(archive, folder, done.left_out) - 1
                finally:
                    archive.unlink(missing_ok=True)
            else:
                self._download(one, _inside(folder, name), done)
        return done

    def get(self, target: Path) -> Fetched:
        exact = [one for one in self._objects if one.path == self._path]
        if not exact:
            raise (
                self._nothing()
                if not self._objects
                else LaunchError("that is a folder", remedy="copy it with `maskfleet fetch`")
            )
        done = Fetched()
        self._download(exact[0], target, done)
        return done

    def put(self, source: Path) -> NoReturn:
        raise LaunchError(
            f"{source} cannot be sent into a job on SageMaker",
            remedy="put it into the S3 prefix or the file system of a channel, and launch",
        )

    def _download(self, one: S3Object, target: Path, done: Fetched) -> None:
        """Copy `one` to `target`, unless a file of the same size and age is there."""
        if target.is_file() and target.stat().st_size == one.size and target.stat().st_mtime_ns >= one.mtime_ns:
            done.unchanged += 1
            return
        free = shutil.disk_usage(target.parent).free
        if one.size > free:
            raise LaunchError(
                f"{one.path} has {one.size} bytes, but only {free} are free in {target.parent}",
                remedy="fetch into a folder on a larger disk",
            )
        with (
            asking(f"read s3://{one.bucket}/{one.key}", permissions="s3:GetObject on it", service="S3"),
            replacing_by_path(target) as draft,
        ):
            self._client.download_file(one.bucket, one.key, str(draft))
        done.files += 1
        done.bytes_read += one.size

    def _nothing(self) -> LaunchError:
        if self._log_directory is not None:
            return LaunchError(
                f"{self._handle} has no such file in S3",
                remedy=f"its run is in {self._log_directory}, the channel log; its model is in S3 when it has ended",
            )
        return LaunchError(
            f"{self._handle} has no such file in S3",
            remedy="a job has its model when it has ended, and checkpoints after its first one; see `maskfleet status`",
        )


@contextlib.contextmanager
def job_files(services: Services, handle: JobHandle, *, is_file: bool) -> Iterator[RunFiles]:
    """What `handle`, JOB or JOB/PATH, refers to."""
    name, _, path = handle.path.partition("/")
    path = path.strip("/")
    if is_file and not path:
        raise ConfigError(f"{handle} names a run, not a file in it", remedy=f"write {handle}/PATH")
    job = describe_job(services, name)
    if job is None:
        raise LaunchError(f"there is no job {name} in {services.region}", remedy="check the handle and the AWS account")
    client = services.client("s3")
    with asking(f"list the files of {name}", permissions="s3:ListBucket on its output bucket", service="S3"):
        objects = list(_objects(client, job))
    yield JobFiles(client, handle, objects, path, log_directory=log_directory(job))


def _objects(client: Any, job: Json) -> Iterator[S3Object]:
    model = job.get("ModelArtifacts", {}).get("S3ModelArtifacts")
    if model:
        folder = model.rpartition("/")[0]
        yield from (one for one in _below(client, folder, "") if one.path in ARCHIVES)
    checkpoints = job.get("CheckpointConfig", {}).get("S3Uri")
    # The archive of a finished job has its weights; the checkpoints beside it would be fetched for nothing.
    if checkpoints and state_of(job).value != "done":
        yield from _below(client, checkpoints.rstrip("/"), f"{CHECKPOINTS}/")


def _below(client: Any, uri: str, prefix: str) -> Iterator[S3Object]:
    """Objects below `uri`, with `prefix` before their path."""
    bucket, _, start = uri.removeprefix("s3://").partition("/")
    start = f"{start}/" if start else ""
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=start):
        for one in page.get("Contents", []):
            path = one["Key"].removeprefix(start)
            if path and not path.endswith("/"):
                stamp = int(one["LastModified"].timestamp() * 1e9)
                yield S3Object(f"{prefix}{path}", bucket, one["Key"], one["Size"], stamp)


def _inside(folder: Path, name: str) -> Path:
    """The path of `name` in `folder`; raises if it leads outside."""
    target = folder / name
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise LaunchError(f"{name!r} leaves the folder", remedy="check the job's prefix in S3: that name is not ours")
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.parent.resolve().is_relative_to(folder.resolve()):
        raise LaunchError(f"{target.parent} is a link that leads elsewhere", remedy="fetch into another folder")
    return target


def extract(archive: Path, folder: Path, left_out: list[str]) -> int:
    """Extract the regular files of `archive` into `folder`; returns their number.

    Links, devices and names that lead outside are left out and named; an archive that would fill the disk, or whose
    files are out of all proportion to its own size, is refused before anything is written.
    """
    try:
        with tarfile.open(archive, "r:*") as tar:
            members = tar.getmembers()
            files = [one for one in members if one.isfile() and _is_harmless(one.name)]
            left_out += [
                f"{one.name}: not a plain file inside" for one in members if not one.isdir() and one not in files
            ]
            _refuse_huge(archive, sum(one.size for one in files), folder)
            for one in files:
                target = _inside(folder, "/".join(part for part in one.name.split("/") if part != "."))
                source = tar.extractfile(one)
                assert source is not None  # it is a regular file
                with source, replacing_by_path(target) as draft, draft.open("wb") as file:
                    shutil.copyfileobj(source, file)
    except (tarfile.TarError, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise LaunchError(f"cannot extract {archive.name}: {error.strerror}", remedy="fetch elsewhere") from error
        raise LaunchError(f"{archive.name} is damaged: {error}", remedy="fetch again") from error
    return len(files)


def _is_harmless(name: str) -> bool:
    parts = [part for part in name.split("/") if part != "."]
    return (
        bool(parts) and not name.startswith("/") and all(part not in ("", "..") for part in parts) and "\0" not in name
    )


def _refuse_huge(archive: Path, size: int, folder: Path) -> None:
    free, packed = shutil.disk_usage(folder).free, archive.stat().st_size
    if size > free or size > max(packed, 1 << 20) * MAX_RATIO:
        raise LaunchError(
            f"the files in {archive.name.removeprefix('.')} have {size} bytes, the archive {packed}, free are {free}",
            remedy="if this is plausible, copy the archive with `maskfleet cp` and extract it on a larger disk",
        )
