"""The images: linters for the Dockerfiles, and real builds with `maskfleet image build` on a Debian base, for CPUs."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import runpy
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from image_store import COMPILED, ImageStore, built
from loopback_registry import loopback_registry
from train_release import CHART

from maskfleet import __version__
from maskfleet.infra.images.builder import Builder, BuildRequest
from maskfleet.infra.images.record import BuiltImage, ImageJournal
from maskfleet.system.deploy_files import deploy_path
from maskfleet.training.background.shared import shared_name
from maskfleet.training.background.target import Target
from micro_run import MICRO
from tools import ROOT, moto_server, run_tool

pytest_plugins = ("image_fixtures",)

DOCKERFILES = [deploy_path("docker", kind, "Dockerfile") for kind in ("train", "notebook", "sagemaker")]
LIBRARIES = ["/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu", "/opt/amazon/ofi-nccl/lib", "/opt/amazon/efa/lib"]
INSTALLER = """#!/bin/sh
echo "$DEBIAN_FRONTEND" "$@" > /efa-arguments
"""
PLUGIN = "mkdir -p /opt/amazon/ofi-nccl/lib && touch /opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so\n"
# The extra `k8s`, with which a laptop talks to a cluster; triton, which comes with torch's builds for CUDA; and extras
# whose commands and fields name the package to install.
NOT_IN_THE_IMAGE = {"anyio", "bcrypt", "httpx", "httpx_ws", "kr8s", "triton", "wsproto", "yaml"}
NOT_IN_THE_IMAGE |= {"mlflow", "onnx", "onnxruntime", "wandb"}
IMPORT_ALL = """
import ast, importlib, pathlib, sys
import maskfleet
root = pathlib.Path(maskfleet.__file__).parent
names = set()
for path in root.rglob("*.py"):
    if "deploy" in path.relative_to(root).parts:
        continue
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.add(node.module)
missing = set()
for name in sorted(names):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing.add(error.name.split(".")[0])
print(len(names), *sorted(missing))
"""


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.parent.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    assert run_tool("hadolint", path) == ""


@pytest.mark.slow
def test_checkov_finds_nothing() -> None:
    options = ["--framework", "dockerfile", "--skip-download", "--output", "json", "--compact"]
    report = json.loads(run_tool("checkov", "--file", *map(str, DOCKERFILES), *options))
    assert report["summary"]["failed"] == 0
    assert report["summary"]["passed"] > 100
    skipped = sorted(check["check_id"] for check in report["results"]["skipped_checks"])
    assert skipped == ["CKV_DOCKER_2", *["CKV_DOCKER_7"] * 3, "CKV_DOCKER_8"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.parent.name)
def test_a_build_downloads_only_from_the_base_image_its_distribution_and_the_package_index(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for word in ("curl", "wget", "git ", "http://", "https://", "ADD ", "ssh-keygen", "allow-run-as-root"):
        assert word not in text


def test_the_versions_in_the_images_are_those_that_are_tested() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "image_constraints.py"))
    written = deploy_path("docker", "constraints.txt").read_text(encoding="utf-8")
    assert written == script["text"](), "run: python scripts/image_constraints.py"
    assert {"boto3==1.44.0", "torch==2.13.0"} <= set(written.splitlines())


@pytest.fixture(scope="module")
def container(store: ImageStore, train: str) -> tuple[str, Path]:
    return store.container(train)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_image_has_the_programs_of_the_chart_no_key_and_no_compiler(
    store: ImageStore, train: str, container: tuple[str, Path]
) -> None:
    name, root = container
    facts = json.loads(store.done("buildah", "inspect", "--type", "image", train))["OCIv1"]["config"]
    assert facts["User"] == "1000:1000"
    assert f"LD_LIBRARY_PATH={':'.join(LIBRARIES)}" in facts["Env"]
    assert list((root / "etc" / "ssh").glob("ssh_host_*")) == []
    assert [path for path in (root / "home").rglob("*") if ".ssh" in path.parts] == []
    assert not [path for path in (root / "tmp", root / "root") for path in path.iterdir() if path.name[0] != "."]
    for program in ("gcc", "cc", "clang", "make"):
        assert not (root / "usr" / "bin" / program).exists()
    assert not list((root / "opt").glob("amazon/openmpi*"))  # Open MPI is the distribution's alone
    assert not (root / "root" / ".cache").exists()
    shutil.copy(CHART / "files" / "sshd_config", root / "tmp" / "sshd_config")
    assert store.inside(name, "id", "-un") == "fleet"
    assert store.inside(name, "pwd") == "/home/fleet"
    assert "Open MPI" in store.inside(name, "/usr/bin/mpirun", "--version")
    store.inside(name, "ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-N", "", "-f", "/tmp/key")
    store.inside(name, "/usr/sbin/sshd", "-t", "-f", "/tmp/sshd_config", "-h", "/tmp/key")
    store.inside(name, "/usr/bin/sed", "s/^/* /", "/tmp/key.pub")
    for program in ("train", "serve"):
        assert f"maskfleet sagemaker {program}" in (root / "usr" / "local" / "bin" / program).read_text()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_compiled_code_in_the_image_is_found_by_runs(store: ImageStore, container: tuple[str, Path]) -> None:
    """By ordinary users, who may load code that they cannot change if it belongs to root."""
    name, root = container
    [path] = (root / "opt" / "maskfleet" / "compiled").iterdir()
    assert path.name == shared_name([COMPILED], Target.of(torch.device("cpu")))
    assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (0, 0o644)
    inside = f"/opt/maskfleet/compiled/{path.name}"
    code = (
        "import sys; from pathlib import Path; from maskfleet.training.background.artifacts import expect_only_own\n"
        "expect_only_own(Path(sys.argv[1]))"
    )
    store.inside(name, "python", "-c", code, inside)
    assert "64 x 64" in store.inside(name, "maskfleet", "cache", "info", inside)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_command_finds_its_packages_in_the_image(store: ImageStore, container: tuple[str, Path]) -> None:
    name, _ = container
    assert store.inside(name, "maskfleet", "--version") == f"maskfleet {__version__}"
    number, *missing = store.inside(name, "python", "-c", IMPORT_ALL).splitlines()[-1].split()
    assert int(number) > 200
    assert set(missing) == NOT_IN_THE_IMAGE
    # Nothing but the extra `aws` needs awscrt, which the base image lacks.
    assert store.inside(name, "python", "-c", "import awscrt; print(awscrt.__file__)").startswith("/opt/venv/")
    # Its charts and notebooks are there, and its bytecode is used although all files have the same time.
    shown = "import maskfleet.system.deploy_files as d; print(d.deploy_path('helm', 'train'), d.notebooks_path())"
    assert "/opt/venv/lib/" in store.inside(name, "python", "-c", shown)
    verbose = store("buildah", "run", name, "--", "python", "-v", "-c", "import maskfleet.errors").stderr
    assert re.search(r"errors\.cpython-311\.pyc matches|code object from '.*errors\.cpython-311\.pyc'", verbose)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_image_trains_and_stages_data_as_an_ordinary_user(
    store: ImageStore, container: tuple[str, Path], tmp_path: Path
) -> None:
    boto3 = pytest.importorskip("boto3")
    name, root = container
    size = ("--height", "64", "--width", "64", "--classes", "2", "--max-objects", "3")
    store.inside(name, "maskfleet", "data", "make-shapes", "shapes", "--train", "4", "--val", "2", *size)
    settings: dict[str, Any] = {}
    for field, value in {**MICRO, "data.root": "shapes", "train.epoch_schedule": ((1, None),)}.items():
        section = settings
        *parents, leaf = field.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[leaf] = value
    (root / "home" / "fleet" / "micro.yaml").write_text(json.dumps(settings))
    store.inside(name, "maskfleet", "train", "run", "--recipe", "demo", "--config", "micro.yaml", OMP_NUM_THREADS="1")
    run = root / "home" / "fleet" / "run"
    assert (run / "run.yaml").stat().st_uid == 1000
    assert "loss" in (run / "metrics.jsonl").read_text()
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
    with moto_server(tmp_path / "log") as url:
        client = boto3.client(
            "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="key", aws_secret_access_key="secret"
        )
        client.create_bucket(Bucket="data")
        client.close()
        aws = {**keys, "AWS_ENDPOINT_URL": url}
        store.inside(name, "maskfleet", "data", "stage", "shapes", "s3://data/shapes", **aws)
        store.inside(name, "maskfleet", "data", "stage", "s3://data/shapes", "copy", **aws)
    for source in (root / "home" / "fleet" / "shapes").rglob("*.jpg"):
        copy = root / "home" / "fleet" / "copy" / source.relative_to(root / "home" / "fleet" / "shapes")
        assert copy.read_bytes() == source.read_bytes()


@pytest.fixture(scope="module")
def slim(store: ImageStore) -> list[str]:
    """The names of two builds without any dependency, which take less time."""
    return [built(store, "--base", "localhost/base", "--pip-args=--no-deps") for _ in range(2)]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_builds_have_the_same_digest(slim: list[str]) -> None:
    assert slim[0] == slim[1]
    tag = slim[0].partition(":")[2]
    assert re.fullmatch(rf"{re.escape(__version__)}-cpu-[0-9a-f]{{12}}", tag)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_real_push_reaches_a_registry_with_the_login_of_the_user(store: ImageStore) -> None:
    """A small image, built as ours are; again it has the same digest, in docker's kind of manifest."""
    (store.folder / "Small").write_text("FROM scratch\nCOPY Small /\n")
    command = Builder("buildah", env=store.env).build_command(
        BuildRequest(store.folder, "Small", {}, 1767225600), store.folder / "id"
    )
    store.done(*command)
    image_id = (store.folder / "id").read_text().strip().removeprefix("sha256:")
    name = f"localhost/maskfleet:{image_id[:12]}"
    store.done("buildah", "tag", image_id, name)
    ImageJournal(store.env).add_built(BuiltImage("train", name, image_id, image_id[:12], "buildah", False))
    with loopback_registry("me:secret") as registry:
        auth, empty, config = (store.folder / file for file in ("auth.json", "empty.json", "registries.conf"))
        login = base64.b64encode(b"me:secret").decode()
        auth.write_text(json.dumps({"auths": {registry.host: {"auth": login}}}))
        empty.write_text('{"auths": {}}')
        config.write_text(f'[[registry]]\nlocation = "{registry.host}"\ninsecure = true\n')
        settings = {"REGISTRY_AUTH_FILE": str(auth), "CONTAINERS_REGISTRIES_CONF": str(config)}
        target = ("push", "--to", f"{registry.host}/team/maskfleet")
        refused = store.image(*target, **{**settings, "REGISTRY_AUTH_FILE": str(empty)})
        assert refused.returncode == 2
        assert "the registry refused the login" in refused.stderr
        pushed = [store.image(*target, **settings) for _ in range(2)]
    assert [one.returncode for one in pushed] == [0, 0], pushed[0].stderr[-3000:]
    assert pushed[0].stdout == pushed[1].stdout
    [(tagged, manifest)] = registry.manifests.items()
    assert tagged == f"team/maskfleet:{name.partition(':')[2]}"
    digest = hashlib.sha256(manifest).hexdigest()
    assert pushed[0].stdout.strip() == f"{registry.host}/{tagged}@sha256:{digest}"
    described = json.loads(manifest)
    assert described["mediaType"] == "application/vnd.docker.distribution.manifest.v2+json"
    assert described["config"]["digest"].removeprefix("sha256:")[:12] == name[-12:]
    assert {layer["digest"] for layer in described["layers"]} <= registry.blobs.keys()


