"""The training image: linters for its Dockerfile, and a real build on a Debian base, without torch."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from train_release import CHART

from maskfleet import __version__
from maskfleet.launch.ssh.wheel import built_wheel
from maskfleet.system.deploy_files import deploy_path
from tools import ROOT, run_tool

DOCKERFILE = deploy_path("docker", "train", "Dockerfile")
LIBRARIES = ["/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu", "/opt/amazon/ofi-nccl/lib", "/opt/amazon/efa/lib"]
NO_NETWORK = re.compile(
    r"Temporary failure resolving|Could not (?:resolve|connect)|Failed to fetch|Connection timed out"
)
INSTALLER = '#!/bin/sh\necho "$@" > /efa-arguments\n'


def test_hadolint_finds_nothing() -> None:
    assert run_tool("hadolint", DOCKERFILE) == ""


@pytest.mark.slow
def test_checkov_finds_nothing() -> None:
    options = ["--framework", "dockerfile", "--skip-download", "--output", "json", "--compact"]
    report = json.loads(run_tool("checkov", "--file", DOCKERFILE, *options))
    assert report["summary"]["failed"] == 0
    assert report["summary"]["passed"] > 50
    assert [check["check_id"] for check in report["results"]["skipped_checks"]] == ["CKV_DOCKER_7"]


def test_the_default_build_downloads_only_from_the_base_image_debian_and_the_package_index() -> None:
    text = DOCKERFILE.read_text(encoding="utf-8")
    for word in ("curl", "wget", "git ", "http://", "https://", "ADD ", "ssh-keygen", "allow-run-as-root"):
        assert word not in text


@dataclass(frozen=True)
class Builder:
    """buildah with a separate store."""

    folder: Path

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        store = ["--root", str(self.folder / "store"), "--runroot", str(self.folder / "run"), "--storage-driver", "vfs"]
        return subprocess.run(
            ["buildah", *store, *arguments], cwd=self.folder, capture_output=True, text=True, check=False, timeout=540
        )

    def done(self, *arguments: str) -> str:
        finished = self(*arguments)
        assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-4000:]
        return finished.stdout.strip()

    def build(self, name: str, *arguments: str, base: str) -> subprocess.CompletedProcess[str]:
        options = ["--isolation", "chroot", "--format", "docker", "--tag", name]
        options += ["--build-arg", f"BASE=localhost/{base}", "--build-arg", "PIP_ARGS=--no-deps"]
        return self("build", *options, *arguments, "--file", "deploy/docker/train/Dockerfile", ".")


def debian_base() -> Path:
    """A tar of a minimal Debian, made once and kept in .tools."""
    if os.getuid() != 0:
        pytest.skip("NOT TESTED: a real build of the image: needs root")
    missing = [name for name in ("buildah", "debootstrap") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"NOT TESTED: a real build of the image: needs the Debian packages {', '.join(missing)}")
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
            pytest.skip(f"NOT TESTED: a real build of the image: debootstrap: {made.stdout[-300:]}")
        partial = kept.with_suffix(f".{os.getpid()}.tar")
        subprocess.run(["tar", "-C", str(folder), "-cf", str(partial), "."], check=True, timeout=300)
        partial.replace(kept)
        shutil.rmtree(folder)
    return kept


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    base = debian_base()
    folder = tmp_path_factory.mktemp("image")
    (folder / "Base").write_text("FROM scratch\nADD base.tar /\n")
    (folder / "base.tar").hardlink_to(base) if base.stat().st_dev == folder.stat().st_dev else shutil.copy(
        base, folder / "base.tar"
    )
    (folder / "dist").mkdir()
    _, name, content = built_wheel()
    (folder / "dist" / name).write_bytes(content)
    target = folder / "deploy" / "docker" / "train"
    target.mkdir(parents=True)
    shutil.copy(DOCKERFILE, target / "Dockerfile")
    buildah = Builder(folder)
    buildah.done("build", "--isolation", "chroot", "--tag", "base", "--file", "Base", ".")
    (folder / "base.tar").unlink()
    built = buildah.build("train", base="base")
    said = built.stdout[-4000:] + built.stderr[-4000:]
    if built.returncode != 0 and NO_NETWORK.search(said):
        pytest.skip(f"NOT TESTED: a real build of the image: no package mirror is reachable: {said[-300:]}")
    assert built.returncode == 0, said
    yield buildah
    buildah("rm", "--all")
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_image_has_the_programs_of_the_chart_and_no_key(builder: Builder) -> None:
    facts = json.loads(builder.done("inspect", "--type", "image", "train"))["Docker"]["config"]
    assert facts["User"] == "1000:1000"
    assert f"LD_LIBRARY_PATH={':'.join(LIBRARIES)}" in facts["Env"]
    assert facts["Healthcheck"]["Test"][0] == "CMD"
    container = builder.done("from", "train")
    root = Path(builder.done("mount", container))
    assert list((root / "etc" / "ssh").glob("ssh_host_*")) == []
    keys = [path for path in (root / "home").rglob("*") if ".ssh" in path.parts]
    assert keys == []
    shutil.copy(CHART / "files" / "sshd_config", root / "tmp" / "sshd_config")
    assert sorted(path.name for path in (root / "tmp").iterdir()) == ["sshd_config"]
    inside = ["run", "--isolation", "chroot", container, "--"]
    assert builder.done(*inside, "id", "-un") == "fleet"
    assert builder.done(*inside, "pwd") == "/home/fleet"
    version = builder.done(*inside, "python3", "-c", "import maskfleet; print(maskfleet.__version__)")
    assert version == __version__
    assert "Open MPI" in builder.done(*inside, "mpirun", "--version")
    builder.done(*inside, "ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-N", "", "-f", "/tmp/key")
    builder.done(*inside, "/usr/sbin/sshd", "-t", "-f", "/tmp/sshd_config", "-h", "/tmp/key")
    builder.done(*inside, "/usr/bin/sed", "s/^/* /", "/tmp/key.pub")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_efa_installer_runs_only_with_its_own_checksum(builder: Builder) -> None:
    """The base is the training image itself, which has everything, and a user 1000."""
    archive = builder.folder / "aws-efa-installer-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        member = tarfile.TarInfo("aws-efa-installer/efa_installer.sh")
        member.mode, member.size = 0o755, len(INSTALLER)
        packed.addfile(member, io.BytesIO(INSTALLER.encode()))
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    given = ["--build-arg", f"EFA_INSTALLER={archive.name}", "--build-arg"]
    refused = builder.build("wrong", *given, f"EFA_INSTALLER_SHA256={'0' * 64}", base="train")
    assert refused.returncode != 0
    assert "computed checksum did NOT match" in refused.stdout + refused.stderr
    built = builder.build("efa", *given, f"EFA_INSTALLER_SHA256={digest}", base="train")
    assert built.returncode == 0, built.stdout[-4000:] + built.stderr[-4000:]
    root = Path(builder.done("mount", builder.done("from", "efa")))
    facts = json.loads(builder.done("inspect", "--type", "image", "efa"))["Docker"]["config"]["Env"]
    [libraries] = [one.partition("=")[2].split(":") for one in facts if one.startswith("LD_LIBRARY_PATH=")]
    assert libraries == LIBRARIES * 2  # those of the base stay
    assert (root / "efa-arguments").read_text() == "--yes --skip-kmod --skip-limit-conf --no-verify\n"
    assert not (root / "tmp" / "efa").exists()
