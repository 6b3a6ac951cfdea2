"""Reads and writes S3 objects with one request each, at a fraction of what boto3 needs per request.

boto3 spends 1 to 2 ms of processor time on each request, mostly on building and parsing calls in a general way, so one
process copies at most some hundred small objects per second. This client asks boto3 for credentials and addresses,
signs requests itself, and keeps one connection for each thread. Errors are those of boto3, so that callers need not
know which of the two they called.
"""

from __future__ import annotations

import base64
import hashlib
import random
import re
import ssl
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlsplit

from maskfleet.log import logger
from maskfleet.system.aws import aws_client, aws_session
from maskfleet.system.s3.connection import HttpConnection, RawAnswer
from maskfleet.system.s3.signature import EMPTY_SHA256, sign

_BACKOFF_S = 0.1  # before the second attempt; doubles with each further one
_MAX_BACKOFF_S = 8.0
_RETRIED_STATUS = {429, 500, 502, 503, 504}
_RETRIED_CODES = {"RequestTimeout", "SlowDown", "Throttling", "RequestTimeTooSkewed"}
_ELSEWHERE = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
_CODE, _MESSAGE = (re.compile(rf"<{tag}>([^<]*)</{tag}>") for tag in ("Code", "Message"))


@dataclass(frozen=True, slots=True)
class S3Answer:
    """The answer to a request that succeeded; header names are in lower case."""

    content: bytes
    headers: Mapping[str, str]

    @property
    def etag(self) -> str:
        """The etag without its quotes."""
        return self.headers.get("etag", "").strip('"')

    @property
    def version(self) -> str:
        """The version, if the bucket has versioning."""
        return self.headers.get("x-amz-version-id", "")


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    bucket: str
    key: str
    headers: dict[str, str]  # names in lower case
    content: bytes
    sha256: str  # of the content


class S3Objects:
    """Gets and puts whole objects or ranges of them; any number of threads may use it."""

    def __init__(self, *, connections: int, attempts: int) -> None:
        self._connections = connections
        self._attempts = attempts
        self._session = aws_session("S3 locations")
        self._lock = threading.Lock()
        self._endpoints: dict[str, _Endpoint] = {}
        self._left: list[_Endpoint] = []  # of regions where the buckets are not
        self._random = random.Random()  # noqa: S311 - spreads retries

    @property
    def may_ask_user(self) -> bool:
        """Whether getting the credentials may ask the user for a code (MFA), which only one process should do."""
        credentials = self._session.get_credentials()
        return credentials is not None and credentials.method == "assume-role"

    def close(self) -> None:
        """Close the connections."""
        for endpoint in (*self._endpoints.values(), *self._left):
            endpoint.close()

    def get(self, bucket: str, key: str, *, span: tuple[int, int] | None = None, etag: str = "") -> S3Answer:
        """An object, or the bytes from `span`[0] to before `span`[1] of it; an error of boto3 if its etag differs."""
        headers = {"x-amz-checksum-mode": "ENABLED"} if span is None else {"range": f"bytes={span[0]}-{span[1] - 1}"}
        if etag:
            headers["if-match"] = f'"{etag}"'
        answer = self._send(_Request("GET", bucket, key, headers, b"", EMPTY_SHA256))
        if span is None:
            _expect_checksum(answer)
        return answer

    def put(self, bucket: str, key: str, content: bytes) -> S3Answer:
        """Write an object, whose SHA-256 S3 compares."""
        digest = hashlib.sha256(content)
        headers = {"x-amz-checksum-sha256": base64.b64encode(digest.digest()).decode()}
        return self._send(_Request("PUT", bucket, key, headers, content, digest.hexdigest()))

    def _send(self, request: _Request) -> S3Answer:
        from botocore.exceptions import ClientError, ConnectionError, HTTPClientError

        for attempt in range(1, self._attempts + 1):
            try:
                return self._endpoint(request.bucket).send(request)
            except (ConnectionError, HTTPClientError):
                if attempt == self._attempts:
                    raise
            except ClientError as error:
                answer = error.response
                region = str(answer.get("BucketRegion", ""))
                if answer["Error"]["Code"] in _ELSEWHERE and region and attempt == 1:
                    self._move(request.bucket, region)
                    continue
                status = answer["ResponseMetadata"]["HTTPStatusCode"]
                is_passing = status in _RETRIED_STATUS or answer["Error"]["Code"] in _RETRIED_CODES
                if not is_passing or attempt == self._attempts:
                    raise
            limit_s = min(_BACKOFF_S * 2 ** (attempt - 1), _MAX_BACKOFF_S)
            time.sleep(limit_s * self._random.uniform(0.5, 1.0))
        raise AssertionError("unreachable")

    def _endpoint(self, bucket: str) -> _Endpoint:
        endpoint = self._endpoints.get(bucket)
        if endpoint is None:
            with self._lock:
                endpoint = self._endpoints.get(bucket) or self._new_endpoint(bucket, None)
                self._endpoints[bucket] = endpoint
        return endpoint

    def _move(self, bucket: str, region: str) -> None:
        """Send further requests to the region where the bucket is."""
        with self._lock:
            self._left.append(self._endpoints[bucket])  # other threads may still use it
            self._endpoints[bucket] = self._new_endpoint(bucket, region)

    def _new_endpoint(self, bucket: str, region: str | None) -> _Endpoint:
        session = self._session if region is None else aws_session("S3 locations", region=region)
        return _Endpoint(session, bucket, self._connections)


