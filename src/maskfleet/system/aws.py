"""The AWS session of whoever runs this."""

from __future__ import annotations

import os
from typing import Any

from maskfleet.errors import MaskfleetError


def aws_session(need: str, *, region: str | None = None) -> Any:
    """A boto3 session for `need`, in `region` or else the one that AWS's own tools would take.

    boto3 reads AWS_DEFAULT_REGION alone; the AWS command line, EKS and our charts say AWS_REGION.
    """
    try:
        import boto3
    except ImportError as error:
        raise MaskfleetError(f"{need} need the Python package boto3", remedy="pip install 'maskfleet[aws]'") from error
    from botocore.exceptions import ProfileNotFound

    try:
        return boto3.Session(region_name=region or os.environ.get("AWS_REGION") or None)
    except ProfileNotFound as error:
        raise MaskfleetError(str(error), remedy="set AWS_PROFILE to a profile of ~/.aws/config, or unset it") from error
