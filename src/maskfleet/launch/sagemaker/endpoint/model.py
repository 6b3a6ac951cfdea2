"""The model of an endpoint: the archive that a training job left in S3, or weights that are packed and uploaded."""

from __future__ import annotations

import gzip
import tarfile
from dataclasses import dataclass
from pathlib import Path

from maskfleet.errors import LaunchError
from maskfleet.launch.job import JobHandle, JobState
from maskfleet.launch.sagemaker.services import Json, Services, asking, job_of
from maskfleet.launch.sagemaker.status import describe_job, state_of
from maskfleet.system.aws import aws_exceptions, code_of
from maskfleet.system.files import sha256

ARCHIVE = "model.tar.gz"
WEIGHTS = "model.safetensors"  # as `maskfleet sagemaker serve` expects it in the archive
_ABSENT = ("404", "NoSuchKey", "NotFound", "NoSuchBucket")


@dataclass(frozen=True, slots=True)
class JobModel:
    """What an endpoint can take over from a finished training job."""

    uri: str
    image: str
    role_arn: str
    subnets: tuple[str, ...]
    security_groups: tuple[str, ...]


def job_model(services: Services, handle: JobHandle) -> JobModel:
    """The model of the job `handle`, which must have ended and left one."""
    name = job_of(handle)
    job = describe_job(services, name)
    if job is None:
        raise LaunchError(f"there is no job {name} in {services.region}", remedy="check the handle and the AWS account")
    state = state_of(job)
    if not state.is_final:
        raise LaunchError(
            f"{handle} is {state}: it has no model yet", remedy=f"wait for it: `maskfleet logs -f {handle}`"
        )
    uri = job.get("ModelArtifacts", {}).get("S3ModelArtifacts")
    if not uri or state is JobState.FAILED:
        raise LaunchError(f"{handle} is {state} and left no model", remedy=f"`maskfleet explain {handle}` says why")
    network: Json = job.get("VpcConfig", {})
    return JobModel(
        uri=str(uri),
        image=str(job["AlgorithmSpecification"].get("TrainingImage", "")),
        role_arn=str(job["RoleArn"]),
        subnets=tuple(network.get("Subnets", ())),
        security_groups=tuple(network.get("SecurityGroupIds", ())),
    )


def pack(weights: Path, archive: Path) -> None:
    """Write `archive`, model.tar.gz with the file `weights`; the same weights give the same bytes."""
    info = tarfile.TarInfo(WEIGHTS)
    info.size, info.mode = weights.stat().st_size, 0o644
    # Weights hardly shrink: the lowest level costs the least time.
    with (
        archive.open("wb") as raw,
        gzip.GzipFile("", "wb", compresslevel=1, fileobj=raw, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar,
        weights.open("rb") as source,
    ):
        tar.addfile(info, source)


def uploaded_uri(archive: Path, name: str, prefix: str) -> str:
    """Where `archive`, the model of the endpoint `name`, is stored below the S3 `prefix`: by its content."""
    return f"{prefix.rstrip('/')}/endpoints/{name}/{sha256(archive)[:16]}/{ARCHIVE}"


def upload(services: Services, archive: Path, uri: str) -> bool:
    """Copy `archive` to `uri` unless it is there already; returns whether it was copied."""
    if object_size(services, uri) == archive.stat().st_size:
        return False
    bucket, key = bucket_and_key(uri)
    with asking(f"write {uri}", permissions="s3:PutObject on it", service="S3"), archive.open("rb") as file:
        services.client("s3").put_object(Bucket=bucket, Key=key, Body=file)
    return True


def object_size(services: Services, uri: str) -> int | None:
    """The size of an object in S3; None if it does not exist."""
    bucket, key = bucket_and_key(uri)
    with asking(f"read {uri}", permissions="s3:GetObject on it and s3:ListBucket on its bucket", service="S3"):
        try:
            return int(services.client("s3").head_object(Bucket=bucket, Key=key)["ContentLength"])
        except aws_exceptions() as error:
            if code_of(error) in _ABSENT:
                return None
            raise


def bucket_and_key(uri: str) -> tuple[str, str]:
    """The bucket and the key of s3://bucket/key."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key
