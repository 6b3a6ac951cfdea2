"""The EC2 cluster: a head node, workers and a shared file system (`deploy/cloudformation/ec2-cluster.yaml`)."""

from __future__ import annotations

import ipaddress
import re
from typing import Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from maskfleet.config.base import Config
from maskfleet.infra.cloudformation.kinds.kind import InstanceNeed, Needs, StackKind
from maskfleet.infra.costs import Billed

_ID = r"([0-9a-f]{8}|[0-9a-f]{17})$"
_KMS_KEY = r"^arn:[a-z-]+:kms:[a-z0-9-]+:[0-9]{12}:key/[A-Za-z0-9-]+$"
_TYPE = r"^[a-z0-9-]+\.[a-z0-9-]+$"
_LUSTRE_GIB = (0, 1200, 2400, 4800, 7200, 9600, 12000, 14400, 16800, 19200, 21600, 24000, 48000, 96000)

# The parameters of the template. Each has the name of a field, without underscores and in other case.
PARAMETERS = (
    "S3Bucket",
    "S3Prefix",
    "S3KmsKeyArn",
    "KeyName",
    "SshCidr",
    "LoginUser",
    "WorkerInstanceType",
    "WorkerCount",
    "MinWorkerCount",
    "HeadInstanceType",
    "PurchaseOption",
    "CapacityReservationId",
    "AmiParameter",
    "AmiId",
    "PythonPath",
    "RootDeviceName",
    "RootVolumeGiB",
    "EfsId",
    "EfsSecurityGroupId",
    "EfsThroughputMode",
    "LustreStorageGiB",
    "LustreDeploymentType",
    "StorageKmsKeyArn",
    "VpcId",
    "PublicSubnetId",
    "PrivateSubnetId",
    "AvailabilityZone",
    "VpcCidr",
    "PublicSubnetCidr",
    "PrivateSubnetCidr",
    "AlarmTopicArn",
)


