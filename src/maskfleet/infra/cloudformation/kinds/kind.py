"""What a kind of stack is: its template, its settings, and what it needs of an account."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from maskfleet.infra.costs import Billed
from maskfleet.system.deploy_files import deploy_path

TAG = "maskfleet"  # on every stack of ours; its value is the kind
NOTEBOOK = "AWS::SageMaker::NotebookInstance"

# Deleting or replacing one of these takes users' data away from the cluster, or stops its export to S3.
DATA = frozenset(
    {
        "AWS::EFS::FileSystem",
        "AWS::FSx::FileSystem",
        "AWS::FSx::DataRepositoryAssociation",
        "AWS::S3::Bucket",
        NOTEBOOK,  # what users keep in ~/SageMaker is on its disk
    }
)


@dataclass(frozen=True, slots=True)
class InstanceNeed:
    """Instances of one type that a stack starts."""

    setting: str  # name of the field, for messages
    type: str
    count: int  # at most
    spot: bool = False
    reserved: bool = False  # in a capacity reservation, which has passed the quota already


@dataclass(frozen=True, slots=True)
class Needs:
    """What a stack needs that an account or a region may lack; empty where nothing is to be checked."""

    instances: tuple[InstanceNeed, ...] = ()
    zone: str | None = None  # None for the first one of the region, or that of the subnets
    vpc: str | None = None
    subnets: Mapping[str, str] = field(default_factory=dict)  # ids by the fields of the settings; all in one zone
    key_name: str | None = None
    bucket: str | None = None
    efs: str | None = None  # an existing file system
    efs_security_group: str | None = None  # of the mount target that it has in the zone


class StackConfig(Protocol):
    """The settings of a stack, read from a YAML file."""

    @property
    def name(self) -> str:
        """Name of the stack."""

    @property
    def region(self) -> str | None:
        """Its region; None uses the AWS configuration."""

    def parameters(self) -> Mapping[str, str]:
        """The template's parameters; those that keep the template's default are left out."""

    def needs(self) -> Needs:
        """What the account and the region must have."""

    def billed(self) -> list[Billed]:
        """What it costs while it exists."""


@dataclass(frozen=True, slots=True)
class StackKind:
    """A kind of stack: which template it uses, how its settings are read, and which outputs other commands need."""

    name: str
    title: str
    template: str
    """File under `deploy/`."""
    read: Callable[[Mapping[str, Any]], StackConfig]
    """The settings in a mapping; raises pydantic's ValidationError."""
    fields: tuple[str, ...]
    """Names of the settings."""
    outputs: tuple[str, ...]
    """Outputs of the template that `maskfleet launch` reads."""

    def template_file(self) -> Path:
        return deploy_path(self.template)
