"""Small roots of Terraform's built-in terraform_data in place of AWS, and a small Kubernetes API for kubectl."""

from __future__ import annotations

import base64
import datetime
import io
import ipaddress
import json
import os
import re
import shutil
import ssl
import stat
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from rich.console import Console

from maskfleet.cli.infra_view import TerminalView
from maskfleet.infra.stacks import Place
from maskfleet.infra.terraform.session import Options, Session, open_session, read_session
from maskfleet.infra.terraform.up import up
from maskfleet.launch.supervise.processes import JOB_VARIABLE, job_id, kill_all
from tools import tool

ROOTS = Path(__file__).parent / "roots"


def make_place(folder: Path) -> Place:
    """A deploy folder of our own, with the folders of the real one."""
    deploy = folder / "shipped"
    shutil.copytree(ROOTS, deploy / "terraform" / "eks")
    (deploy / "helm" / "storage").mkdir(parents=True)
    (deploy / "helm" / "storage" / "Chart.yaml").write_text("name: storage\n")
    return Place(
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
    """A work folder with a place, an environment and a screen."""

    place: Place
    workdir: Path
    env: dict[str, str]
    argv_log: Path
    screen: io.StringIO = field(default_factory=io.StringIO)

    def options(self, *assignments: str, **more: Any) -> Options:
        given = ("region=us-west-2", "cluster_name=fleet", *assignments)
        return Options(self.workdir, given, **more)

    def open(self, *assignments: str, yes: bool = True, **more: Any) -> Session:
        return open_session(self.options(*assignments, **more), self.place, self.view(yes=yes), self.env)

    def read(self, *, yes: bool = True) -> Session:
        return read_session(Options(self.workdir), self.place, self.view(yes=yes), self.env)

    def view(self, *, yes: bool = True) -> TerminalView:
        return TerminalView(yes=yes, console=Console(file=self.screen, soft_wrap=True, highlight=False))

    def shown(self) -> str:
        """What the screen shows since the last look."""
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
    """A work folder that does not exist yet; what Terraform started and left behind ends with it."""
    made = make_stage(tmp_path)
    made.env[JOB_VARIABLE] = job_id(tmp_path)
    yield made
    assert kill_all(job_id(tmp_path)) == []


def make_stage(folder: Path) -> Stage:
    """A work folder, and a terraform on PATH that notes its arguments before it becomes the real one."""
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
    return Stage(make_place(folder), folder / "work", env, log)


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def driver(stage: Stage, tmp_path: Path) -> list[str]:
    """The start of a command line: the real `maskfleet`, but with the roots of these tests."""
    script = tmp_path / "driver.py"
    place = stage.place
    script.write_text(
        f"""
from pathlib import Path
from maskfleet.infra import place
chosen = place.Place({place.name!r}, Path({str(place.deploy)!r}), {place.folders!r}, {place.roots!r},
                     {place.cluster!r}, {place.data!r}, {place.guards!r})
place.eks = lambda: chosen
from maskfleet.cli.main import main
main()
"""
    )
    return [sys.executable, str(script), "infra"]


class KubeApi:
    """The part of the Kubernetes API that `down` uses: lists, deletes, and objects that take their time to go."""

    TOKEN = "k8s-aws-v1.test"

    def __init__(self, folder: Path) -> None:
        self.reset()
        certificate, key = make_certificate(folder)
        self.authority = certificate
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)
        self.thread.start()

    def reset(self) -> None:
        """No objects, and nothing was asked."""
        self.objects: dict[str, dict[str, Any]] = {}
        self.lingering: dict[str, int] = {}
        self.deleted: list[str] = []
        self.follows: dict[str, list[str]] = {}

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.server.server_address[1]}"

    def add(self, path: str, *, lingers: int = 0, follows: tuple[str, ...] = (), **content: Any) -> str:
        """An object at `path`; after its deletion it stays for `lingers` more lists and takes `follows` with it."""
        space = re.search(r"/namespaces/([^/]+)/", path)
        meta = {"name": path.rsplit("/", 1)[-1], **({"namespace": space.group(1)} if space else {})}
        self.objects[path] = {"metadata": {**meta, **content.pop("metadata", {})}, **content}
        self.lingering[path] = lingers
        self.follows[path] = list(follows)
        return path

    def list(self, path: str, query: Mapping[str, list[str]]) -> list[dict[str, Any]]:
        found = []
        for name, item in list(self.objects.items()):
            collection = re.sub(r"/namespaces/[^/]+", "", name.rsplit("/", 1)[0])
            if collection != path:
                continue
            if name in self.deleted:
                self.lingering[name] -= 1
                if self.lingering[name] < 0:
                    del self.objects[name]
                    continue
            if self._selected(item, query):
                found.append(item)
        return found

    def delete(self, path: str) -> bool:
        if path not in self.objects:
            return False
        if path not in self.deleted:
            self.deleted.append(path)
            for other in self.follows[path]:
                self.delete(other)
        return True

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    @staticmethod
    def _selected(item: dict[str, Any], query: Mapping[str, list[str]]) -> bool:
        selector = query.get("labelSelector", [""])[0]
        chosen = re.fullmatch(r"(\S+) in \((.*)\)", selector)
        if not chosen:
            assert not selector, selector
            return True
        return item["metadata"].get("labels", {}).get(chosen.group(1)) in chosen.group(2).split(",")

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        api = self
        kinds = {"/api/v1/services", "/api/v1/persistentvolumes", "/apis/batch/v1/jobs", "/apis/apps/v1/deployments"}
        kinds |= {"/apis/networking.k8s.io/v1/ingresses"}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                known = kinds | {re.sub(r"/namespaces/[^/]+", "", name.rsplit("/", 1)[0]) for name in list(api.objects)}
                if not self._allowed():
                    return
                if parts.path == "/version":
                    self._answer(200, {"gitVersion": "v1.35.0"})
                elif parts.path in known:
                    self._answer(200, {"kind": "List", "items": api.list(parts.path, parse_qs(parts.query))})
                else:
                    self._answer(404, status_of(404, "NotFound", "the server could not find the requested resource"))

            def do_DELETE(self) -> None:
                if not self._allowed():
                    return
                if api.delete(urlsplit(self.path).path):
                    self._answer(200, {"kind": "Status", "apiVersion": "v1", "status": "Success"})
                else:
                    self._answer(404, status_of(404, "NotFound", "not found"))

            def _allowed(self) -> bool:
                good = self.headers.get("Authorization") == f"Bearer {api.TOKEN}"
                if not good:
                    self._answer(401, status_of(401, "Unauthorized", "Unauthorized"))
                return good

            def _answer(self, code: int, body: dict[str, Any]) -> None:
                data = json.dumps(body).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                return

        return Handler


