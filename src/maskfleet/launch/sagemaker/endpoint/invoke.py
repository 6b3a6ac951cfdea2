"""Sends images to an endpoint, and waits for those who are asked to come back."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from typing import Any

from maskfleet.errors import DataError, LaunchError
from maskfleet.launch.sagemaker.endpoint.model import bucket_and_key
from maskfleet.launch.sagemaker.endpoint.state import ANSWERS, explained, needed
from maskfleet.launch.sagemaker.services import Json, Services, asking, is_transient
from maskfleet.system.aws import aws_exceptions, code_of

# Bytes of a request: InvokeEndpoint's limit as in botocore's service model, AWS's limit for serverless endpoints
# (docs.aws.amazon.com/sagemaker/latest/dg/serverless-endpoints-invoke.html), and that of `maskfleet sagemaker serve`.
REAL_TIME_BYTES, SERVERLESS_BYTES, PROGRAM_BYTES = 6_291_456, 4_194_304, 20_000_000
RETRY_S = 300.0  # how long a busy endpoint is asked again
ASYNC_S = 3600.0  # longest wait for an answer of an asynchronous endpoint
_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 20.0
_NOT_READY = "ModelNotReadyException"
_PERMISSIONS = "sagemaker:InvokeEndpoint and InvokeEndpointAsync on the endpoint"
# Without ListBucket, S3 says of an answer that is not there yet that it is not allowed to be read.
_S3_PERMISSIONS = "s3:PutObject and GetObject on the objects there, and s3:ListBucket on the bucket"


class EndpointClient:
    """One endpoint that answers; may be used by several threads."""

    def __init__(
        self,
        services: Services,
        name: str,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        endpoint = needed(services, name)
        if endpoint["EndpointStatus"] not in ANSWERS:
            failed = explained(services, endpoint) if endpoint.get("FailureReason") else ""
            raise LaunchError(
                f"endpoint {name} is {endpoint['EndpointStatus']} and does not answer{f': {failed}' if failed else ''}",
                remedy=f"wait until `maskfleet endpoint status {name}` is InService",
            )
        self._name, self._sleep, self._clock = name, sleep, clock
        self._runtime, self._s3 = services.client("sagemaker-runtime"), services.client("s3")
        output = endpoint.get("AsyncInferenceConfig", {}).get("OutputConfig", {}).get("S3OutputPath")
        self._async_uri = str(output).removesuffix("/output") if output else None
        variants = endpoint.get("ProductionVariants") or [{}]
        self._is_serverless = bool(variants[0].get("CurrentServerlessConfig"))

    @property
    def max_bytes(self) -> int:
        """The largest request."""
        if self._async_uri:
            return PROGRAM_BYTES
        return SERVERLESS_BYTES if self._is_serverless else REAL_TIME_BYTES

    @property
    def size_remedy(self) -> str:
        """What to do with an image above `max_bytes`."""
        smaller = "scale it down, or save it as JPEG"
        return (
            smaller
            if self._async_uri
            else f"{smaller}; an endpoint deployed with --async takes {PROGRAM_BYTES:,} bytes"
        )

    def send(self, body: bytes, content_type: str, attributes: str) -> bytes:
        """The answer to `body`; `attributes` reach the program as custom attributes.

        Throttled requests, and those for which the program has no capacity, are sent again. An image that the program
        refuses is a DataError, everything else a LaunchError.
        """
        if len(body) > self.max_bytes:
            raise DataError(
                f"an image of {len(body):,} bytes is above the endpoint's limit of {self.max_bytes:,}",
                remedy=self.size_remedy,
            )
        request = {"EndpointName": self._name, "ContentType": content_type, "CustomAttributes": attributes}
        with asking(f"send an image to endpoint {self._name}", permissions=_PERMISSIONS):
            if self._async_uri is None:
                answer: bytes = self._patiently(self._answer, {**request, "Body": body})
                return answer
            return self._later(self._async_uri, body, request)

    def _answer(self, request: Json) -> bytes:
        data: bytes = self._runtime.invoke_endpoint(**request)["Body"].read()
        return data

    def _later(self, prefix: str, body: bytes, request: Json) -> bytes:
        """The answer of an asynchronous endpoint, which reads requests from S3 and writes answers there."""
        place = f"{prefix}/input/{uuid.uuid4()}"
        bucket, key = bucket_and_key(place)
        with asking(f"write {place}", permissions=_S3_PERMISSIONS, service="S3"):
            self._s3.put_object(Bucket=bucket, Key=key, Body=body)
        sent = self._patiently(
            lambda given: self._runtime.invoke_endpoint_async(**given), {**request, "InputLocation": place}
        )
        began, pause_s = self._clock(), _FIRST_PAUSE_S
        while self._clock() - began < ASYNC_S:
            answer = self._object(sent["OutputLocation"])
            if answer is not None:
                return answer
            failure = self._object(sent["FailureLocation"]) if sent.get("FailureLocation") else None
            if failure is not None:
                raise _refused(self._name, 400, failure.decode(errors="replace"))
            self._sleep(pause_s)
            pause_s = min(1.5 * pause_s, _MAX_PAUSE_S)
        raise LaunchError(
            f"endpoint {self._name} has not answered within {ASYNC_S:.0f} s",
            remedy=f"see `maskfleet endpoint status {self._name}`; the answer will be at {sent['OutputLocation']}",
        )

    def _object(self, uri: str) -> bytes | None:
        bucket, key = bucket_and_key(uri)
        with asking(f"read {uri}", permissions=_S3_PERMISSIONS, service="S3"):
            try:
                data: bytes = self._s3.get_object(Bucket=bucket, Key=key)["Body"].read()
            except aws_exceptions() as error:
                if code_of(error) == "NoSuchKey":
                    return None
                raise
            return data

    def _patiently(self, call: Callable[[Json], Any], request: Json) -> Any:
        began, pause_s = self._clock(), _FIRST_PAUSE_S
        while True:
            try:
                return call(request)
            except aws_exceptions() as error:
                status = _program_status(error)
                is_busy = is_transient(error) or code_of(error) == _NOT_READY or status == 503
                if not is_busy or self._clock() - began >= RETRY_S:
                    if status is not None:
                        raise _refused(self._name, status, _program_words(error)) from error
                    raise
            self._sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)


def _program_status(error: Exception) -> int | None:
    """The HTTP status with which the program in the container answered, if the error comes from there."""
    answer = getattr(error, "response", None)
    found = answer.get("OriginalStatusCode") if isinstance(answer, dict) and code_of(error) == "ModelError" else None
    return int(found) if found is not None else None


def _program_words(error: Exception) -> str:
    answer = getattr(error, "response", {})
    return str(answer.get("OriginalMessage") or error)


def _refused(name: str, status: int, words: str) -> DataError | LaunchError:
    """What the program in the container said: about this image (4xx, or 500 while detecting), or about itself."""
    try:
        content = json.loads(words)
        what, remedy = str(content["error"]), str(content["remedy"])
    except (ValueError, KeyError, TypeError):
        what, remedy = words.strip()[:500] or "no reason", f"`maskfleet endpoint status {name}` shows its last lines"
    if 400 <= status <= 500:
        return DataError(f"endpoint {name} refuses the image: {what}", remedy=remedy)
    return LaunchError(f"endpoint {name} failed ({status}): {what}", remedy=remedy)
