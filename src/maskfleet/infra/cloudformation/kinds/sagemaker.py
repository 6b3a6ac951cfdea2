"""Network, file systems, roles and notebook of SageMaker jobs (`deploy/cloudformation/sagemaker.yaml`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from maskfleet.config.base import Config
from maskfleet.infra.cloudformation.kinds.ec2 import lustre_price
from maskfleet.infra.cloudformation.kinds.kind import Needs, StackKind
from maskfleet.infra.costs import Billed

_ID = r"([0-9a-f]{8}|[0-9a-f]{17})$"
_KMS_KEY = r"^arn:[a-z-]+:kms:[a-z0-9-]+:[0-9]{12}:key/[A-Za-z0-9-]+$"
_CIDR = r"^([0-9]{1,3}\.){3}[0-9]{1,3}/(1[6-9]|2[0-8])$"
_ENDPOINTS = 15  # five services in three zones

# The parameters of the template. Each has the name of a field, without underscores and in other case.
PARAMETERS = (
    "S3Bucket",
    "S3Prefix",
    "S3KmsKeyArn",
    "EcrRepository",
    "UseEfs",
    "EfsId",
    "LustreStorageGiB",
    "StorageKmsKeyArn",
    "VpcId",
    "PrivateSubnet1Id",
    "PrivateSubnet2Id",
    "PrivateSubnet3Id",
    "VpcCidr",
    "PublicSubnetCidr",
    "PrivateSubnet1Cidr",
    "PrivateSubnet2Cidr",
    "PrivateSubnet3Cidr",
    "InterfaceEndpoints",
    "NotebookInstanceType",
    "NotebookVolumeGiB",
    "NotebookWheel",
    "GitUrl",
    "GitBranch",
    "GitSecretArn",
)


class SageMakerStack(Config):
    """Settings of a SageMaker stack; a field that is None keeps the default of the template."""

    name: str = Field(max_length=128, pattern=r"^[A-Za-z][-A-Za-z0-9]*$")
    """Name of the stack."""

    region: str | None = None
    """AWS region; None uses the AWS configuration."""

    s3_bucket: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")
    """Existing bucket for data and results; jobs and notebook can use no other one."""

    s3_prefix: str = Field(
        default="maskfleet", pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*$"
    )
    """Jobs and notebook read and write only objects below this prefix."""

    s3_kms_key_arn: str | None = Field(default=None, pattern=_KMS_KEY)
    """KMS key of the bucket, if its objects are encrypted with a customer key."""

    ecr_repository: str = Field(default="maskfleet", pattern=r"^[a-z0-9][a-z0-9._/-]*[*]?$")
    """ECR repository of the training image; a * at its end allows several."""

    use_efs: bool = True
    """Whether there is an EFS file system."""

    efs_id: str | None = Field(default=None, pattern=rf"^fs-{_ID}")
    """Existing EFS file system without mount targets in these subnets; None creates an encrypted one."""

    lustre_storage_gib: Literal[0, 1200, 2400, 4800, 7200, 9600, 12000, 14400] = 0
    """Size of an FSx for Lustre file system that imports the S3 prefix; 0 creates none."""

    storage_kms_key_arn: str | None = Field(default=None, pattern=_KMS_KEY)
    """KMS key for a new EFS and the notebook's volume; None uses the keys of AWS."""

    vpc_id: str | None = Field(default=None, pattern=rf"^vpc-{_ID}")
    """Existing VPC; None creates one with a NAT gateway and an S3 endpoint."""

    private_subnet1_id: str | None = Field(default=None, pattern=rf"^subnet-{_ID}")
    """First private subnet of `vpc_id`, with a route to S3."""

    private_subnet2_id: str | None = Field(default=None, pattern=rf"^subnet-{_ID}")
    """Second one, in another zone."""

    private_subnet3_id: str | None = Field(default=None, pattern=rf"^subnet-{_ID}")
    """Third one, in another zone."""

    vpc_cidr: str = Field(default="10.0.0.0/16", pattern=_CIDR)
    """Range of a new VPC."""

    public_subnet_cidr: str = Field(default="10.0.0.0/24", pattern=_CIDR)
    """Range of its public subnet."""

    private_subnet1_cidr: str = Field(default="10.0.16.0/20", pattern=_CIDR)
    """Range of its first private subnet."""

    private_subnet2_cidr: str = Field(default="10.0.32.0/20", pattern=_CIDR)
    """Range of its second private subnet."""

    private_subnet3_cidr: str = Field(default="10.0.48.0/20", pattern=_CIDR)
    """Range of its third private subnet."""

    interface_endpoints: bool = False
    """Whether a new VPC has interface endpoints for SageMaker, ECR, CloudWatch Logs and STS."""

    notebook_instance_type: Literal[
        "none", "ml.t3.medium", "ml.t3.xlarge", "ml.m5.xlarge", "ml.m5.2xlarge", "ml.g5.xlarge"
    ] = "ml.t3.xlarge"
    """Type of the notebook instance; none creates no notebook."""

    notebook_volume_gib: int = Field(default=100, ge=20, le=16384)
    """Disk of the notebook instance."""

    notebook_wheel: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._/+-]*\.whl$")
    """Wheel of maskfleet below `s3_prefix`, from which the notebook gets a kernel and the notebooks."""

    git_url: str | None = Field(default=None, pattern=r"^https://[^\s]+$")
    """Git repository that the notebook clones."""

    git_branch: str | None = None
    """Branch of that repository."""

    git_secret_arn: str | None = Field(
        default=None, pattern=r"^arn:[a-z-]+:secretsmanager:[a-z0-9-]+:[0-9]{12}:secret:[A-Za-z0-9/_+=.@-]+$"
    )
    """Secret in Secrets Manager with username and password of the repository; None for a public one."""

    @model_validator(mode="after")
    def _consistent(self) -> SageMakerStack:
        subnets = (self.private_subnet1_id, self.private_subnet2_id, self.private_subnet3_id)
        if self.vpc_id is None and any(subnets):
            raise ValueError("the private subnets are those of an existing VPC: set vpc_id too")
        if self.vpc_id is not None and not all(subnets):
            raise ValueError("vpc_id needs private_subnet1_id, private_subnet2_id and private_subnet3_id")
        if self.efs_id is not None and not self.use_efs:
            raise ValueError("efs_id needs use_efs: true")
        if self.git_secret_arn is not None and self.git_url is None:
            raise ValueError("git_secret_arn needs git_url")
        return self

    def parameters(self) -> dict[str, str]:
        """The template's parameters; those that keep the template's default are left out."""
        values = {name.replace("_", ""): value for name, value in self.model_dump(mode="json").items()}
        found = {parameter: values[parameter.lower()] for parameter in PARAMETERS}
        texts = {name: str(value).lower() if isinstance(value, bool) else value for name, value in found.items()}
        return {parameter: str(value) for parameter, value in texts.items() if value is not None}

    def needs(self) -> Needs:
        """The bucket; SageMaker's quotas are those of a launch, and its subnets are in several zones."""
        return Needs(vpc=self.vpc_id, bucket=self.s3_bucket)

    def billed(self) -> list[Billed]:
        """What it costs while it exists; EFS is billed by what it holds, jobs by themselves."""
        found = []
        if self.notebook_instance_type != "none":
            kind = f"instance_hour/{self.notebook_instance_type}"
            found.append(Billed(f"notebook {self.notebook_instance_type} while it runs", kind))
        if self.vpc_id is None:
            found += [Billed("NAT gateway", "hour/nat_gateway"), Billed("1 × public IPv4 address", "hour/public_ipv4")]
            if self.interface_endpoints:
                text = f"{_ENDPOINTS} × interface endpoint in a zone"
                found.append(Billed(text, "hour/interface_endpoint", _ENDPOINTS))
        if self.lustre_storage_gib:
            text = f"{self.lustre_storage_gib} GiB FSx for Lustre, SCRATCH_2"
            found.append(Billed(text, lustre_price("SCRATCH_2"), 1, self.lustre_storage_gib))
        return found


SAGEMAKER = StackKind(
    name="sagemaker",
    title="SageMaker stack",
    template="cloudformation/sagemaker.yaml",
    read=SageMakerStack.model_validate,
    fields=tuple(SageMakerStack.model_fields),
    # Those of file systems are missing in stacks without them.
    outputs=("TrainingRoleArn", "HostingRoleArn", "Subnets", "SecurityGroups", "DataUri"),
)