class _Endpoint:
    """Where the requests of one bucket go, and how they are signed."""

    def __init__(self, session: Any, bucket: str, connections: int) -> None:
        from botocore.exceptions import NoCredentialsError

        self.client = aws_client(session, "s3", connections=connections)
        self._credentials = session.get_credentials()
        if self._credentials is None:
            raise NoCredentialsError
        # boto3 knows all rules of addresses (path style, dual stack, FIPS, AWS_ENDPOINT_URL): take over its result
        signed: str = self.client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "k"})
        self._address = urlsplit(signed.partition("?")[0].removesuffix("k"))
        self._region = self.client.meta.region_name.replace("aws-global", "us-east-1")
        self._own = threading.local()
        self._connections: list[HttpConnection] = []  # of all threads
        self._lock = threading.Lock()
        self._tls = self._tls_context() if self._address.scheme == "https" else None
        self._http = self.client._endpoint.http_session
        self._is_proxied = bool(self._http._proxy_config.proxy_url_for(signed))

    def close(self) -> None:
        self.client.close()
        for connection in self._connections:
            connection.close()

    def send(self, request: _Request) -> S3Answer:
        path = self._address.path + quote(request.key, safe="/~")
        headers = {"host": self._address.netloc, **request.headers, "x-amz-content-sha256": request.sha256}
        credentials = self._credentials.get_frozen_credentials()
        sign(headers, (request.method, path), credentials, region=self._region, now=datetime.now(UTC))
        transport = self._by_boto if self._is_proxied else self._direct
        status, found, body = transport(request.method, path, headers, request.content)
        if status >= 300:
            raise _client_error(request.method, status, body, found)
        return S3Answer(body, found)

    def _direct(self, method: str, path: str, headers: dict[str, str], content: bytes) -> RawAnswer:
        """Send a request over this thread's own connection; a new one if the server has closed the old one."""
        from botocore.exceptions import EndpointConnectionError

        old: HttpConnection | None = getattr(self._own, "connection", None)
        if old is not None and old.is_open:
            try:
                return old.exchange(method, path, headers, content)
            except (OSError, ValueError):
                logger.debug("a connection to S3 was closed; using a new one")
        try:
            return self._connected().exchange(method, path, headers, content)
        except (OSError, ValueError) as error:
            url = f"{self._address.scheme}://{self._address.netloc}{path}"
            raise EndpointConnectionError(endpoint_url=url, error=error) from error

    def _by_boto(self, method: str, path: str, headers: dict[str, str], content: bytes) -> RawAnswer:
        """Send a request through a proxy, which boto3 knows how to do."""
        from botocore.awsrequest import AWSRequest

        url = f"{self._address.scheme}://{self._address.netloc}{path}"
        request = AWSRequest(method=method, url=url, headers=headers, data=content or None)
        answer = self._http.send(request.prepare())
        return answer.status_code, {name.lower(): value for name, value in answer.headers.items()}, answer.content

    def _connected(self) -> HttpConnection:
        """A new connection of this thread."""
        address = self._address
        port = address.port or (443 if self._tls is not None else 80)
        found = self._own.connection = HttpConnection(address.hostname or "", port, self._tls)
        with self._lock:
            self._connections = [*(one for one in self._connections if one.is_open), found]
        return found

    def _tls_context(self) -> ssl.SSLContext:
        """Certificates as boto3 checks them: AWS_CA_BUNDLE, or the list that it brings along."""
        from botocore.httpsession import get_cert_path

        bundle = self.client._endpoint.http_session._verify
        return ssl.create_default_context(cafile=get_cert_path(bundle) or None)


def _client_error(method: str, status: int, content: bytes, headers: Mapping[str, str]) -> Exception:
    from botocore.exceptions import ClientError

    text = content.decode("utf-8", "replace")
    code, message = (found.group(1) if (found := one.search(text)) else "" for one in (_CODE, _MESSAGE))
    answer = {
        "Error": {"Code": code or str(status), "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": status},
        "BucketRegion": headers.get("x-amz-bucket-region", ""),
    }
    error: Exception = ClientError(answer, "GetObject" if method == "GET" else "PutObject")
    return error


def _expect_checksum(answer: S3Answer) -> None:
    """FlexibleChecksumError if the content does not match the checksum that S3 keeps of the whole object."""
    from botocore.exceptions import FlexibleChecksumError

    computed: dict[str, Callable[[], bytes]] = {
        "x-amz-checksum-sha256": lambda: hashlib.sha256(answer.content).digest(),
        "x-amz-checksum-crc32": lambda: zlib.crc32(answer.content).to_bytes(4, "big"),
    }
    for name, compute in computed.items():
        kept = answer.headers.get(name, "")
        if kept and "-" not in kept and base64.b64encode(compute()).decode() != kept:  # with "-": of its parts
            raise FlexibleChecksumError(error_msg=f"the content does not match {name} {kept}")
