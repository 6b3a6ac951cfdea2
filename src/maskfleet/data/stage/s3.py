"""A prefix of an S3 bucket as the source or destination of a staging."""

from __future__ import annotations

import hashlib
import math
import re
import tempfile
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

from maskfleet.data.stage.folder import CHUNK_BYTES
from maskfleet.data.stage.manifest import MANIFEST, FileProblem, FileRecord, Item, is_own_file, line_of, records_of
from maskfleet.errors import DataError, MaskfleetError
from maskfleet.log import logger
from maskfleet.system.aws import aws_client, aws_error, aws_exceptions, aws_session, code_of, without_dates
from maskfleet.system.s3.objects import S3Objects

PART_BYTES = 8 * CHUNK_BYTES  # of a multipart upload; smaller files go in one request
ATTEMPTS = 10  # per request, if S3 does not answer or throttles
_MAX_PARTS = 10_000
_MAX_KEY_BYTES = 1024
_READ_ATTEMPTS = 5
_DELETED_AT_ONCE = 1000
_URL = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(.*))?", re.DOTALL)
_PERMISSIONS = {
    "list": "s3:ListBucket on the bucket",
    "read": "s3:GetObject on the objects (and kms:Decrypt if the bucket is encrypted with a KMS key)",
    "delete": "s3:DeleteObject on the objects",
    "write": "s3:PutObject and s3:AbortMultipartUpload on the objects (and kms:GenerateDataKey with a KMS key)",
}


class Prefix:
    """All objects with a prefix; S3 shows an object only after it is uploaded completely."""

    is_folder = False
    is_sequential = False

    def __init__(self, url: str, *, workers: int) -> None:
        self._bucket, self._prefix = split_url(url)
        self.name = f"s3://{self._bucket}/{self._prefix}".rstrip("/")
        self.manifest_name = f"s3://{self._bucket}/{self._prefix}{MANIFEST}"
        self._workers = workers
        with s3_errors(self.name, "reach"):
            self._objects = S3Objects(connections=workers, attempts=ATTEMPTS)

    def close(self) -> None:
        """Close the connections."""
        if "_client" in self.__dict__:
            self._client.close()
        self._objects.close()

    @cached_property
    def _client(self) -> Any:
        """boto3's client for all but small files; made when it is needed, which takes a quarter of a second."""
        return _new_client(self._workers)

    def opener(self) -> Callable[[], Prefix] | None:
        """Opens the prefix in another process; None where credentials may need an answer from the user."""
        return None if self._objects.may_ask_user else partial(Prefix, self.name, workers=self._workers)

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
        if item.bytes <= CHUNK_BYTES:
            with self._read_errors(item):
                found = self._objects.get(self._bucket, self._prefix + item.path, etag=item.etag)
            return found.version, iter((found.content,))
        answer = self._get(item, 0)
        return answer.get("VersionId", ""), self._chunks(item, answer["Body"])

    def read_range(self, path: str, start: int, num_bytes: int) -> bytes:
        """A part of an object."""
        key = self._prefix + path
        with s3_errors(f"s3://{self._bucket}/{key}", "read"):
            return self._objects.get(self._bucket, key, span=(start, start + num_bytes)).content

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

    def is_interrupted(self) -> bool:
        """Unknown in S3, where a staging leaves nothing but objects."""
        return False

    def why_too_long(self, path: str) -> str | None:
        """Why no object can have this name below the prefix, or None."""
        is_too_long = len(f"{self._prefix}{path}".encode()) > _MAX_KEY_BYTES
        return f"makes an object name of more than {_MAX_KEY_BYTES} bytes" if is_too_long else None

    def expect_space(self, need_bytes: int) -> None:
        """A bucket has no size limit."""

    def reopen(self, records: Iterable[FileRecord]) -> None:
        """Keep the old manifest until it is replaced: readers see in the meantime that it does not match."""

    def invalidate(self, path: str) -> None:
        """Keep the old object until it is replaced: readers see by checksums that it does not match."""

    def note(self, record: FileRecord) -> None:
        """The bucket's listing is the journal."""

    def store(self, item: Item, chunks: Iterable[bytes]) -> tuple[str, str]:
        """Upload one file, in parts if it is large -> (etag, version)."""
        key = self._prefix + item.path
        if (why := self.why_too_long(item.path)) is not None:
            raise FileProblem(item.path, why)
        with s3_errors(f"s3://{self._bucket}/{key}", "write"):
            if item.bytes <= PART_BYTES:
                put = self._objects.put(self._bucket, key, b"".join(chunks))
                return put.etag, put.version
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

    def delete(self, paths: Iterable[str]) -> list[str]:
        """Delete objects, at most a thousand by one request; returns those that S3 did not delete.

        S3 says so for each object, such as AccessDenied, in an answer that is a success.
        """
        keys = [{"Key": self._prefix + path} for path in paths]
        kept: list[str] = []
        with s3_errors(self.name, "delete"):
            for start in range(0, len(keys), _DELETED_AT_ONCE):
                objects = {"Objects": keys[start : start + _DELETED_AT_ONCE], "Quiet": True}
                answer = self._client.delete_objects(Bucket=self._bucket, Delete=objects)
                kept += [one["Key"].removeprefix(self._prefix) for one in answer.get("Errors", ())]
        return kept

    def _get(self, item: Item, start: int) -> dict[str, Any]:
        asked = {"Range": f"bytes={start}-"} if start else {}
        with self._read_errors(item):
            answer: dict[str, Any] = self._client.get_object(
                Bucket=self._bucket, Key=self._prefix + item.path, IfMatch=f'"{item.etag}"', **asked
            )
        return answer

    @contextmanager
    def _read_errors(self, item: Item) -> Iterator[None]:
        """Turn what boto3 raises for one object into a problem of that object, or into an error for people."""
        try:
            yield
        except aws_exceptions() as error:
            if type(error).__name__ == "FlexibleChecksumError":
                raise FileProblem(item.path, "does not fit the checksum that S3 keeps of it") from error
            match code_of(error):
                case "PreconditionFailed" | "412":
                    raise FileProblem(item.path, "changed while it was copied") from error
                case "NoSuchKey" | "404":
                    raise FileProblem(item.path, "was deleted while it was copied") from error
                case "InvalidObjectState":
                    raise FileProblem(item.path, "is archived: restore it first (aws s3api restore-object)") from error
            raise s3_error(error, f"s3://{self._bucket}/{self._prefix}{item.path}", "read") from error

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


