"""What S3 answers, in words that say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from maskfleet.errors import DataError, MaskfleetError
from maskfleet.system.aws import aws_error, aws_exceptions, code_of

_PERMISSIONS = {
    "list": "s3:ListBucket on the bucket",
    "read": "s3:GetObject on the objects (and kms:Decrypt if the bucket is encrypted with a KMS key)",
    "write": "s3:PutObject and s3:AbortMultipartUpload on the objects (and kms:GenerateDataKey with a KMS key)",
}


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
