"""Adding a launch target takes its folder, a config class, a line in BACKENDS and a page of docs: four files."""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
CONFIG_CLASS = '''
class ToyLaunch(Config):
    """In a folder that stands for a cluster."""

    on: Literal["toy"] = "toy"
    """Where to run."""

    cluster: str
    """The folder."""

    nodes: PositiveInt = 1
    """Machines."""


AnyLaunch = ToyLaunch | '''
BACKEND = '''"""A folder in which nothing runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from maskfleet.config.launch import ToyLaunch
from maskfleet.config.run import RunConfig
from maskfleet.errors import LaunchError
from maskfleet.launch.backend import Backend
from maskfleet.launch.instances import INSTANCES, Instance
from maskfleet.launch.job import JobHandle, JobSpec, JobState, JobStatus, Rendered, job_for


class ToyBackend(Backend):
    """Writes down what it was asked for."""

    def __init__(
        self, launch: ToyLaunch, *, nodes: int | None = None, known: Mapping[str, Instance] = INSTANCES
    ) -> None:
        self._cluster = Path(launch.cluster)
        self.slots = (2,) * (nodes or launch.nodes)

    @classmethod
    def for_handle(cls, handle: JobHandle) -> Self:
        return cls(ToyLaunch(cluster=str(Path(handle.path).parent)))

    def job(self, run: RunConfig, *, name: str | None = None) -> JobSpec:
        return job_for(run, slots=self.slots, name=name)

    def render(self, job: JobSpec) -> Rendered:
        return Rendered(job.name, {"state": f"running on {job.ranks} ranks"}, ())

    def submit(self, rendered: Rendered) -> JobHandle:
        folder = self._cluster / rendered.name
        folder.mkdir()
        (folder / "state").write_text(rendered.files["state"])
        return JobHandle("toy", "", str(folder))

    def status(self, handle: JobHandle) -> JobStatus:
        state = Path(handle.path) / "state"
        if not state.exists():
            return JobStatus(JobState.UNKNOWN, f"there is no job {handle}")
        return JobStatus(JobState(state.read_text().split()[0]), state.read_text())

    def logs(self, handle: JobHandle, *, follow: bool = False, rank: int | None = None) -> Iterator[str]:
        if not Path(handle.path).exists():
            raise LaunchError(f"there is no job {handle}", remedy="check the handle")
        yield f"[rank{rank or 0}]: hello"

    def cancel(self, handle: JobHandle) -> None:
        (Path(handle.path) / "state").write_text("cancelled")

    def explain(self, handle: JobHandle) -> str:
        return "Nothing runs here."
'''


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package and the docs with one more target."""
    root = tmp_path_factory.mktemp("checkout")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "src", root / "src", ignore=ignore)
    shutil.copytree(REPOSITORY / "docs", root / "docs", ignore=ignore)
    package = root / "src" / "maskfleet"
    (package / "launch" / "toy").mkdir()
    (package / "launch" / "toy" / "backend.py").write_text(BACKEND)
    insert(package / "config" / "launch.py", "\nAnyLaunch = ", CONFIG_CLASS)
    line = '    "toy": "maskfleet.launch.toy.backend:ToyBackend",\n'
    insert(package / "launch" / "backend.py", "BACKENDS = {\n", f"BACKENDS = {{\n{line}")
    (root / "docs" / "run-anywhere" / "toy.md").write_text("# Launch on a toy\n\nSet `launch.cluster` to a folder.\n")
    return root


def insert(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


def changed_files(root: Path) -> set[str]:
    """Files of `root` that the repository lacks or that differ from it."""
    files = [path.relative_to(root) for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {
        str(file)
        for file in files
        if not (REPOSITORY / file).exists() or not filecmp.cmp(root / file, REPOSITORY / file, shallow=False)
    }


def maskfleet(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "maskfleet", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(checkout / "src")},
        check=False,
    )


def test_a_target_is_at_most_four_files(checkout: Path) -> None:
    assert changed_files(checkout) == {
        "src/maskfleet/launch/toy/backend.py",
        "src/maskfleet/config/launch.py",
        "src/maskfleet/launch/backend.py",
        "docs/run-anywhere/toy.md",
    }


def test_the_new_target_launches_and_answers(checkout: Path, tmp_path: Path) -> None:
    launch = ("launch", "--on", "toy", "--recipe", "demo", "--name", "a", "--launch-set", f"cluster={tmp_path}")
    shown = maskfleet(checkout, *launch, "--nodes", "3", "--dry-run")
    assert (shown.returncode, shown.stdout) == (0, '# file "state"\nrunning on 6 ranks\n')
    launched = maskfleet(checkout, *launch, "--detach")
    handle = f"toy://{tmp_path}/a"
    assert (launched.returncode, launched.stdout) == (0, f"{handle}\n"), launched.stderr
    assert maskfleet(checkout, "status", handle).stdout == "running: running on 2 ranks\n"
    assert maskfleet(checkout, "logs", handle, "--rank", "1").stdout == "[rank1]: hello\n"
    assert maskfleet(checkout, "explain", handle).stdout == "Nothing runs here.\n"
    assert maskfleet(checkout, "cancel", handle).stdout == "cancelled\n"
    assert maskfleet(checkout, "status", handle).stdout == "cancelled: cancelled\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["doctor", "--on", "toy", "--launch-set", "cluster=."], "there is no doctor for 'toy'"),
        (["ls", "toy:///a"], "files of toy jobs cannot be copied"),
        (["notebook", "toy:///a"], "there are no notebooks for runs on toy"),
        (["launch", "--on", "toy", "--launch-set", "clutser=."], "clutser is no field of toy; did you mean cluster?"),
        (["launch", "--on", "tay"], "there is no place 'tay': it is toy, local, ssh, sagemaker, eks"),
    ],
)
def test_what_the_new_target_lacks_is_said_without_its_help(checkout: Path, arguments: list[str], words: str) -> None:
    done = maskfleet(checkout, *arguments)
    assert done.returncode == 2
    assert words in done.stderr


def test_without_its_line_the_target_is_not_built_yet(checkout: Path, tmp_path: Path) -> None:
    shutil.copytree(checkout, tmp_path / "checkout")
    file = tmp_path / "checkout" / "src" / "maskfleet" / "launch" / "backend.py"
    insert(file, '    "toy": "maskfleet.launch.toy.backend:ToyBackend",\n', "")
    done = maskfleet(tmp_path / "checkout", "launch", "--on", "toy", "--launch-set", "cluster=.")
    assert "launching on toy is not built yet" in done.stderr
