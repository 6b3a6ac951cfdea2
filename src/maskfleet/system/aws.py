"""boto3: its session and clients, and errors that users can act on."""

from __future__ import annotations

import os
from typing import Any

from maskfleet.errors import MaskfleetError

_DENIED = {"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "403"}
_DENIED |= {"AllAccessDisabled", "AccountProblem"}
_REJECTED = {"InvalidAccessKeyId", "InvalidClientTokenId", "AuthFailure", "SignatureDoesNotMatch", "RequestExpired"}
_REJECTED |= {"InvalidToken", "ExpiredToken", "TokenRefreshRequired"}
_REJECTED |= {"ExpiredTokenException", "UnrecognizedClientException", "InvalidSignatureException"}
_CREDENTIALS = (
    "on a laptop run `aws sso login` or `aws configure`, or set AWS_PROFILE; in a pod give its service account a role "
    "(eks.amazonaws.com/role-arn, or an EKS Pod Identity association)"
)


def aws_session(need: str, *, region: str | None = None, profile: str | None = None) -> Any:
    """A boto3 session for `need`, in `region` or else the one that AWS's own tools would take.

    boto3 reads AWS_DEFAULT_REGION alone; the AWS command line, EKS and our charts say AWS_REGION.
    """
    try:
        import boto3
    except ImportError as error:
        raise MaskfleetError(f"{need} need the Python package boto3", remedy="pip install 'maskfleet[aws]'") from error
    from botocore.exceptions import ProfileNotFound

    try:
        return boto3.Session(region_name=region or os.environ.get("AWS_REGION") or None, profile_name=profile)
    except ProfileNotFound as error:
        raise MaskfleetError(str(error), remedy="set AWS_PROFILE to a profile of ~/.aws/config, or unset it") from error


def aws_client(session: Any, service: str, *, connections: int = 10, attempts: int = 5, read_s: int = 60) -> Any:
    """A client of `service` that gives up on a host that does not answer, and repeats throttled requests."""
    from botocore.config import Config

    config = Config(
        max_pool_connections=connections,
        retries={"mode": "standard", "total_max_attempts": attempts},
        connect_timeout=10,
        read_timeout=read_s,
        user_agent_extra="maskfleet",
    )
    try:
        return session.client(service, config=config)
    except ValueError as error:
        raise MaskfleetError(f"cannot reach {service}: {error}", remedy="fix AWS_ENDPOINT_URL, or unset it") from error


def without_dates(client: Any) -> Any:
    """`client`, which from now on returns dates as text: parsing them takes most of the time of a long listing."""
    from botocore.parsers import ResponseParserFactory

    parsers = ResponseParserFactory()
    parsers.set_parser_defaults(timestamp_parser=str)
    client._endpoint._response_parser_factory = parsers
    return client


def aws_exceptions() -> tuple[type[Exception], ...]:
    """What boto3 raises, for an `except` clause; imported only then, because most machines need no boto3."""
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError  # a proxy answered with a page of its own

    return BotoCoreError, ClientError, ResponseParserError


def code_of(error: BaseException | None) -> str:
    """AWS's code for an error, or an empty text."""
    answer = getattr(error, "response", None)
    return str(answer.get("Error", {}).get("Code", "")) if isinstance(answer, dict) else ""


def aws_error(
    error: Exception, action: str, *, service: str, permissions: str, kind: type[MaskfleetError]
) -> MaskfleetError:
    """An error of boto3 for people; `action` is what failed, such as "list s3://bucket/prefix"."""
    code = code_of(error)
    if code in _DENIED:
        return kind(f"not allowed to {action} (403)", remedy=f"the identity in use needs {permissions}")
    if code in _REJECTED:
        return kind(f"AWS does not accept the credentials in use ({code})", remedy=_CREDENTIALS)
    match type(error).__name__:
        case "NoCredentialsError" | "PartialCredentialsError" | "CredentialRetrievalError" | "TokenRetrievalError":
            return kind(f"no AWS credentials to {action} with", remedy=_CREDENTIALS)
        case "UnauthorizedSSOTokenError" | "SSOTokenLoadError" | "LoginRefreshRequired":
            return kind("the AWS login has expired", remedy=_CREDENTIALS)
        case "NoRegionError":
            return kind(f"no AWS region to {action} in", remedy="set AWS_REGION")
        case "ResponseParserError":
            return kind(
                f"the answer to {action} does not come from {service}: {' '.join(str(error).split())[:300]}",
                remedy="check the network's proxy (HTTPS_PROXY) and AWS_ENDPOINT_URL; then run the same command again",
            )
        case "EndpointConnectionError" | "ConnectTimeoutError" | "ConnectionClosedError" | "ReadTimeoutError":
            return kind(
                f"cannot reach {service} to {action}: {error}",
                remedy="check the network, AWS_REGION and AWS_ENDPOINT_URL; then run the same command again",
            )
    return kind(f"cannot {action}: {error}", remedy="fix what it names, then run the same command again")