def split_url(url: str) -> tuple[str, str]:
    """Bucket and prefix, which ends with a slash unless it is empty."""
    found = _URL.fullmatch(url)
    if found is None:
        raise DataError(f"{url!r} is not an S3 URL", remedy="write s3://bucket/prefix; bucket names are lower-case")
    prefix = (found.group(2) or "").strip("/")
    return found.group(1), f"{prefix}/" if prefix else ""


def _new_client(workers: int) -> Any:
    session = aws_session("S3 locations")
    with s3_errors("S3", "reach"):
        return without_dates(aws_client(session, "s3", connections=workers, attempts=ATTEMPTS))


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
        case ("500" | "502" | "503" | "504") as code:  # S3 itself names its errors; boto3 calls a web page "500"
            return DataError(
                f"the answer to {verb} {where} is not S3's own, after ten attempts ({code})",
                remedy="check the network's proxy (HTTPS_PROXY) and AWS_ENDPOINT_URL; if they are right, wait, and "
                "run the same command again with fewer --workers",
            )
        case ("SlowDown" | "ServiceUnavailable" | "InternalError" | "RequestTimeout" | "Throttling") as code:
            return DataError(
                f"S3 still answers {code} after ten attempts to {verb} {where}",
                remedy="run the same command again with fewer --workers; what is copied already is not copied again",
            )
        case "PermanentRedirect" | "AuthorizationHeaderMalformed" | "IllegalLocationConstraintException":
            return DataError(f"{where} is in another region", remedy="set AWS_REGION to the bucket's region")
    permissions = _PERMISSIONS.get(verb, "access")
    return aws_error(error, f"{verb} {where}", service="S3", permissions=permissions, kind=DataError)
