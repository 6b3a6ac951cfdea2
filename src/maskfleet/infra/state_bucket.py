"""The S3 bucket for Terraform's state, created if it is missing: versioned, encrypted, not public, TLS only."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from maskfleet.errors import InfraError
from maskfleet.system.aws import aws_client, aws_error, aws_exceptions, aws_session, code_of

PERMISSIONS = (
    "s3:CreateBucket, s3:ListBucket, s3:PutBucketVersioning, s3:PutEncryptionConfiguration,"
    " s3:PutBucketPublicAccessBlock and s3:PutBucketPolicy on it"
)


def make_state_bucket(bucket: str, *, region: str, profile: str | None, say: Callable[[str], None]) -> None:
    """Create `bucket` in `region`; one that exists and may be used is left as it is."""
    client = aws_client(aws_session("buckets in S3", region=region, profile=profile), "s3")
    try:
        if _exists(client, bucket):
            say(f"the state bucket {bucket} exists; it was not changed")
            return
        where = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
        client.create_bucket(Bucket=bucket, ObjectOwnership="BucketOwnerEnforced", **where)
        try:
            _protect(client, bucket)
        except aws_exceptions():
            client.delete_bucket(Bucket=bucket)  # otherwise the next run would take it for one that is protected
            raise
    except aws_exceptions() as error:
        raise _explained(error, bucket) from error
    say(f"created the state bucket {bucket}: versioned, encrypted, not public, TLS only; down never deletes it")


def _exists(client: Any, bucket: str) -> bool:
    """Whether the bucket exists and is ours to use."""
    try:
        client.head_bucket(Bucket=bucket)
    except aws_exceptions() as error:
        if code_of(error) in ("404", "NoSuchBucket"):
            return False
        raise
    return True


def _protect(client: Any, bucket: str) -> None:
    blocks = ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets")
    client.put_public_access_block(Bucket=bucket, PublicAccessBlockConfiguration=dict.fromkeys(blocks, True))
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    rule = {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}
    client.put_bucket_encryption(Bucket=bucket, ServerSideEncryptionConfiguration={"Rules": [rule]})
    client.put_bucket_policy(Bucket=bucket, Policy=json.dumps(_tls_only(bucket, client.meta.partition)))


def _tls_only(bucket: str, partition: str) -> dict[str, Any]:
    statement = {
        "Sid": "OnlyOverTls",
        "Effect": "Deny",
        "Principal": "*",
        "Action": "s3:*",
        "Resource": [f"arn:{partition}:s3:::{bucket}", f"arn:{partition}:s3:::{bucket}/*"],
        "Condition": {"Bool": {"aws:SecureTransport": "false"}},
    }
    return {"Version": "2012-10-17", "Statement": [statement]}


def _explained(error: Exception, bucket: str) -> InfraError:
    if code_of(error) in ("BucketAlreadyExists", "403", "301"):
        return InfraError(
            f"the bucket {bucket} belongs to somebody else, or is in another region",
            remedy="choose another name for --state-bucket (names are unique in all of AWS), or give --state-region",
        )
    explained = aws_error(error, f"create the bucket {bucket}", service="S3", permissions=PERMISSIONS, kind=InfraError)
    assert isinstance(explained, InfraError)
    return explained
