"""LaunchConfig: where a run is launched. A tagged union; backends derive ranks and slots.

A class per target: its `on` is the name of the target, of its folder in launch/ and of its line in BACKENDS.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from maskfleet.config.base import Config
from maskfleet.config.fields import nearest

DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
MOUNT = r"^/[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"  # the chart names the volume after it
S3_URI = r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^\s]*)?$"
EXPERIMENT = r"^[a-zA-Z0-9](-*[a-zA-Z0-9])*$"
ROLE_ARN = r"^arn:aws[a-z-]*:iam::\d{12}:role/[A-Za-z0-9_+=,.@/-]+$"
MAX_TAGS = 49  # of a job on SageMaker, beside our own
SUBFOLDER = r"^[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*$"


class LocalLaunch(Config):
    """On this machine."""

    on: Literal["local"] = "local"
    """Where to run."""

    gpus: NonNegativeInt | None = None
    """GPUs to use; None is all there are, 0 is the CPU."""

    ranks: PositiveInt | None = None
    """Processes to train with; None is one per GPU, or one on the CPU."""

    max_restarts: NonNegativeInt = 3
    """How often a run that died is restarted from its last checkpoint."""

    detach: bool = False
    """Whether the command returns at once and the run continues in the background."""

    persist: bool = False
    """Whether the run continues by itself after a reboot: by a systemd user unit, or by cron."""


class SshLaunch(Config):
    """On machines reached by SSH."""

    exclusive_fields: ClassVar[tuple[str, ...]] = ("hosts", "hosts_file", "stack")

    on: Literal["ssh"] = "ssh"
    """Where to run."""

    hosts: tuple[str, ...] = ()
    """Hosts, as in ~/.ssh/config; `host slots=8` gives the number of ranks there."""

    hosts_file: str | None = None
    """File with one host per line, instead of `hosts`."""

    stack: str | None = None
    """CloudFormation stack whose running instances are the hosts, instead of `hosts`."""

    region: str | None = None
    """AWS region of the stack; None uses the AWS configuration."""

    stack_wait_s: float = Field(default=1800, ge=0)
    """Longest wait until enough hosts of the stack are healthy."""

    hosts_command: str | None = Field(default=None, pattern=r"^/[A-Za-z0-9._/-]+$")
    """Program on the hosts that prints those there are, as a hosts file; a new one takes the place of a lost one."""

    user: str | None = None
    """Login name; None uses ~/.ssh/config."""

    min_nodes: PositiveInt | None = None
    """The run continues while at least this many hosts are left; None requires all of them."""

    max_restarts: NonNegativeInt = 3
    """How often a run that died is restarted from its last checkpoint."""

    starter: Literal["supervisor", "mpirun"] = "supervisor"
    """What starts the ranks: the supervisor of each host, or Open MPI from one of them."""

    run_root: str = "~/maskfleet"
    """Folder on the hosts for environment, runs and logs; all hosts must share it."""

    environment: str | None = None
    """Python environment on the hosts to use; None creates one from this version's wheel."""

    python: str = "python3"
    """Python on the hosts from which a new environment is created; it reuses installed packages such as torch."""

    instance: str | None = None
    """Instance type of the hosts; determines the ranks of hosts without `slots=`."""

    rendezvous_port: int | None = Field(default=None, ge=1024, le=65535)
    """Port on the first host where the ranks meet; None takes a free one."""

    accept_new_host_keys: bool = False
    """Whether to trust hosts with an unknown key without asking."""

    persist: bool = False
    """Whether the run continues by itself after a reboot: by a systemd user unit, or by cron."""

    @field_validator("starter", mode="before")
    @classmethod
    def _no_torchrun(cls, value: Any) -> Any:
        if value == "torchrun":
            raise ValueError("the supervisors start the ranks themselves, without torchrun: write starter: supervisor")
        return value

    @model_validator(mode="after")
    def _hosts_once(self) -> SshLaunch:
        twice = [name for name in self.exclusive_fields if getattr(self, name)]
        if len(twice) > 1:
            raise ValueError(f"{' and '.join(twice)} all name the hosts; set only one")
        return self


