"""AWS services as jobs on SageMaker use them: one client each, errors that users can act on, and handles."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from maskfleet.config.launch import SageMakerLaunch
from maskfleet.errors import LaunchError
from maskfleet.launch.job import JobHandle, NameRule
from maskfleet.system.aws import aws_client, aws_error, aws_exceptions, aws_session, code_of

Json = dict[str, Any]
NAMES = NameRule(longest=63, pattern=re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*"))
_FORM = "write sagemaker://REGION/NAME, as `maskfleet launch` printed it"
_DENIED = {
    "AccessDenied",
    "AccessDeniedException",
    "UnauthorizedOperation",
    "AccessDeniedForDependencyException",
    "403",
}
# The service is busy or restarts; the same request works later.
BUSY = {
    "Throttling",
    "ThrottlingException",
    "ThrottledException",
    "TooManyRequestsException",
    "RequestLimitExceeded",
    "LimitExceededException",
    "ServiceUnavailable",
    "ServiceUnavailableException",
    "InternalFailure",
    "InternalServerError",
}
# A model may compute for 60 s, and whoever stops listening before its answer sends the same image again.
_READ_S = {"sagemaker-runtime": 70}
_NO_ANSWER = {"EndpointConnectionError", "ConnectTimeoutError", "ConnectionClosedError", "ReadTimeoutError"}


class Services:
    """Clients of one region, made when they are first used."""

    def __init__(self, region: str | None = None) -> None:
        self._session = aws_session("jobs on SageMaker", region=region)
        self._clients: dict[str, Any] = {}
        if not self._session.region_name:
            raise LaunchError("no AWS region is set", remedy="set it, such as AWS_REGION=us-west-2")

    @property
    def region(self) -> str:
        return str(self._session.region_name)

    def client(self, name: str) -> Any:
        """The client of the service `name`, such as "sagemaker"."""
        if name not in self._clients:
            self._clients[name] = aws_client(self._session, name, read_s=_READ_S.get(name, 60))
        return self._clients[name]


@contextmanager
def asking(action: str, *, permissions: str, service: str = "SageMaker") -> Iterator[None]:
    """Turn what AWS refuses into a message with a remedy; `action` is such as "describe job r50"."""
    try:
        yield
    except aws_exceptions() as error:
        raise aws_error(error, action, service=service, permissions=permissions, kind=LaunchError) from error


def is_denied(error: Exception) -> bool:
    """Whether AWS refused a request for lack of permission."""
    return code_of(error) in _DENIED


def is_transient(error: Exception) -> bool:
    """Whether the same request may work later."""
    return code_of(error) in BUSY or type(error).__name__ in _NO_ANSWER


def launch_of(handle: JobHandle) -> SageMakerLaunch:
    """The region that a SageMaker handle names."""
    job = handle.path.partition("/")[0]
    if not NAMES.pattern.fullmatch(job) or len(job) > NAMES.longest:
        raise LaunchError(f"{handle} names no job: {job!r} cannot be the name of one", remedy=_FORM)
    try:
        return SageMakerLaunch(region=handle.location)
    except ValueError as error:
        raise LaunchError(f"{handle} names no AWS region", remedy=_FORM) from error


def job_of(handle: JobHandle) -> str:
    """The job that a handle without a path names."""
    if "/" in handle.path:
        raise LaunchError(
            f"{handle} names a file, not a job",
            remedy=f"leave the path out: {JobHandle(handle.on, handle.location, handle.path.split('/')[0])}",
        )
    return handle.path
