"""A prefix of an S3 bucket as the source or destination of a staging."""

from __future__ import annotations

import hashlib
import math
import re
import tempfile
import time
from base64 import b64encode
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from maskfleet.data.stage.folder import CHUNK_BYTES
from maskfleet.data.stage.manifest import MANIFEST, FileProblem, FileRecord, Item, is_own_file, line_of, records_of
from maskfleet.errors import DataError, MaskfleetError
from maskfleet.log import logger
from maskfleet.system.aws import aws_client, aws_error, aws_exceptions, aws_session, code_of

PART_BYTES = 8 * CHUNK_BYTES  # of a multipart upload; smaller files go in one request
ATTEMPTS = 10  # per request, if S3 does not answer or throttles
_MAX_PARTS = 10_000
_MAX_KEY_BYTES = 1024
_READ_ATTEMPTS = 5
_URL = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(.*))?", re.DOTALL)
_PERMISSIONS = {
    "list": "s3:ListBucket on the bucket",
    "read": "s3:GetObject on the objects (and kms:Decrypt if the bucket is encrypted with a KMS key)",
    "write": "s3:PutObject and s3:AbortMultipartUpload on the objects (and kms:GenerateDataKey with a KMS key)",
}


class Prefix:
    """All objects with a prefix; S3 shows an object only after it is uploaded completely."""

    is_folder = False

    def __init__(self, url: str, *, workers: int) -> None:
        self._bucket, self._prefix = _split(url)
        self.name = f"s3://{self._bucket}/{self._prefix}".rstrip("/")
        self.manifest_name = f"s3://{self._bucket}/{self._prefix}{MANIFEST}"
        self._client = _client(workers)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def items(self) -> Iterator[Item]:
        """All objects except the empty ones that represent folders."""
        with s3_errors(self.name, "list"):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix)
            for page in pages:
                for found in page.get("Contents", ()):
                    path = found["Key"][len(self._prefix) :]
                    is_marker = found["Size"] == 0 and (not path or path.endswith("/"))
                    if not is_marker and not is_own_file(path):
                        yield Item(path, found["Size"], etag=found["ETag"].strip('"'))

    def read(self, item: Item) -> tuple[str, Iterator[bytes]]:
        """The version, if the bucket has versioning, and the bytes of an object, as it was when listed."""
        answer = self._get(item, 0)
        return answer.get("VersionId", ""), self._chunks(item, answer["Body"])

    def manifest(self) -> Iterator[FileRecord]:
        """Records of the prefix's manifest, if it has one."""
        with s3_errors(self.manifest_name, "read"):
            try:
                answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + MANIFEST)
            except self._client.exceptions.NoSuchKey:
                return
            yield from records_of(answer["Body"].iter_lines(CHUNK_BYTES), self.manifest_name)

    records = manifest

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """S3 needs no lock: uploads of the same object replace each other completely."""
        yield

    def expect_space(self, need_bytes: int) -> None:
        """A bucket has no size limit."""

    def reopen(self, records: Iterable[FileRecord]) -> None:
        """Keep the old manifest until it is replaced: readers see in the meantime that it does not match."""

    def note(self, record: FileRecord) -> None:
        """The bucket's listing is the journal."""

    def store(self, item: Item, chunks: Iterable[bytes]) -> tuple[str, str]:
        """Upload one file, in parts if it is large -> (etag, version)."""
        key = self._prefix + item.path
        if len(key.encode()) > _MAX_KEY_BYTES:
            raise FileProblem(item.path, f"makes an object name of more than {_MAX_KEY_BYTES} bytes")
        with s3_errors(f"s3://{self._bucket}/{key}", "write"):
            if item.bytes <= PART_BYTES:
                content = b"".join(chunks)
                answer = self._client.put_object(
                    Bucket=self._bucket, Key=key, Body=content, ChecksumSHA256=_checksum(content)
                )
            else:
                answer = self._put_parts(key, _regrouped(chunks, part_bytes(item.bytes)))
        return answer["ETag"].strip('"'), answer.get("VersionId", "")

    def finish(self, records: Iterable[FileRecord]) -> None:
        """Write the manifest."""
        with tempfile.TemporaryFile() as file:
            for record in records:
                file.write(line_of(record).encode())
            size = file.tell()
            file.seek(0)
            self.store(Item(MANIFEST, size), iter(lambda: file.read(CHUNK_BYTES), b""))

    def _get(self, item: Item, start: int) -> dict[str, Any]:
        asked = {"Range": f"bytes={start}-"} if start else {}
        where = f"s3://{self._bucket}/{self._prefix}{item.path}"
        try:
            with s3_errors(where, "read"):
                answer: dict[str, Any] = self._client.get_object(
                    Bucket=self._bucket, Key=self._prefix + item.path, IfMatch=f'"{item.etag}"', **asked
                )
        except DataError as error:
            match code_of(error.__cause__):
                case "PreconditionFailed" | "412":
                    raise FileProblem(item.path, "changed while it was copied") from error
                case "NoSuchKey" | "404":
                    raise FileProblem(item.path, "was deleted while it was copied") from error
                case "InvalidObjectState":
                    raise FileProblem(item.path, "is archived: restore it first (aws s3api restore-object)") from error
            raise
        return answer

    def _chunks(self, item: Item, body: Any) -> Iterator[bytes]:
        """The bytes of an object; a broken connection is reopened where it stopped."""
        done, attempt = 0, 1
        while True:
            try:
                with body:
                    while chunk := body.read(CHUNK_BYTES):
                        done += len(chunk)
                        yield chunk
                return
            except aws_exceptions() as error:
                if type(error).__name__ == "FlexibleChecksumError":
                    raise FileProblem(item.path, "does not fit the checksum that S3 keeps of it") from error
                if attempt == _READ_ATTEMPTS:
                    raise s3_error(error, f"s3://{self._bucket}/{self._prefix}{item.path}", "read") from error
                time.sleep(min(2.0 ** (attempt - 1), 8.0) / 4)
                attempt += 1
            if done == item.bytes:
                return
            body = self._get(item, done)["Body"]

    def _put_parts(self, key: str, parts: Iterable[bytes]) -> dict[str, Any]:
        what = {"Bucket": self._bucket, "Key": key}
        upload = self._client.create_multipart_upload(**what, ChecksumAlgorithm="SHA256")
        what["UploadId"] = upload["UploadId"]
        try:
            sent: list[dict[str, Any]] = []
            for number, part in enumerate(parts, 1):
                checksum = _checksum(part)
                answer = self._client.upload_part(**what, PartNumber=number, Body=part, ChecksumSHA256=checksum)
                sent.append({"PartNumber": number, "ETag": answer["ETag"], "ChecksumSHA256": checksum})
            done: dict[str, Any] = self._client.complete_multipart_upload(**what, MultipartUpload={"Parts": sent})
        except BaseException:
            self._abort(what)
            raise
        return done

    def _abort(self, what: dict[str, Any]) -> None:
        """Delete uploaded parts, which would cost money; a failure here must not hide the error that led to it."""
        try:
            self._client.abort_multipart_upload(**what)
        except aws_exceptions() as error:
            logger.warning("cannot delete the parts of an upload to s3://%s/%s: %s", what["Bucket"], what["Key"], error)