class SageMakerChannel(Config):
    """One input of a SageMaker job."""

    name: str = Field(default="train", max_length=64, pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the channel; the data appears in /opt/ml/input/data/NAME."""

    source: Literal["s3", "efs", "fsx"] = "s3"
    """What holds the data."""

    uri: str
    """s3://bucket/prefix, or the directory on the file system; with FSx it begins with the mount name."""

    file_system_id: str | None = Field(default=None, pattern=r"^fs-[0-9a-f]{8,40}$")
    """fs-… of the EFS or FSx for Lustre file system; None uses that of the stack."""

    read_only: bool = True
    """Whether the job may only read it."""

    input_mode: Literal["File", "FastFile"] = "File"
    """Whether S3 data is copied to the instance first or streamed."""

    @model_validator(mode="after")
    def _consistent(self) -> SageMakerChannel:
        if self.name == "log" and self.read_only:
            raise ValueError("the job writes to channel log: set source to efs or fsx, and read_only: false")
        if self.source != "s3":
            if not self.uri.startswith("/"):
                raise ValueError(f"uri {self.uri!r} of channel {self.name} is a directory on {self.source}: write /…")
            if self.input_mode != "File":
                raise ValueError(f"channel {self.name}: only S3 data has input_mode FastFile")
            return self
        if re.fullmatch(S3_URI, self.uri) is None:
            raise ValueError(f"uri {self.uri!r} of channel {self.name} is not s3://bucket/prefix")
        if self.file_system_id is not None:
            raise ValueError(f"channel {self.name}: file_system_id belongs to source efs or fsx, not to s3")
        if not self.read_only:
            raise ValueError(f"channel {self.name}: a job can only read S3 data; write to source efs or fsx")
        return self


class SageMakerLaunch(Config):
    """As an Amazon SageMaker training job."""

    on: Literal["sagemaker"] = "sagemaker"
    """Where to run."""

    nodes: PositiveInt = 1
    """Instances."""

    instance: str = "ml.p4d.24xlarge"
    """Instance type, with or without the ml. prefix."""

    image: str | None = None
    """Training image in ECR, in the region of the job."""

    stack: str | None = None
    """CloudFormation stack with role, subnets, security groups, bucket and file systems, for what is not set here."""

    role_arn: str | None = Field(default=None, pattern=ROLE_ARN)
    """Execution role of the job; None uses that of the stack."""

    region: str | None = Field(default=None, pattern=r"^[a-z]{2}(-[a-z]+)+-\d$")
    """AWS region; None uses the AWS configuration."""

    channels: tuple[SageMakerChannel, ...] = ()
    """Inputs of the job: `train` with the data, and optionally `log`, a writable file system for the logs."""

    output_uri: str | None = Field(default=None, pattern=S3_URI)
    """s3://bucket/prefix for the trained model; None is DataUri/output of the stack."""

    checkpoint_uri: str | None = Field(default=None, pattern=S3_URI)
    """s3://bucket/prefix to which checkpoints are copied; None is OUTPUT_URI/NAME/checkpoints. Name it to resume."""

    subnets: tuple[str, ...] = ()
    """Private subnets of the job; empty uses those of the stack."""

    security_groups: tuple[str, ...] = ()
    """Security groups of the job; empty uses those of the stack."""

    volume_gib: PositiveInt = 100
    """Disk of each instance; types with local NVMe disks have those instead."""

    max_run_s: int = Field(default=400_000, gt=0, le=2_419_200)
    """Longest run time; SageMaker allows 28 days."""

    spot: bool = False
    """Whether to use managed Spot capacity."""

    max_wait_s: PositiveInt | None = None
    """Longest time including the wait for Spot capacity; None is one day more than max_run_s."""

    retries: int = Field(default=1, ge=0, le=30)
    """How often SageMaker starts the job again after an internal error of the service."""

    warm_pool_s: int = Field(default=0, ge=0, le=3600)
    """How long the instances are kept for the next job; 0 releases them at once. It takes a quota of warm pools."""

    experiment: str | None = Field(default=None, max_length=120, pattern=EXPERIMENT)
    """SageMaker experiment that the job belongs to; it must exist."""

    trial: str | None = Field(default=None, max_length=120, pattern=EXPERIMENT)
    """Trial of the experiment; it must exist."""

    encrypt_traffic: bool = False
    """Whether the traffic between the instances is encrypted; this costs speed."""

    tags: dict[str, str] = Field(default_factory=dict, max_length=MAX_TAGS)
    """Further tags of the job."""

    @field_validator("tags")
    @classmethod
    def _tags_that_aws_takes(cls, tags: dict[str, str]) -> dict[str, str]:
        for key, value in tags.items():
            fits = not key.lower().startswith("aws:") and 1 <= len(key) <= 128 and len(value) <= 256
            if not fits or not all(one.isalnum() or one in " _.:/=+-@" for one in key + value):
                raise ValueError(
                    f"AWS refuses the tag {key}={value}: use letters, digits, blanks and _.:/=+-@, at most 128 for the "
                    "key and 256 for the value; keys do not begin with aws:"
                )
        return tags

    @model_validator(mode="after")
    def _consistent(self) -> SageMakerLaunch:
        names = [one.name for one in self.channels]
        if len(set(names)) < len(names):
            raise ValueError(f"two channels have the same name: {', '.join(names)}")
        if bool(self.subnets) != bool(self.security_groups):
            raise ValueError("subnets and security_groups belong together: set both or neither")
        if self.max_wait_s is not None and not self.spot:
            raise ValueError("max_wait_s belongs to spot: true")
        if self.max_wait_s is not None and self.max_wait_s < self.max_run_s:
            raise ValueError("max_wait_s includes the run time: it must be at least max_run_s")
        if self.spot and self.warm_pool_s:
            raise ValueError("SageMaker has no warm pools of Spot capacity: set spot or warm_pool_s")
        if self.trial is not None and self.experiment is None:
            raise ValueError("trial belongs to an experiment: set experiment, too")
        return self


class EksLaunch(Config):
    """On Amazon EKS: as a Kubeflow MPIJob, or with `min_nodes` as an Indexed Job."""

    on: Literal["eks"] = "eks"
    """Where to run."""

    nodes: PositiveInt = 1
    """Worker pods, one per node."""

    min_nodes: PositiveInt | None = None
    """The run continues while at least this many workers are left, as an Indexed Job; None requires all of them."""

    instance: str = "p4d.24xlarge"
    """Instance type of the workers."""

    gpus: NonNegativeInt | None = None
    """GPUs of each node; None is all that the instance type has, 0 is the CPU."""

    ranks: PositiveInt | None = None
    """Ranks on each node; None is one per GPU, or one on the CPU."""

    cpus: PositiveInt | None = None
    """CPUs that each worker requests; None uses the chart's table of common instance types."""

    memory_gib: PositiveInt | None = None
    """Memory that each worker requests; None uses the chart's table, as with `cpus`."""

    image: str | None = None
    """Training image."""

    namespace: str = Field(default="kubeflow", max_length=63, pattern=DNS_LABEL)
    """Kubernetes namespace."""

    context: str | None = Field(default=None, min_length=1)
    """kubectl context; None is the current one."""

    shared_claim: str = "pv-fsx"
    """Volume claim for run directories and logs."""

    shared_path: str = Field(default="/fsx", pattern=MOUNT)
    """Where the shared volume is mounted."""

    log_dir: str = Field(default="logs", pattern=SUBFOLDER)
    """Folder on the shared volume that holds the run directories, each named after its job."""

    data_claim: str | None = None
    """Volume claim of the data; None is the shared one."""

    data_path: str | None = Field(default=None, pattern=MOUNT)
    """Where the data volume is mounted; None is the mount of the shared volume."""

    data_dir: str = Field(default="data/coco2017", pattern=SUBFOLDER)
    """Folder on the data volume that is data.root if the run does not set it."""

    retries: NonNegativeInt = 3
    """How often a failed job is restarted from its last checkpoint."""

    queue: str | None = None
    """Kueue queue; None for no queue."""

    efa: bool | None = None
    """Whether to request EFA network devices; None does if the instance type has them."""

    shm_gib: PositiveFloat = 16.0
    """Size of the memory-backed /dev/shm of each worker."""

    chart_values: dict[str, Any] = Field(default_factory=dict)
    """Further values of the chart `train` (docs/run-anywhere/eks/train-chart.md)."""

    @model_validator(mode="after")
    def _data_volume_whole(self) -> EksLaunch:
        if (self.data_claim is None) != (self.data_path is None):
            raise ValueError("data_claim and data_path belong together: set both or neither")
        if self.data_path == self.shared_path and self.data_claim != self.shared_claim:
            raise ValueError("data_path and shared_path are the same folder, but their claims differ")
        return self

    @property
    def data_mount(self) -> str:
        """Where the data volume is mounted."""
        return self.data_path or self.shared_path


AnyLaunch = LocalLaunch | SshLaunch | SageMakerLaunch | EksLaunch
LaunchConfig = Annotated[AnyLaunch, Field(discriminator="on")]
LAUNCH_ADAPTER: TypeAdapter[AnyLaunch] = TypeAdapter(LaunchConfig)
LAUNCH_CLASSES: dict[str, type[AnyLaunch]] = {kind.model_fields["on"].default: kind for kind in get_args(AnyLaunch)}
DEFAULT_TARGET = LocalLaunch().on


def launch_problems(error: ValidationError) -> list[str]:
    """One line per problem in `error`."""
    return [_problem(one) for one in error.errors(include_url=False)]


def _problem(one: Any) -> str:
    place, *path = map(str, one["loc"] or ("",))
    field = ".".join(path)
    match one["type"]:
        case "extra_forbidden":
            near = nearest(field, LAUNCH_CLASSES[place].model_fields if place in LAUNCH_CLASSES else ())
            return f"{field} is no field of {place}{f'; did you mean {near}?' if near else ''}"
        case "union_tag_invalid":
            return f"there is no place {one['ctx']['tag']!r}: it is {', '.join(LAUNCH_CLASSES)}"
        case "value_error":
            return str(one["msg"]).removeprefix("Value error, ")
        case _:
            message = str(one["msg"]).replace("Input should", "it should").replace("String should", "it should")
            return f"{field or 'launch'} = {one['input']!r}: {message}"
