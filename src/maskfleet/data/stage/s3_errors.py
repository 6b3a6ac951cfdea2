"""What S3 and the AWS configuration answer, in words that say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from maskfleet.errors import DataError

_PERMISSIONS = {
    "list": "s3:ListBucket on the bucket",
    "read": "s3:GetObject on the objects (and kms:Decrypt if the bucket is encrypted with a KMS key)",
    "write": "s3:PutObject and s3:AbortMultipartUpload on the objects (and kms:GenerateDataKey with a KMS key)",
}
_CREDENTIALS = (
    "on a laptop run `aws sso login` or `aws configure`; in a pod give its service account a role "
    "(eks.amazonaws.com/role-arn, or an EKS Pod Identity association)"
)


@contextmanager
def s3_errors(where: str, verb: str) -> Iterator[None]:
    """Turn what botocore raises into an error for people."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (BotoCoreError, ClientError) as error:
        raise s3_error(error, where, verb) from error


def code_of(error: BaseException | None) -> str:
    """S3's code for an error, or an empty text."""
    answer = getattr(error, "response", None)
    return str(answer.get("Error", {}).get("Code", "")) if isinstance(answer, dict) else ""


def s3_error(error: Exception, where: str, verb: str) -> DataError:
    """An error for people; `verb` is what was tried: list, read, write or reach."""
    name, code = type(error).__name__, code_of(error)
    match code:
        case "NoSuchBucket":
            return DataError(f"the bucket of {where} does not exist", remedy="check its name, or create it first")
        case "AccessDenied" | "403" | "AllAccessDisabled" | "AccountProblem":
            needed = _PERMISSIONS.get(verb, "access")
            return DataError(f"not allowed to {verb} {where} (403)", remedy=f"the identity in use needs {needed}")
        case "InvalidAccessKeyId" | "SignatureDoesNotMatch" | "InvalidToken" | "ExpiredToken" | "TokenRefreshRequired":
            return DataError(f"AWS does not accept the credentials in use ({code})", remedy=_CREDENTIALS)
        case "SlowDown" | "503" | "500" | "ServiceUnavailable" | "InternalError" | "RequestTimeout" | "Throttling":
            return DataError(
                f"S3 still answers {code} after ten attempts to {verb} {where}",
                remedy="run the same command again with fewer --workers; what is copied already is not copied again",
            )
        case "PermanentRedirect" | "AuthorizationHeaderMalformed" | "IllegalLocationConstraintException":
            return DataError(f"{where} is in another region", remedy="set AWS_REGION to the bucket's region")
    if name in ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError"):
        return DataError(f"no AWS credentials to {verb} {where} with", remedy=_CREDENTIALS)
    if name in ("UnauthorizedSSOTokenError", "SSOTokenLoadError", "LoginRefreshRequired"):
        return DataError("the AWS login has expired", remedy=_CREDENTIALS)
    if name in ("EndpointConnectionError", "ConnectTimeoutError", "ConnectionClosedError", "ReadTimeoutError"):
        return DataError(
            f"cannot reach S3 to {verb} {where}: {error}",
            remedy="check the network, AWS_REGION and AWS_ENDPOINT_URL; then run the same command again",
        )
    return DataError(f"cannot {verb} {where}: {error}", remedy="mend what it names, then run the same command again")