def status_of(code: int, reason: str, message: str) -> dict[str, Any]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": reason,
        "message": message,
        "code": code,
    }


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stage, KubeApi]]:
    """Both roots made, with a Kubernetes API at the address of the cluster."""
    tool("kubectl")
    folder = tmp_path_factory.mktemp("made")
    stage, api = make_stage(folder), KubeApi(folder)
    give_tokens(folder, api)
    authority = base64.b64encode(api.authority.read_bytes()).decode()
    up(stage.open(f"api={api.url}", f"api_ca={authority}"))
    stage.shown()
    yield stage, api
    api.close()


@pytest.fixture
def made(made_once: tuple[Stage, KubeApi], tmp_path: Path) -> Stage:
    """A copy of what was made once: a work folder may be moved."""
    stage = made_once[0]
    shutil.copytree(stage.workdir, tmp_path / "made", symlinks=True)
    return replace(stage, workdir=tmp_path / "made", screen=io.StringIO())


@pytest.fixture
def kube_api(made_once: tuple[Stage, KubeApi]) -> KubeApi:
    """The API of the cluster of `made`, empty."""
    made_once[1].reset()
    return made_once[1]


def give_tokens(folder: Path, api: KubeApi) -> None:
    """An `aws` that gives tokens for the cluster, and notes what it was asked."""
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
