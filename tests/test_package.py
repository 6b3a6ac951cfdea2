"""The source distribution and the wheel: built as `python -m build` builds them, and used from a fresh environment."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from maskfleet import __version__
from tools import ROOT

IMAGE = "registry.example/maskfleet@sha256:" + "ab" * 32
# Answers the question for its version and nothing else, so that `infra plan` stops after it has laid out its files.
TERRAFORM = """#!/bin/sh
[ "$1" = version ] && echo '{"terraform_version": "1.9.0"}'
"""

Command = Callable[..., subprocess.CompletedProcess[str]]


def test_the_version_is_written_in_one_python_file_and_the_citation_agrees() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"] == {"path": "src/maskfleet/__init__.py"}
    citation = YAML(typ="safe").load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == __version__
    assert citation["license"] == project["project"]["license"]
    assert citation["title"] == project["project"]["name"]


def build(source: Path, target: str, folder: Path) -> Path:
    """The one file that hatchling, our build backend, makes of `source`; it must print no warning."""
    command = [sys.executable, "-W", "error", "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    [built] = folder.iterdir()
    assert done.stderr == f"{built}\n"
    assert "warning" not in done.stdout.lower()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the unpacked source distribution, as `python -m build` does, so a file that it lacks is noticed."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    return build(unpacked / sdist.name.removesuffix(".tar.gz"), "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def fresh(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """Runs a program of a new environment, outside of the checkout, with the wheel as the only maskfleet."""
    folder = tmp_path_factory.mktemp("fresh")
    environment = folder / "env"
    uv = shutil.which("uv")
    make = [uv, "venv", "--python", sys.executable] if uv else [sys.executable, "-m", "venv"]
    install = [uv, "pip", "install", "--python", str(environment)] if uv else [f"{environment}/bin/pip", "install"]
    for command in ([*make, str(environment)], [*install, "--no-deps", "--no-index", str(wheel)]):
        subprocess.run(command, capture_output=True, check=True, timeout=300)
    programs = folder / "programs"
    programs.mkdir()
    (programs / "terraform").write_text(TERRAFORM)
    (programs / "terraform").chmod(0o755)
    path = f"{environment}/bin:{programs}:/usr/bin:/bin"
    clean = {"PATH": path, "HOME": str(folder), "PYTHONPATH": str(dependencies(folder / "dependencies"))}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        program = f"{environment}/bin/{command[0]}"
        return subprocess.run(
            [program, *command[1:]], cwd=folder, env=clean, capture_output=True, text=True, check=False, timeout=300
        )

    yield run
    shutil.rmtree(environment)


def dependencies(folder: Path) -> Path:
    """Links to everything that is installed beside this Python, such as torch, but not to maskfleet."""
    folder.mkdir()
    ours = {Path(sysconfig.get_paths()["purelib"]), *(Path(entry) for entry in sys.path if "site-packages" in entry)}
    for package in (package for site in ours if site.is_dir() for package in site.iterdir()):
        link = folder / package.name
        if "maskfleet" not in package.name and package.suffix != ".pth" and not link.exists():
            link.symlink_to(package)
    return folder


def source_files() -> set[str]:
    """Every file of the checkout that git does not ignore; a skip in a tree that came without git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return {name for name in done.stdout.splitlines() if (ROOT / name).exists()}


@pytest.mark.slow
def test_the_source_distribution_has_every_file_but_those_of_git_and_ci(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        packed = {member.name.split("/", 1)[1] for member in archive.getmembers() if member.isfile()}
    left_out = (".ci/", ".github/", ".pre-commit-config.yaml")
    assert packed - {"PKG-INFO"} == {name for name in source_files() if not name.startswith(left_out)}


@pytest.mark.slow
def test_the_wheel_has_the_package_the_deploy_files_and_the_notebooks_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"maskfleet-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        described = archive.read(metadata).decode()
    sources = source_files()
    expected = {name.removeprefix("src/") for name in sources if name.startswith("src/")}
    expected |= {f"maskfleet/{name}" for name in sources if name.startswith(("deploy/", "notebooks/"))}
    assert packed == expected
    assert re.search(rf"^Version: {re.escape(__version__)}$", described, re.MULTILINE)
    assert "Description-Content-Type: text/markdown" in described


@pytest.mark.slow
def test_a_fresh_environment_with_the_wheel_runs_maskfleet(fresh: Command) -> None:
    where = fresh("python", "-c", "import maskfleet; print(maskfleet.__file__)")
    assert not Path(where.stdout.strip()).is_relative_to(ROOT / "src"), "the checkout is in the way"
    assert "/env/lib" in where.stdout
    assert fresh("maskfleet", "--version").stdout == f"maskfleet {__version__}\n"
    recipes = fresh("maskfleet", "config", "recipes")
    assert recipes.returncode == 0, recipes.stderr
    assert "standard" in recipes.stdout


@pytest.mark.slow
@pytest.mark.parametrize("target", [["local"], ["eks", "--image", IMAGE, "--instance", "p4d.24xlarge", "--nodes", "2"]])
def test_a_fresh_environment_with_the_wheel_renders_a_launch(fresh: Command, target: list[str]) -> None:
    done = fresh("maskfleet", "launch", "--dry-run", "--recipe", "standard", "--on", *target)
    assert done.returncode == 0, done.stderr
    assert "recipe: standard" in done.stdout


@pytest.mark.slow
def test_a_fresh_environment_with_the_wheel_finds_terraform_files_and_charts(fresh: Command, tmp_path: Path) -> None:
    done = fresh("maskfleet", "infra", "plan", "eks", "--workdir", str(tmp_path / "work"), "--var", "region=us-east-1")
    assert "is missing" not in done.stderr
    laid_out = tmp_path / "work" / "deploy"
    files = ("terraform/eks/aws/cluster.tf", "terraform/eks/aws/policies/trust.tf", "helm/mpi-operator/Chart.yaml")
    for name in files:
        assert (laid_out / name).read_bytes() == (ROOT / "deploy" / name).read_bytes()
