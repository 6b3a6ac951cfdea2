"""What `maskfleet infra` can create: which files it uses, and which resources hold data."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from maskfleet.system.deploy_files import deploy_path

# Deleting one of these deletes users' data, or stops its export to S3.
DATA = {
    "aws_efs_file_system",
    "aws_fsx_lustre_file_system",
    "aws_fsx_data_repository_association",
    "aws_s3_bucket",
    "aws_s3_object",
    "aws_backup_vault",
}
# Never deleted by `down`: AWS deletes empty buckets only, and would leave a full one without its protection.
BUCKETS = {"aws_s3_bucket"}
# Policies that protect data; one is kept if everything that it depends on is kept.
GUARDS = {
    "aws_efs_file_system_policy",
    "aws_efs_backup_policy",
    "aws_efs_access_point",
    "aws_efs_replication_configuration",
    "aws_s3_bucket_policy",
    "aws_s3_bucket_public_access_block",
    "aws_s3_bucket_ownership_controls",
    "aws_s3_bucket_versioning",
    "aws_s3_bucket_lifecycle_configuration",
    "aws_s3_bucket_server_side_encryption_configuration",
}


@dataclass(frozen=True, slots=True)
class Stack:
    """A kind of infrastructure: the folders under `deploy/` that it uses, and its roots in the order of creation."""

    name: str
    deploy: Path
    folders: tuple[str, ...]
    roots: tuple[str, str]
    cluster: str
    """Resource type (or block, `type.name`) of the cluster."""
    data: Collection[str]
    """Resource types (or blocks) that hold data."""
    guards: Collection[str]
    """Resource types (or blocks) that protect data."""


def eks() -> Stack:
    """Amazon EKS: the AWS root, then what runs in the cluster."""
    return Stack(
        name="eks",
        deploy=deploy_path(),
        folders=("terraform/eks", "helm"),
        roots=("terraform/eks/aws", "terraform/eks/addons"),
        cluster="aws_eks_cluster",
        data=DATA,
        guards=GUARDS,
    )
