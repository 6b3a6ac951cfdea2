"""buildah with a store of its own, and base images for it: a minimal Debian, and one with all dependencies."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path

import pytest

from maskfleet.system.deploy_files import deploy_path
from maskfleet.training.background.child import CompileJob
from tools import ROOT

# What the image brings compiled code for.
COMPILED = CompileJob({}, 2, (64, 64), {"objects": 4}, masks=True, precision="fp32", device="cpu", split=False)

STORAGE = '[storage]\ndriver = "vfs"\ngraphroot = "{folder}/store"\nrunroot = "{folder}/run"\n'
NOT_TESTED = "NOT TESTED: a real build of the image"
PYTHON, PYTHON_VERSION = "python3.11", "3.11.2"  # of Debian 12
PACKAGES = f"usr/local/lib/{PYTHON}/dist-packages"
# buildah copies itself into memory before it does anything; on a busy kernel sealing that copy fails now and then.
NOT_STARTED = "sealing memfd copy: Device or resource busy"
STARTS = 5
PRINTED = "tmp/.printed"
NO_NETWORK = re.compile(
    r"Temporary failure resolving|Could not (?:resolve|connect)|Failed to fetch|Connection timed out"
)


@dataclass(frozen=True)
class ImageStore:
    """A folder with buildah's images; `maskfleet image` uses it too, by the environment."""

    folder: Path

    @property
    def env(self) -> dict[str, str]:
        folders = {f"XDG_{name}_HOME": str(self.folder / name.lower()) for name in ("STATE", "CACHE")}
        buildah = {"BUILDAH_ISOLATION": "chroot", "CONTAINERS_STORAGE_CONF": str(self.folder / "storage.conf")}
        return {**os.environ, **folders, **buildah}

    def __call__(self, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
        for _ in range(STARTS):
            finished = subprocess.run(
                argv, cwd=self.folder, env={**self.env, **env}, capture_output=True, text=True, check=False, timeout=900
            )
            if finished.returncode == 0 or NOT_STARTED not in finished.stdout + finished.stderr:
                break
        return finished

    def done(self, *argv: str, **env: str) -> str:
        finished = self(*argv, **env)
        assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-4000:]
        return finished.stdout.strip()

    def image(self, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
        """`maskfleet image …` with buildah."""
        return self(sys.executable, "-m", "maskfleet", "image", *argv, "--with", "buildah", **env)

    def container(self, image: str) -> tuple[str, Path]:
        """A new container of `image`, and its root."""
        name = self.done("buildah", "from", image)
        return name, Path(self.done("buildah", "mount", name))

    def inside(self, container: str, *argv: str, **env: str) -> str:
        """What a command prints that runs in `container` as the user of its image.

        By a file, because buildah may lose what a command prints right before it ends, on a busy machine.
        """
        options = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
        self.done("buildah", "run", *options, container, "--", "sh", "-c", f'"$@" > /{PRINTED}', "sh", *argv)
        return (Path(self.done("buildah", "mount", container)) / PRINTED).read_text().strip()


def image_store(folder: Path) -> ImageStore:
    """A store with the image `base`, a minimal Debian."""
    base = debian_base()
    (folder / "storage.conf").write_text(STORAGE.format(folder=folder))
    (folder / "Base").write_text("FROM scratch\nADD base.tar /\n")
    _link_or_copy(base, folder / "base.tar")
    store = ImageStore(folder)
    store.done("buildah", "build", "--tag", "base", "--file", "Base", ".")
    (folder / "base.tar").unlink()
    return store


def add_full_base(store: ImageStore) -> None:
    """The image `full`: `base` with everything that `maskfleet[aws]` needs, copied from the environment of tests."""
    if f"python{sys.version_info[0]}.{sys.version_info[1]}" != PYTHON:
        pytest.skip(f"{NOT_TESTED}: its dependencies are copied from these tests' environment, which must be {PYTHON}")
    site = store.folder / "site" / PACKAGES
    site.mkdir(parents=True)
    script = runpy.run_path(str(ROOT / "scripts" / "image_constraints.py"))
    missing = [script["BESIDES"]["setuptools"]]
    for name in sorted(script["dependencies"]() - {"triton", "setuptools"}):  # the CPU build of torch has no triton
        try:
            found = distribution(name)
        except PackageNotFoundError:
            missing.append(_pin_of(name))
            continue
        for file in found.files or ():
            if ".." not in file.parts and "__pycache__" not in file.parts:
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                _link_or_copy(Path(str(found.locate_file(file))), site / file)
    wheels = store.folder / "site" / "wheels"
    wheels.mkdir()
    for pin in missing:
        wheel = _downloaded(pin)
        _link_or_copy(wheel, wheels / wheel.name)
    (store.folder / "Full").write_text("FROM localhost/base\nCOPY site/ /\n")
    store.done("buildah", "build", "--tag", "full", "--file", "Full", ".")
    shutil.rmtree(store.folder / "site")


def notebook_wheels() -> Path:
    """The packages that the notebook image adds, as wheels, kept in .tools."""
    folder = ROOT / ".tools" / "notebook-wheels"
    text = deploy_path("docker", "notebook", "Dockerfile").read_text(encoding="utf-8")
    pins = [f"{name.lower()}=={version}" for name, version in re.findall(r"ARG (\w+)_VERSION=(\S+)", text)]
    if not all(list(folder.glob(f"{pin.replace('==', '-')}-*.whl")) for pin in pins):
        constraints = ["--constraint", str(deploy_path("docker", "constraints.txt"))]
        command = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:", "-d", str(folder)]
        command += ["--python-version", PYTHON_VERSION]
        got = subprocess.run([*command, *constraints, *pins], capture_output=True, text=True, check=False, timeout=900)
        if got.returncode != 0:
            pytest.skip(f"{NOT_TESTED}: {', '.join(pins)} cannot be downloaded: {got.stderr[-300:]}")
    return folder


def built(store: ImageStore, *options: str) -> str:
    """The name of an image for CPUs; pip may use no index, so the base must have what the image needs."""
    done = store.image("build", "--cpu", *options)
    expect_built(done)
    return done.stdout.strip()


def expect_built(done: subprocess.CompletedProcess[str]) -> None:
    """Fail if a build did; skip where no package mirror is reachable."""
    said = done.stdout[-4000:] + done.stderr[-4000:]
    if done.returncode != 0 and NO_NETWORK.search(said):
        pytest.skip(f"{NOT_TESTED}: no package mirror is reachable: {said[-300:]}")
    assert done.returncode == 0, said


def debian_base() -> Path:
    """A tar of a minimal Debian, made once and kept in .tools."""
    if os.getuid() != 0:
        pytest.skip(f"{NOT_TESTED}: needs root")
    missing = [name for name in ("buildah", "debootstrap") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{NOT_TESTED}: needs the Debian packages {', '.join(missing)}")
    kept = ROOT / ".tools" / "debian-base.tar"
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        folder = kept.with_suffix(f".{os.getpid()}")
        options = ["--variant=minbase", "--include=ca-certificates,python3,python3-venv"]
        made = subprocess.run(
            ["debootstrap", *options, "bookworm", str(folder)], capture_output=True, text=True, check=False, timeout=540
        )
        if made.returncode != 0:
            shutil.rmtree(folder, ignore_errors=True)
            pytest.skip(f"{NOT_TESTED}: debootstrap: {made.stdout[-300:]}")
        partial = kept.with_suffix(f".{os.getpid()}.tar")
        subprocess.run(["tar", "-C", str(folder), "-cf", str(partial), "."], check=True, timeout=300)
        partial.replace(kept)
        shutil.rmtree(folder)
    return kept


def _pin_of(name: str) -> str:
    """The version that botocore pins of a package which the environment lacks: awscrt."""
    pins = [re.sub(r"[() ]", "", line.split(";")[0]) for line in requires("botocore") or ()]
    [pin] = [pin for pin in pins if pin.startswith(f"{name}==")]
    return pin


def _downloaded(pin: str) -> Path:
    """The wheel of a package, kept in .tools."""
    folder, pattern = ROOT / ".tools" / "image-wheels", f"{pin.replace('==', '-')}-*.whl"
    if not list(folder.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), pin]
        got = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        if not list(folder.glob(pattern)):
            pytest.skip(f"{NOT_TESTED}: {pin} cannot be downloaded: {got.stderr[-300:]}")
    return next(folder.glob(pattern))


def _link_or_copy(source: Path, target: Path) -> None:
    if source.stat().st_dev == target.parent.stat().st_dev:
        target.hardlink_to(source)
    else:
        shutil.copy(source, target)
