"""Small roots of Terraform's built-in terraform_data instead of AWS, and the fake Kubernetes API as their cluster."""

from __future__ import annotations

import base64
import datetime
import io
import ipaddress
import json
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from maskfleet.cli.infra_view import TerminalView
from maskfleet.infra.stacks import Stack
from maskfleet.infra.terraform.session import Options, Session, open_session, read_session
from maskfleet.infra.terraform.up import up
from maskfleet.launch.supervise.processes import JOB_VARIABLE, job_id, kill_all
from maskfleet.system.kube.fake import FakeKube
from tools import tool

ROOTS = Path(__file__).parent / "roots"


def make_stack(folder: Path) -> Stack:
    """A deploy folder of our own, with the folders of the real one."""
    deploy = folder / "shipped"
    shutil.copytree(ROOTS, deploy / "terraform" / "eks")
    (deploy / "helm" / "storage").mkdir(parents=True)
    (deploy / "helm" / "storage" / "Chart.yaml").write_text("name: storage\n")
    return Stack(
        name="eks",
        deploy=deploy,
        folders=("terraform/eks", "helm"),
        roots=("terraform/eks/aws", "terraform/eks/addons"),
        cluster="terraform_data.cluster",
        data=frozenset({"terraform_data.efs", "terraform_data.fsx"}),
        guards=frozenset({"terraform_data.efs_policy", "terraform_data.fsx_policy"}),
    )


@dataclass
class Stage:
    """A work folder with a stack, an environment and a screen."""

    stack: Stack
    workdir: Path
    env: dict[str, str]
    argv_log: Path
    screen: io.StringIO = field(default_factory=io.StringIO)

    def options(self, *assignments: str, **more: Any) -> Options:
        given = ("region=us-west-2", "cluster_name=fleet", *assignments)
        return Options(self.workdir, given, **more)

    def open(self, *assignments: str, yes: bool = True, **more: Any) -> Session:
        return open_session(self.options(*assignments, **more), self.stack, self.view(yes=yes), self.env)

    def read(self, *, yes: bool = True) -> Session:
        return read_session(Options(self.workdir), self.stack, self.view(yes=yes), self.env)

    def view(self, *, yes: bool = True) -> TerminalView:
        return TerminalView(yes=yes, console=Console(file=self.screen, soft_wrap=True, highlight=False))

    def shown(self) -> str:
        """Output since the last call."""
        text = self.screen.getvalue()
        self.screen.seek(0)
        self.screen.truncate()
        return text

    def commands(self) -> list[list[str]]:
        """Every terraform process so far, as lists of arguments."""
        lines = self.argv_log.read_text().splitlines() if self.argv_log.exists() else []
        return [json.loads(line) for line in lines]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """A work folder that does not exist yet; processes that Terraform left are killed after the test."""
    made = make_stage(tmp_path)
    made.env[JOB_VARIABLE] = job_id(tmp_path)
    yield made
    assert kill_all(job_id(tmp_path)) == []


def make_stage(folder: Path) -> Stage:
    """A work folder, and a terraform on PATH that records its arguments and then runs the real one."""
    programs = folder / "programs"
    programs.mkdir()
    log = folder / "argv.jsonl"
    recorder = f"""#!{sys.executable} -I
import json, os, sys
with open({str(log)!r}, "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
os.execv({tool("terraform")!r}, ["terraform", *sys.argv[1:]])
"""
    write_program(programs / "terraform", recorder)
    env = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "TF_CLI_CONFIG_FILE": os.devnull}
    return Stage(make_stack(folder), folder / "work", env, log)


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def driver(stage: Stage, tmp_path: Path) -> list[str]:
    """The start of a command line: the real `maskfleet`, but with the roots of these tests."""
    script = tmp_path / "driver.py"
    stack = stage.stack
    script.write_text(
        f"""
from pathlib import Path
from maskfleet.infra import stacks
chosen = stacks.Stack({stack.name!r}, Path({str(stack.deploy)!r}), {stack.folders!r}, {stack.roots!r},
                      {stack.cluster!r}, {stack.data!r}, {stack.guards!r})
stacks.eks = lambda: chosen
from maskfleet.cli.main import main
main()
"""
    )
    return [sys.executable, str(script), "infra"]


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stage, FakeKube]]:
    """Both roots made, with a Kubernetes API at the address of the cluster."""
    folder = tmp_path_factory.mktemp("made")
    certificate = make_certificate(folder)
    stage = make_stage(folder)
    with FakeKube(folder, certificate=certificate) as api:
        give_tokens(folder, api)
        authority = base64.b64encode(certificate[0].read_bytes()).decode()
        up(stage.open(f"api={api.url}", f"api_ca={authority}"))
        stage.shown()
        yield stage, api


@pytest.fixture
def made(made_once: tuple[Stage, FakeKube], tmp_path: Path) -> Stage:
    """A copy of what was made once: a work folder may be moved."""
    stage = made_once[0]
    shutil.copytree(stage.workdir, tmp_path / "made", symlinks=True)
    return replace(stage, workdir=tmp_path / "made", screen=io.StringIO())


@pytest.fixture
def kube_api(made_once: tuple[Stage, FakeKube], monkeypatch: pytest.MonkeyPatch) -> FakeKube:
    """The API of the cluster of `made`, empty, with the `aws` on PATH that gives tokens for it."""
    stage, api = made_once
    monkeypatch.setenv("PATH", stage.env["PATH"])
    api.objects.clear()
    api.deleted.clear()
    return api


def give_tokens(folder: Path, api: FakeKube) -> None:
    """An `aws` that gives tokens for the cluster, and records its arguments."""
    credential = {
        "apiVersion": "client.authentication.k8s.io/v1beta1",
        "kind": "ExecCredential",
        "spec": {},
        "status": {"token": api.TOKEN},
    }
    text = f"#!/bin/sh\necho \"$@\" >> {folder / 'aws.log'}\ncat <<'E'\n{json.dumps(credential)}\nE\n"
    write_program(folder / "programs" / "aws", text)


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kube-api")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "api.crt", folder / "api.key"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    no_encryption = serialization.NoEncryption()
    paths[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, no_encryption)
    )
    return paths
