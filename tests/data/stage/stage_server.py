"""What tests of staging do with folders and with a real S3 server."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from flaky_s3 import FlakyS3

from maskfleet.data.stage.stage import Staged, stage


def direct(s3: FlakyS3) -> Any:
    """A client that goes past the proxy."""
    return client_of(s3.behind)


@functools.cache
def client_of(url: str) -> Any:
    boto3 = pytest.importorskip("boto3", reason="boto3 is not here: pip install 'maskfleet[aws]'")
    return boto3.session.Session("test", "test", region_name="us-east-1").client("s3", endpoint_url=url)


def put(s3: FlakyS3, files: dict[str, bytes], prefix: str = "sets/coco/") -> None:
    client = direct(s3)
    for path, content in files.items():
        client.put_object(Bucket="coco-data", Key=prefix + path, Body=content)


def get(s3: FlakyS3, key: str) -> bytes:
    content: bytes = direct(s3).get_object(Bucket="coco-data", Key=key)["Body"].read()
    return content


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


def files_in(folder: Path) -> dict[str, bytes]:
    """All files that a user sees; staging's own are left out."""
    paths = [path for path in folder.rglob("*") if path.is_file() and ".maskfleet-stage" not in path.parts]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths if path.name != "manifest.jsonl"}


def manifest_in(folder: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "manifest.jsonl").read_text("utf-8").splitlines()]
    return {line["path"]: line for line in lines}


def bring(source: object, destination: object, **options: Any) -> Staged:
    return stage(str(source), str(destination), workers=4, progress=lambda tally: None, **options)


def recheck(source: object, destination: object, **options: Any) -> Staged:
    return stage(str(source), str(destination), workers=4, progress=lambda tally: None, **options, check=True)


def numbered(count: int) -> dict[str, bytes]:
    return {f"train2017/{number:012d}.jpg": f"image {number}".encode() * 50 for number in range(count)}
