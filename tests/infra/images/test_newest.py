"""Which image `launch` takes by itself, and Amazon's EFA installer."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from maskfleet.cli.launch import with_newest_image
from maskfleet.config.launch import EksLaunch, LocalLaunch
from maskfleet.errors import InfraError, LaunchError, MaskfleetError
from maskfleet.infra.images.ecr import EcrAddress, EcrImage, ecr_address
from maskfleet.infra.images.efa import PINNED, EfaRelease, installer
from maskfleet.infra.images.newest import newest_image, newest_of
from maskfleet.infra.images.record import ImageJournal, PushedImage
from maskfleet.launch.eks.notebook import notebook_image

EAST = "111122223333.dkr.ecr.us-east-1.amazonaws.com/maskfleet"
WEST = "111122223333.dkr.ecr.us-west-2.amazonaws.com/maskfleet"


def pushed(tag: str, repository: str = EAST, *, kind: str = "train", gpu: bool = True) -> PushedImage:
    digest = f"sha256:{hashlib.sha256(tag.encode()).hexdigest()}"
    return PushedImage(kind, repository, tag, digest, gpu, "2026-11-16T12:00:00+00:00")


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageJournal:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return ImageJournal({"XDG_STATE_HOME": str(tmp_path)})


def newest(record: ImageJournal, *, cpu: bool = False, **env: str) -> str:
    return newest_image(region=None, cpu=cpu, env={"XDG_STATE_HOME": str(record.folder.parents[1]), **env}).tag


def test_launch_takes_the_newest_push_and_prints_it(record: ImageJournal, capsys: pytest.CaptureFixture[str]) -> None:
    for image in (pushed("1"), pushed("2"), pushed("2-notebook", kind="notebook")):
        record.add_pushed(image)
    found = with_newest_image(EksLaunch())
    assert isinstance(found, EksLaunch)
    assert found.image == f"{EAST}:2@{pushed('2').digest}"
    assert found.image in capsys.readouterr().err
    record.add_pushed(pushed("1"))  # pushed again: the newest once more
    assert newest(record) == "1"


def test_a_named_image_wins_and_other_targets_need_none(record: ImageJournal) -> None:
    record.add_pushed(pushed("1"))
    assert with_newest_image(EksLaunch(image="mine@x")) == EksLaunch(image="mine@x")
    assert with_newest_image(LocalLaunch()) == LocalLaunch()


def test_an_image_for_cpus_is_taken_only_for_cpus(record: ImageJournal) -> None:
    record.add_pushed(pushed("1"))
    record.add_pushed(pushed("2-cpu-ab", gpu=False))
    assert newest(record) == "1"
    assert newest(record, cpu=True) == "2-cpu-ab"
    cpu = with_newest_image(EksLaunch(gpus=0))
    assert ":2-cpu-ab@" in str(getattr(cpu, "image", None))


def test_the_region_decides_between_two_and_without_it_they_are_named(record: ImageJournal) -> None:
    record.add_pushed(pushed("east"))
    record.add_pushed(pushed("west", WEST))
    assert newest(record, AWS_REGION="us-east-1") == "east"
    assert newest(record, AWS_DEFAULT_REGION="us-west-2") == "west"
    with pytest.raises(LaunchError, match="several registries") as caught:
        newest(record)
    assert "us-east-1" in caught.value.what
    assert "--image" in caught.value.remedy


def test_without_a_push_the_error_says_what_to_run(record: ImageJournal, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("boto3")
    for name, value in {"AWS_EC2_METADATA_DISABLED": "true", "AWS_REGION": "us-east-1", "AWS_PROFILE": ""}.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    with pytest.raises(LaunchError, match="no training image is named") as caught:
        with_newest_image(EksLaunch())
    assert "no AWS credentials" in caught.value.what
    assert caught.value.remedy.startswith("maskfleet image push")


def test_a_damaged_record_is_named(record: ImageJournal) -> None:
    record.folder.mkdir(parents=True)
    record.path.write_text('{"pushed": [{"nothing": 1}]}')
    with pytest.raises(MaskfleetError, match="not a record of images"):
        record.pushed()


def test_ecr_lists_choose_training_images() -> None:
    def image(*tags: str) -> EcrImage:
        return EcrImage("sha256:0", tags, "", 1)

    listed = [image(), image("3-notebook"), image("3-cpu-ab"), image("2"), image("1")]
    assert newest_of(listed, cpu=False) == (listed[3], "2")
    assert newest_of(listed, cpu=True) == (listed[2], "3-cpu-ab")
    assert newest_of(listed[:2], cpu=True) is None


def test_repositories_in_ecr_and_elsewhere_are_told_apart() -> None:
    assert ecr_address(None, "us-east-1") == EcrAddress("maskfleet", None, "us-east-1")
    assert ecr_address("team/train", None) == EcrAddress("team/train")
    assert ecr_address(WEST, None) == EcrAddress("maskfleet", "111122223333", "us-west-2")
    assert ecr_address("ghcr.io/us/train", None) is None
    assert ecr_address("localhost/train", None) is None
    with pytest.raises(InfraError, match="not the name of a repository"):
        ecr_address("Team", None)


def test_the_notebook_image_of_a_digest_with_a_tag_is_known() -> None:
    assert notebook_image(pushed("2").reference) == f"{EAST}:2-notebook"
    with pytest.raises(LaunchError, match="not known"):
        notebook_image(f"{EAST}@{pushed('2').digest}")


CONTENT = b"installer" * 1000


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """A web server with the installer, a truncated one, and nothing else."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path in ("/installer", "/truncated")
            self.send_response(200 if known else 404)
            self.send_header("Content-Length", str(len(CONTENT) if known else 0))
            self.end_headers()
            self.wfile.write(b"" if not known else CONTENT if self.path == "/installer" else CONTENT[:100])

        def log_message(self, *args: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def release(url: str, content: bytes = CONTENT) -> EfaRelease:
    return EfaRelease("9.9", hashlib.sha256(content).hexdigest(), url)


def test_the_installer_is_downloaded_once_and_checked(site: str, tmp_path: Path) -> None:
    said: list[str] = []
    path = installer(tmp_path / "cache", said.append, release(f"{site}/installer"))
    assert path.read_bytes() == CONTENT
    assert installer(tmp_path / "cache", said.append, release("http://127.0.0.1:1/none")) == path
    assert len(said) == 1
    path.write_bytes(b"damaged")
    installer(tmp_path / "cache", said.append, release(f"{site}/installer"))
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("path", "content", "what"),
    [
        ("/installer", b"other", "another SHA-256"),
        ("/truncated", CONTENT, "cannot download|another SHA-256"),
        ("/none", CONTENT, "Not Found"),
    ],
)
def test_a_wrong_installer_is_not_kept(site: str, tmp_path: Path, path: str, content: bytes, what: str) -> None:
    with pytest.raises(InfraError, match=what) as caught:
        installer(tmp_path, lambda text: None, release(f"{site}{path}", content))
    assert "--efa-installer" in caught.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_the_pin_is_complete() -> None:
    assert PINNED.url == f"https://efa-installer.amazonaws.com/{PINNED.name}"
    assert len(bytes.fromhex(PINNED.sha256)) == 32