class Ec2Cluster(Config):
    """Settings of an EC2 cluster; a field that is None keeps the default of the template."""

    name: str = Field(max_length=128, pattern=r"^[A-Za-z][-A-Za-z0-9]*$")
    """Name of the stack."""

    region: str | None = None
    """AWS region; None uses the AWS configuration."""

    s3_bucket: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")
    """Existing bucket for data and results; the nodes can use no other one."""

    s3_prefix: str = Field(
        default="maskfleet", pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*$"
    )
    """The nodes read and write only objects below this prefix."""

    s3_kms_key_arn: str | None = Field(default=None, pattern=_KMS_KEY)
    """KMS key of the bucket, if its objects are encrypted with a customer key."""

    key_name: str = Field(min_length=1, max_length=255)
    """EC2 key pair for SSH."""

    ssh_cidr: str | None = None
    """IPv4 range that may reach the head node by SSH; None opens no port and uses Session Manager."""

    login_user: str | None = Field(default=None, pattern=r"^[a-z_][a-z0-9_-]{0,31}$")
    """Login name of the AMI."""

    worker_instance_type: str = Field(default="g6.12xlarge", pattern=_TYPE)
    """Type of the nodes that train."""

    worker_count: PositiveInt = Field(default=2, le=256)
    """Number of nodes that train."""

    min_worker_count: PositiveInt = Field(default=1, le=256)
    """The stack is complete when this many workers are ready."""

    head_instance_type: str = Field(default="m6i.xlarge", pattern=_TYPE)
    """Type of the node that you log in to; a type with GPUs also trains."""

    purchase_option: Literal["on-demand", "spot", "capacity-block"] = "on-demand"
    """How the workers are paid."""

    capacity_reservation_id: str | None = Field(default=None, pattern=r"^cr-[0-9a-f]{17}$")
    """Capacity reservation of the workers, on demand or a capacity block."""

    ami_parameter: str | None = Field(default=None, pattern=r"^/[A-Za-z0-9._/-]+$")
    """Public SSM parameter with the AMI."""

    ami_id: str | None = Field(default=None, pattern=rf"^ami-{_ID}")
    """AMI to use instead of `ami_parameter`."""

    python_path: str | None = Field(default=None, pattern=r"^/[A-Za-z0-9._/-]+$")
    """Python of the AMI that has PyTorch."""

    root_device_name: str | None = Field(default=None, pattern=r"^/dev/[a-z0-9]+$")
    """Root device of the AMI."""

    root_volume_gib: int = Field(default=200, ge=100, le=16384)
    """Size of the root volume of each node."""

    efs_id: str | None = Field(default=None, pattern=rf"^fs-{_ID}")
    """Existing EFS file system; None creates one."""

    efs_security_group_id: str | None = Field(default=None, pattern=rf"^sg-{_ID}")
    """Security group of the mount target that `efs_id` already has in this zone; None creates a mount target."""

    efs_throughput_mode: Literal["elastic", "bursting"] | None = None
    """Throughput mode of a new EFS file system."""

    lustre_storage_gib: int = 0
    """Size of an FSx for Lustre file system that is linked to the S3 prefix; 0 creates none."""

    lustre_deployment_type: Literal["SCRATCH_2", "PERSISTENT_2"] = "SCRATCH_2"
    """Deployment type of that file system."""

    storage_kms_key_arn: str | None = Field(default=None, pattern=_KMS_KEY)
    """KMS key for volumes and new file systems; None uses the keys of AWS."""

    vpc_id: str | None = Field(default=None, pattern=rf"^vpc-{_ID}")
    """Existing VPC; None creates one with a NAT gateway and an S3 endpoint."""

    public_subnet_id: str | None = Field(default=None, pattern=rf"^subnet-{_ID}")
    """Public subnet of `vpc_id` for a head node with `ssh_cidr`."""

    private_subnet_id: str | None = Field(default=None, pattern=rf"^subnet-{_ID}")
    """Private subnet of `vpc_id` for the workers; it needs a route to the internet."""

    availability_zone: str | None = Field(default=None, pattern=r"^[a-z]{2}(-[a-z]+)+-[0-9][a-z]$")
    """Availability zone of a new VPC; None takes the first one of the region."""

    vpc_cidr: str = "10.0.0.0/16"
    """Range of a new VPC."""

    public_subnet_cidr: str = "10.0.0.0/24"
    """Range of its public subnet."""

    private_subnet_cidr: str = "10.0.16.0/20"
    """Range of its private subnet."""

    alarm_topic_arn: str | None = Field(default=None, pattern=r"^arn:[a-z-]+:sns:[a-z0-9-]+:[0-9]{12}:[A-Za-z0-9_-]+$")
    """SNS topic for the alarms; None sends no messages."""

    @field_validator("ssh_cidr")
    @classmethod
    def _narrow(cls, value: str | None) -> str | None:
        if value is None:
            return None
        network = _network(value)
        if network.prefixlen < 8:
            raise ValueError(f"{value} is the whole internet or much of it: write your own address, 203.0.113.7/32")
        return value

    @field_validator("vpc_cidr", "public_subnet_cidr", "private_subnet_cidr")
    @classmethod
    def _range(cls, value: str) -> str:
        if not 16 <= _network(value).prefixlen <= 28:
            raise ValueError(f"{value} must be a range from /16 to /28, such as 10.0.0.0/16")
        return value

    @field_validator("lustre_storage_gib")
    @classmethod
    def _lustre_size(cls, value: int) -> int:
        if value not in _LUSTRE_GIB:
            raise ValueError(
                f"{value} is not a size of FSx for Lustre: it is one of {', '.join(map(str, _LUSTRE_GIB))}"
            )
        return value

    @model_validator(mode="after")
    def _nodes_fit(self) -> Ec2Cluster:
        if self.min_worker_count > self.worker_count:
            raise ValueError(f"min_worker_count {self.min_worker_count} is more than worker_count {self.worker_count}")
        if self.purchase_option == "capacity-block" and self.capacity_reservation_id is None:
            raise ValueError("purchase_option capacity-block needs capacity_reservation_id")
        if self.purchase_option == "spot" and self.capacity_reservation_id is not None:
            raise ValueError("capacity_reservation_id does not fit purchase_option spot")
        if self.efs_security_group_id is not None and self.efs_id is None:
            raise ValueError("efs_security_group_id belongs to an existing file system: set efs_id too")
        return self

    @model_validator(mode="after")
    def _network_fits(self) -> Ec2Cluster:
        if self.vpc_id is None:
            if self.private_subnet_id or self.public_subnet_id:
                raise ValueError(
                    "private_subnet_id and public_subnet_id are subnets of an existing VPC: set vpc_id too"
                )
            self._check_ranges()
        else:
            if self.private_subnet_id is None:
                raise ValueError("vpc_id needs private_subnet_id, the subnet of the workers")
            if self.ssh_cidr is not None and self.public_subnet_id is None:
                raise ValueError("ssh_cidr needs a head node with a public address: set public_subnet_id too")
            if self.availability_zone is not None:
                raise ValueError("availability_zone is for a new VPC; the subnets of vpc_id have theirs")
        zone = self.availability_zone
        if zone is not None and self.region is not None and zone[:-1] != self.region:
            raise ValueError(f"availability_zone {zone} is not in region {self.region}")
        return self

    def _check_ranges(self) -> None:
        vpc = _network(self.vpc_cidr)
        public, private = _network(self.public_subnet_cidr), _network(self.private_subnet_cidr)
        for field, subnet in (("public_subnet_cidr", public), ("private_subnet_cidr", private)):
            if not subnet.subnet_of(vpc):
                raise ValueError(f"{field} {subnet} is not inside of vpc_cidr {vpc}")
        if public.overlaps(private):
            raise ValueError(f"public_subnet_cidr {public} and private_subnet_cidr {private} overlap")

    def parameters(self) -> dict[str, str]:
        """The template's parameters; those that keep the template's default are left out."""
        values = {name.replace("_", ""): value for name, value in self.model_dump(mode="python").items()}
        found = {parameter: values[parameter.lower()] for parameter in PARAMETERS}
        return {parameter: str(value) for parameter, value in found.items() if value is not None}

    def needs(self) -> Needs:
        reserved = self.capacity_reservation_id is not None
        workers = InstanceNeed(
            "worker_instance_type",
            self.worker_instance_type,
            self.worker_count,
            spot=self.purchase_option == "spot",
            reserved=reserved,
        )
        subnets = {"private_subnet_id": self.private_subnet_id, "public_subnet_id": self.public_subnet_id}
        return Needs(
            instances=(workers, InstanceNeed("head_instance_type", self.head_instance_type, 1)),
            zone=self.availability_zone,
            vpc=self.vpc_id,
            subnets={field: subnet for field, subnet in subnets.items() if subnet is not None},
            key_name=self.key_name,
            bucket=self.s3_bucket,
            efs=self.efs_id,
            efs_security_group=self.efs_security_group_id,
        )

    def billed(self) -> list[Billed]:
        """What it costs while it exists; EFS is billed by what it holds."""
        workers = f"{self.worker_count} × {self.worker_instance_type}"
        kind = f"instance_hour/{self.worker_instance_type}"
        match self.purchase_option:
            case "spot":
                workers += " as Spot instances, at the price on demand, which is more than they cost"
            case "capacity-block":
                workers, kind = f"{workers} in a capacity block, which is paid in advance", ""
        nodes = self.worker_count + 1
        found = [
            Billed(workers, kind, self.worker_count),
            Billed(f"1 × {self.head_instance_type}", f"instance_hour/{self.head_instance_type}"),
            Billed(f"{nodes} × {self.root_volume_gib} GiB gp3", "gib_month/ebs_gp3", nodes, self.root_volume_gib),
        ]
        if self.vpc_id is None:
            found.append(Billed("NAT gateway", "hour/nat_gateway"))
        addresses = (self.vpc_id is None) + (self.ssh_cidr is not None)
        if addresses:
            found.append(Billed(f"{addresses} × public IPv4 address", "hour/public_ipv4", addresses))
        if self.lustre_storage_gib:
            text = f"{self.lustre_storage_gib} GiB FSx for Lustre, {self.lustre_deployment_type}"
            found.append(Billed(text, lustre_price(self.lustre_deployment_type), 1, self.lustre_storage_gib))
        return found