@pytest.mark.parametrize("folder", ["lib", "lib/x86_64-linux-gnu"])
@pytest.mark.parametrize("installed", [("libnccl-net-ofi.so",), ("libnccl-net-ofi.so", "libnccl-net.so"), ()])
def test_the_plugin_has_the_name_that_nccl_looks_for(folder: str, installed: tuple[str, ...], tmp_path: Path) -> None:
    """The end of the EFA step, in another folder than /opt/amazon."""
    text = DOCKERFILES[0].read_text(encoding="utf-8")
    [script] = re.findall(r"&& (for folder in .*?) \\\n *&& rm -rf /tmp/efa", text, re.DOTALL)
    place = tmp_path / "ofi-nccl" / folder
    place.mkdir(parents=True)
    for name in installed:
        (place / name).write_text(name)
    done = subprocess.run(
        ["sh", "-c", script.replace("\\\n", "").replace("/opt/amazon", str(tmp_path))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) == bool(installed), done.stderr
    if installed:
        assert (place / "libnccl-net.so").read_text() == installed[-1]
    else:
        assert "has no aws-ofi-nccl for this base image" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_efa_installer_runs_only_with_its_checksum_and_must_bring_the_plugin(store: ImageStore) -> None:
    """The step of the Dockerfile alone, with a script in place of the real installer, which has 700 MB."""
    base, arguments, _, step, *_ = DOCKERFILES[0].read_text(encoding="utf-8").split("\n\n")
    assert "efa_installer.sh" in step

    def build(name: str, content: str, digest: str | None = None) -> tuple[int, str]:
        context = store.folder / name
        context.mkdir()
        (context / "Dockerfile").write_text("\n".join((base, arguments, step)) + "\n")
        archive = context / "aws-efa-installer-1.0.tar.gz"
        with tarfile.open(archive, "w:gz") as packed:
            member = tarfile.TarInfo("aws-efa-installer/efa_installer.sh")
            member.mode, member.size = 0o755, len(content)
            packed.addfile(member, io.BytesIO(content.encode()))
        digest = digest or hashlib.sha256(archive.read_bytes()).hexdigest()
        given = {"BASE": "localhost/base", "EFA_INSTALLER": archive.name, "EFA_INSTALLER_SHA256": digest}
        options = [word for one, value in given.items() for word in ("--build-arg", f"{one}={value}")]
        done = store("buildah", "build", "--tag", name, *options, "--file", str(context / "Dockerfile"), str(context))
        return done.returncode, done.stdout + done.stderr

    code, said = build("wrong", INSTALLER, "0" * 64)
    assert code != 0
    assert "computed checksum did NOT match" in said
    for attempt in range(5):  # buildah may lose what a step prints right before it ends, on a busy machine
        code, said = build(f"plain-{attempt}", INSTALLER)
        assert code != 0
        if "has no aws-ofi-nccl for this base image" in said:
            break
    assert "has no aws-ofi-nccl for this base image" in said
    code, said = build("efa", INSTALLER + PLUGIN)
    assert code == 0, said[-4000:]
    _, root = store.container("efa")
    found = (root / "efa-arguments").read_text()
    assert found == "noninteractive --yes --skip-kmod --skip-limit-conf --skip-mpi --no-verify\n"
    assert not (root / "tmp" / "efa").exists()
    assert (root / "opt/amazon/ofi-nccl/lib/libnccl-net.so").readlink() == Path("libnccl-net-ofi.so")
