"""What a CloudFormation stack gives to a job: role, network, bucket and file systems, by the names of its outputs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maskfleet.config.base import replaced
from maskfleet.config.launch import SageMakerChannel, SageMakerLaunch
from maskfleet.errors import LaunchError
from maskfleet.launch.sagemaker.services import Services, asking
from maskfleet.system.aws import aws_exceptions, code_of

# Outputs of deploy/cloudformation/sagemaker.yaml.
ROLE, SUBNETS, GROUPS, DATA = "TrainingRoleArn", "Subnets", "SecurityGroups", "DataUri"
HOSTING_ROLE = "HostingRoleArn"
FILE_SYSTEMS = {"efs": "EfsFileSystemId", "fsx": "FsxFileSystemId"}
FSX_MOUNT_NAME = "FsxMountName"
STACK_VARIABLE = "MASKFLEET_STACK"  # set by the stack in the kernel of its notebook instance


@dataclass(frozen=True, slots=True)
class JobStack:
    """A stack of deploy/cloudformation/sagemaker.yaml, as notebooks use it."""

    name: str
    region: str
    data_uri: str  # s3://bucket/prefix: all that jobs may read and write in S3
    file_systems: Mapping[str, str]  # ids by source: efs, fsx

    def source(self, wanted: str) -> str:
        """`wanted`, efs or fsx, if the stack has this file system and it is mounted here; otherwise s3."""
        return wanted if wanted in self.file_systems and _mount_point(wanted).is_dir() else "s3"

    def path(self, source: str, folder: str) -> str:
        """Where this machine finds `folder` of a source: below s3://bucket/prefix, or where the notebook mounts it."""
        if source == "s3":
            return f"{self.data_uri}/{folder}"
        if source not in self.file_systems:
            known = ", ".join(["s3", *self.file_systems])
            raise LaunchError(
                f"stack {self.name} has no {source}", remedy=f"choose one of {known}, or update the stack"
            )
        return str(_mount_point(source) / folder)

    def launch(self, source: str, data: str, *, log: str | None = None, **fields: Any) -> dict[str, Any]:
        """The launch section of a job of this stack that reads the folder `data` of a source.

        With `log`, a job on a file system has its run directory in that folder, which is created if it is missing.
        `fields` are further fields of the section.
        """
        place = self.path(source, data)
        channels: list[dict[str, Any]] = [
            {"name": "train", "source": source, "uri": place if source == "s3" else f"/{data}"}
        ]
        if log is not None and source != "s3":
            Path(self.path(source, log)).mkdir(parents=True, exist_ok=True)
            channels.append({"name": "log", "source": source, "uri": f"/{log}", "read_only": False})
        return {"on": "sagemaker", "stack": self.name, "region": self.region, "channels": channels, **fields}

    def create_trials(self, experiment: str, trials: Iterable[str]) -> dict[str, str]:
        """Create a SageMaker experiment and its trials unless they exist; returns the names of the trials.

        A trial's name is unique in the account, so that it begins with that of the experiment.
        """
        client = Services(self.region).client("sagemaker")
        names = {trial: f"{experiment}-{trial}" for trial in trials}
        permissions = "sagemaker:CreateExperiment and CreateTrial"
        with asking(f"create experiment {experiment}", permissions=permissions):
            _unless_there(client.create_experiment, ExperimentName=experiment)
            for name in names.values():
                _unless_there(client.create_trial, TrialName=name, ExperimentName=experiment)
        return names


def sagemaker_stack(name: str | None = None, *, region: str | None = None) -> JobStack:
    """The stack `name`; None is the stack of this notebook instance."""
    name = name or os.environ.get(STACK_VARIABLE)
    if not name:
        raise LaunchError(
            "no stack is named, and this machine is not the notebook instance of one",
            remedy="give the name that `maskfleet infra up sagemaker` used",
        )
    services = Services(region)
    outputs = outputs_of(services, name)
    if DATA not in outputs:
        raise LaunchError(
            f"stack {name} has no output {DATA}", remedy="name a stack that `maskfleet infra up sagemaker` created"
        )
    systems = {source: outputs[output] for source, output in FILE_SYSTEMS.items() if output in outputs}
    return JobStack(name, services.region, outputs[DATA], systems)


def with_stack(launch: SageMakerLaunch, services: Services) -> SageMakerLaunch:
    """`launch`, completed by the outputs of its stack; what the launch section sets itself wins."""
    if launch.stack is None:
        return launch
    outputs = outputs_of(services, launch.stack)
    changes: dict[str, Any] = {"channels": tuple(_with_file_system(one, outputs) for one in launch.channels)}
    if launch.role_arn is None and ROLE in outputs:
        changes["role_arn"] = outputs[ROLE]
    if not launch.subnets and outputs.keys() >= {SUBNETS, GROUPS}:
        changes["subnets"], changes["security_groups"] = listed(outputs[SUBNETS]), listed(outputs[GROUPS])
    if launch.output_uri is None and DATA in outputs:
        changes["output_uri"] = f"{outputs[DATA]}/output"
    return replaced(launch, changes)


def _with_file_system(channel: SageMakerChannel, outputs: dict[str, str]) -> SageMakerChannel:
    """`channel` on the stack's file system; the mount name of FSx, which SageMaker needs, comes before it."""
    output = FILE_SYSTEMS.get(channel.source, "")
    if channel.file_system_id is not None or output not in outputs:
        return channel
    mount = outputs.get(FSX_MOUNT_NAME) if channel.source == "fsx" else None
    prefix = f"/{mount}" if mount and not f"{channel.uri}/".startswith(f"/{mount}/") else ""
    return replaced(channel, {"file_system_id": outputs[output], "uri": f"{prefix}{channel.uri}"})


def listed(text: str) -> tuple[str, ...]:
    """The ids in an output that lists several."""
    return tuple(text.replace(" ", "").split(","))


def outputs_of(services: Services, name: str) -> dict[str, str]:
    """The outputs of the stack `name`, which must be complete."""
    with asking(f"read stack {name}", permissions="cloudformation:DescribeStacks", service="CloudFormation"):
        try:
            found = services.client("cloudformation").describe_stacks(StackName=name)["Stacks"][0]
        except aws_exceptions() as error:
            if code_of(error) == "ValidationError" and "does not exist" in str(error):
                raise LaunchError(
                    f"there is no stack {name} in {services.region}",
                    remedy="check its name, AWS_PROFILE and the region",
                ) from error
            raise
    status = found["StackStatus"]
    if not status.endswith("_COMPLETE") or "ROLLBACK" in status or status == "DELETE_COMPLETE":
        raise LaunchError(
            f"stack {name} is {status}", remedy="wait until it is complete, or see its events for why it failed"
        )
    return {one["OutputKey"]: one["OutputValue"] for one in found.get("Outputs", [])}


def _mount_point(source: str) -> Path:
    """Where the notebook instance of the stack mounts a file system."""
    return Path.home() / source


def _unless_there(create: Any, **request: str) -> None:
    try:
        create(**request)
    except aws_exceptions() as error:
        # SageMaker answers ValidationException for a name that exists.
        if code_of(error) not in ("ValidationException", "ResourceInUse") or "exist" not in str(error).lower():
            raise