def lustre_price(deployment_type: str, throughput: int | None = None) -> str:
    """The name of the price of a Lustre file system in the price table."""
    if deployment_type == "PERSISTENT_2":
        return f"gib_month/fsx_persistent_2_{throughput or 125}"
    return f"gib_month/fsx_{deployment_type.lower()}"


def _network(text: str) -> ipaddress.IPv4Network:
    """The range that `text` is."""
    if not re.fullmatch(r"[0-9.]+/[0-9]+", text):
        raise ValueError(f"{text!r} is not an IPv4 range such as 203.0.113.7/32")
    try:
        return ipaddress.IPv4Network(text)
    except ValueError as error:
        if "host bits" in str(error):
            whole = ipaddress.IPv4Network(text, strict=False)
            raise ValueError(f"{text} is an address, not the beginning of its range: write {whole}") from None
        raise ValueError(f"{text!r} is not an IPv4 range such as 203.0.113.7/32") from None


EC2 = StackKind(
    name="ec2",
    title="EC2 cluster",
    template="cloudformation/ec2-cluster.yaml",
    read=Ec2Cluster.model_validate,
    fields=tuple(Ec2Cluster.model_fields),
    outputs=("HeadGroup", "WorkerGroup", "Access", "LoginUser", "Python", "RunRoot"),
)