def _checksum(content: bytes) -> str:
    return b64encode(hashlib.sha256(content).digest()).decode()


def part_bytes(size: int) -> int:
    """Bytes of each part of an upload of `size` bytes: whole chunks, and at most as many parts as S3 accepts."""
    return max(PART_BYTES, math.ceil(size / _MAX_PARTS / CHUNK_BYTES) * CHUNK_BYTES)


def etag_of(chunks: Iterable[bytes], size: int) -> str:
    """The etag that `store` gets for this content from a bucket that is not encrypted with KMS."""
    whole = [hashlib.md5(part, usedforsecurity=False).digest() for part in _regrouped(chunks, part_bytes(size))]
    if size <= PART_BYTES:
        return whole[0].hex() if whole else hashlib.md5(b"", usedforsecurity=False).hexdigest()
    return f"{hashlib.md5(b''.join(whole), usedforsecurity=False).hexdigest()}-{len(whole)}"


def _regrouped(chunks: Iterable[bytes], size: int) -> Iterator[bytes]:
    """The same bytes in pieces of `size`; the last one may be shorter."""
    buffer = bytearray()
    for chunk in chunks:
        buffer += chunk
        while len(buffer) >= size:
            yield bytes(buffer[:size])
            del buffer[:size]
    if buffer:
        yield bytes(buffer)


def _split(url: str) -> tuple[str, str]:
    """Bucket and prefix, which ends with a slash unless it is empty."""
    found = _URL.fullmatch(url)
    if found is None:
        raise DataError(f"{url!r} is not an S3 URL", remedy="write s3://bucket/prefix; bucket names are lower-case")
    prefix = (found.group(2) or "").strip("/")
    return found.group(1), f"{prefix}/" if prefix else ""


def _client(workers: int) -> Any:
    session = aws_session("S3 locations")
    with s3_errors("S3", "reach"):
        return aws_client(session, "s3", connections=workers, attempts=ATTEMPTS)


@contextmanager
def s3_errors(where: str, verb: str) -> Iterator[None]:
    """Turn what boto3 raises into an error for people."""
    try:
        yield
    except aws_exceptions() as error:
        raise s3_error(error, where, verb) from error


def s3_error(error: Exception, where: str, verb: str) -> MaskfleetError:
    """An error for people; `verb` is what was tried: list, read, write or reach."""
    match code_of(error):
        case "NoSuchBucket":
            return DataError(f"the bucket of {where} does not exist", remedy="check its name, or create it first")
        case (
            "SlowDown" | "503" | "500" | "ServiceUnavailable" | "InternalError" | "RequestTimeout" | "Throttling"
        ) as code:
            return DataError(
                f"S3 still answers {code} after ten attempts to {verb} {where}",
                remedy="run the same command again with fewer --workers; what is copied already is not copied again",
            )
        case "PermanentRedirect" | "AuthorizationHeaderMalformed" | "IllegalLocationConstraintException":
            return DataError(f"{where} is in another region", remedy="set AWS_REGION to the bucket's region")
    permissions = _PERMISSIONS.get(verb, "access")
    return aws_error(error, f"{verb} {where}", service="S3", permissions=permissions, kind=DataError)
