"""AWS Signature Version 4 of S3 requests."""

from __future__ import annotations

import functools
import hashlib
import hmac
from datetime import datetime
from typing import Protocol

EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()


class Credentials(Protocol):
    """What boto3 calls frozen credentials."""

    access_key: str
    secret_key: str
    token: str | None


def sign(
    headers: dict[str, str], target: tuple[str, str], credentials: Credentials, *, region: str, now: datetime
) -> None:
    """Sign a request for `target`, (method, path), without a query: add date, token and signature to `headers`.

    The names of the headers are in lower case; all of them are signed. They include host and x-amz-content-sha256.
    """
    stamp = now.strftime("%Y%m%dT%H%M%SZ")
    headers["x-amz-date"] = stamp
    if credentials.token:
        headers["x-amz-security-token"] = credentials.token
    names = sorted(headers)
    listed = ";".join(names)
    lines = "".join(f"{name}:{headers[name]}\n" for name in names)
    method, path = target
    request = f"{method}\n{path}\n\n{lines}\n{listed}\n{headers['x-amz-content-sha256']}"
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    signature = _hmac(_signing_key(credentials.secret_key, stamp[:8], region), text).hex()
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credentials.access_key}/{scope}, SignedHeaders={listed}, Signature={signature}"
    )


@functools.lru_cache(maxsize=8)
def _signing_key(secret: str, day: str, region: str) -> bytes:
    return functools.reduce(_hmac, (day, region, "s3", "aws4_request"), f"AWS4{secret}".encode())


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode(), "sha256")
