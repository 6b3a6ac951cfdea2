"""Repositories, pushes and lists against moto's ECR, over HTTP; the tool that would push is a fake."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from image_tools import DIGEST, IMAGE_ID, FakeTool, fake_tool
from typer.testing import CliRunner

from maskfleet.cli.launch import with_newest_image
from maskfleet.cli.main import app
from maskfleet.config.launch import EksLaunch
from maskfleet.errors import InfraError, LaunchError
from maskfleet.infra.images.build import BuildOptions, build
from maskfleet.infra.images.builder import Builder
from maskfleet.infra.images.ecr import EcrRepository, ecr_address
from maskfleet.infra.images.push import PushOptions, push
from maskfleet.infra.images.record import PushedImage
from tools import moto_server

pytestmark = pytest.mark.slow

boto3 = pytest.importorskip("boto3", reason="boto3 is not here: pip install 'maskfleet[aws]'")
REGION, ACCOUNT = "eu-west-1", "123456789012"
MEDIA = "application/vnd.docker.distribution.manifest.v2+json"


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with moto_server(tmp_path_factory.mktemp("moto") / "log") as url:
        yield url


@pytest.fixture(params=["buildah"])
def tool(request: pytest.FixtureRequest, moto: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTool:
    """An image that was built with a fake tool, and an empty ECR."""
    made = fake_tool(tmp_path, request.param)
    settings = {"AWS_ENDPOINT_URL": moto, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    for name, value in {**made.env, **settings, "AWS_REGION": REGION, "AWS_EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    http(moto, "/moto-api/reset")
    build(BuildOptions(gpu=False), ("m.whl", b""), Builder(made.name, env=made.env), env=made.env, say=print)
    made.answer("push", f"x: digest: {DIGEST} size: 1")
    return made


def http(url: str, path: str) -> None:
    import urllib.request

    with urllib.request.urlopen(urllib.request.Request(url + path, method="POST")) as answer:
        answer.read()


@pytest.fixture
def ecr(tool: FakeTool, moto: str) -> Iterator[Any]:
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
    client = boto3.client("ecr", region_name=REGION, endpoint_url=moto, **keys)
    yield client
    client.close()


def put(ecr: Any, tag: str, *, config: str = f"sha256:{IMAGE_ID}", name: str = "maskfleet") -> str:
    """Put an image into ECR as a push would; returns its digest."""
    layer = {"mediaType": "application/vnd.docker.image.rootfs.diff.tar.gzip", "size": 7, "digest": "sha256:0"}
    settings = {"mediaType": "application/vnd.docker.container.image.v1+json", "size": 7, "digest": config}
    manifest = json.dumps({"schemaVersion": 2, "mediaType": MEDIA, "config": settings, "layers": [layer]})
    digest = f"sha256:{hashlib.sha256(manifest.encode()).hexdigest()}"
    answer = ecr.put_image(
        repositoryName=name, imageManifest=manifest, imageManifestMediaType=MEDIA, imageTag=tag, imageDigest=digest
    )
    return str(answer["image"]["imageId"]["imageDigest"])


def push_now(tool: FakeTool, said: list[str] | None = None, **options: Any) -> list[PushedImage]:
    say = (said if said is not None else []).append
    return push(PushOptions(**options), Builder(tool.name, env=tool.env), env=tool.env, say=say)


@pytest.mark.parametrize("tool", ["docker", "podman", "buildah"], indirect=True)
def test_a_push_creates_a_safe_repository_and_hides_the_login(tool: FakeTool, ecr: Any) -> None:
    said: list[str] = []
    [image] = push_now(tool, said)
    host = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com"
    assert image.repository == f"{host}/maskfleet"
    assert image.digest == DIGEST
    [made] = ecr.describe_repositories()["repositories"]
    assert made["imageTagMutability"] == "IMMUTABLE"
    assert made["imageScanningConfiguration"] == {"scanOnPush": True}
    assert made["encryptionConfiguration"] == {"encryptionType": "AES256"}
    [rule] = json.loads(ecr.get_lifecycle_policy(repositoryName="maskfleet")["lifecyclePolicyText"])["rules"]
    assert rule["selection"]["tagStatus"] == "untagged"
    [call] = tool.calls("push")
    login = call["login"]["auths"][host]["auth"]
    password = base64.b64decode(login).decode().removeprefix("AWS:")
    assert password
    assert call["mode"] == [0o600, 0o700]
    everything = json.dumps([tool.calls(name) for name in ("build", "tag", "push", "inspect", "image")])
    assert password not in everything.replace(json.dumps(call["login"]), "")
    assert login not in " ".join(call["argv"]) + " ".join(said)
    left = Path(tool.env["XDG_STATE_HOME"]).rglob("*")
    assert [path for path in left if path.is_file() and login in path.read_text(errors="replace")] == []


def test_a_key_of_our_own_encrypts_the_repository(tool: FakeTool, ecr: Any) -> None:
    push_now(tool, kms_key="alias/images")
    [made] = ecr.describe_repositories()["repositories"]
    assert made["encryptionConfiguration"] == {"encryptionType": "KMS", "kmsKey": "alias/images"}


def test_a_tag_that_is_there_is_a_success_with_the_same_content_and_an_error_with_another(
    tool: FakeTool, ecr: Any
) -> None:
    ecr.create_repository(repositoryName="maskfleet", imageTagMutability="IMMUTABLE")
    same, _ = put(ecr, "same"), put(ecr, "other", config=f"sha256:{'ef' * 32}")
    said: list[str] = []
    [image] = push_now(tool, said, tag="same")
    assert image.digest == same
    assert "is there already" in said[-1]
    with pytest.raises(InfraError, match="with other content: sha256:") as caught:
        push_now(tool, tag="other")
    assert "--tag" in caught.value.remedy
    assert tool.calls("push") == []


def test_a_repository_of_another_account_is_not_created(tool: FakeTool) -> None:
    other = f"999988887777.dkr.ecr.{REGION}.amazonaws.com/train"
    with pytest.raises(InfraError, match="no repository train in the AWS account 999988887777") as caught:
        push_now(tool, to=other)
    assert ACCOUNT in caught.value.what
    assert "999988887777" in caught.value.remedy


def test_the_list_and_launch_without_a_record_ask_ecr(tool: FakeTool, ecr: Any) -> None:
    result = CliRunner().invoke(app, ["image", "list"])
    assert result.exit_code == 0
    assert "does not exist" in result.stderr
    with pytest.raises(LaunchError, match=f"nor is one in maskfleet of the AWS account {ACCOUNT}"):
        with_newest_image(EksLaunch())
    ecr.create_repository(repositoryName="maskfleet")
    assert "is empty" in CliRunner().invoke(app, ["image", "list"]).stderr
    digest = put(ecr, "0.1-aabbccddeeff")
    put(ecr, "0.1-aabbccddeeff-notebook", config="sha256:11")
    result = CliRunner().invoke(app, ["image", "list"])
    [line] = [line for line in result.stdout.splitlines() if "notebook" not in line]
    assert line.split()[:2] == ["0.1-aabbccddeeff", digest]
    assert line.endswith("GB")
    listed = json.loads(CliRunner().invoke(app, ["image", "list", "--json"]).stdout)
    assert {one["digest"] for one in listed} >= {digest}
    found = with_newest_image(EksLaunch())
    uri = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/maskfleet"
    assert getattr(found, "image", None) == f"{uri}:0.1-aabbccddeeff@{digest}"


def test_what_push_prints_is_what_launch_takes(tool: FakeTool, moto: str) -> None:
    result = CliRunner().invoke(app, ["image", "push", "--with", tool.name])
    assert result.exit_code == 0, result.output
    assert getattr(with_newest_image(EksLaunch(gpus=0)), "image", None) == result.stdout.strip()


def test_expired_credentials_are_named(tool: FakeTool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """moto accepts all credentials, so a server that answers as AWS does with an expired token."""
    import threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Expired(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.dumps({"__type": "ExpiredTokenException", "message": "expired"}).encode()
            self.send_response(400)
            self.send_header("Content-Type", "application/x-amz-json-1.1")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Print nothing."""

    address = ecr_address(None, REGION)
    assert address is not None
    with ThreadingHTTPServer(("127.0.0.1", 0), Expired) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL_ECR", f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(InfraError, match="does not accept the credentials") as caught:
            EcrRepository(address).uri()
        server.shutdown()
    assert "aws sso login" in caught.value.remedy
