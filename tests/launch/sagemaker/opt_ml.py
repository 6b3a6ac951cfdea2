"""/opt/ml trees as SageMaker makes them, and hosts that run the `train` program on them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from processes import ENV, LONG_S

from maskfleet.config.base import replaced
from maskfleet.config.recipes import recipe
from micro_run import MICRO

# 12 steps of 2 images over 2 ranks, evaluated once; as text, like all hyper-parameters.
SHORT = {**MICRO, "train.images_per_gpu": 1, "train.epoch_schedule": ((1, 0.1), (2, None))}
LONG = {**SHORT, "train.epoch_schedule": ((12, None),), "eval.every_epochs": 0, "checkpoint.every_epochs": 50}


def hyperparameters(settings: Mapping[str, object] = SHORT) -> dict[str, str]:
    assert replaced(recipe("demo"), settings)
    return {"recipe": "demo"} | {name: json.dumps(value) for name, value in settings.items()}


def opt_ml(
    root: Path,
    data: Path,
    hosts: Sequence[str] = ("algo-1",),
    index: int = 0,
    *,
    settings: Mapping[str, str] | None = None,
    interface: str = "lo",
) -> Path:
    """The tree of host `index`, with the channel `train`."""
    config = root / "input" / "config"
    config.mkdir(parents=True)
    channel = root / "input" / "data" / "train"
    channel.parent.mkdir()
    channel.symlink_to(data)
    resources = {
        "current_host": hosts[index],
        "hosts": list(hosts),
        "current_instance_type": "ml.m5.xlarge",
        "current_group_name": "homogeneousCluster",
        "instance_groups": [
            {"instance_group_name": "homogeneousCluster", "instance_type": "ml.m5.xlarge", "hosts": list(hosts)}
        ],
        "network_interface_name": interface,
    }
    channels = {"train": {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated"}}
    given = dict(settings if settings is not None else hyperparameters())
    for name, content in (("hyperparameters", given), ("resourceconfig", resources), ("inputdataconfig", channels)):
        (config / f"{name}.json").write_text(json.dumps(content))
    return root


class Host:
    """One host of a job; its standard output and error are in files, as CloudWatch gets them."""

    def __init__(self, root: Path, *options: str, inside: Sequence[str] = ()) -> None:
        """Start `train`; `inside` is the command that enters the host's network."""
        self.root = root
        with (root / "stdout").open("wb") as out, (root / "stderr").open("wb") as err:
            self.process = subprocess.Popen(
                [*inside, sys.executable, "-m", "maskfleet", "sagemaker", "train", "--root", str(root), *options],
                env=ENV,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def stdout(self) -> str:
        return (self.root / "stdout").read_text()

    @property
    def printed(self) -> str:
        return self.stdout + (self.root / "stderr").read_text()

    @property
    def failure(self) -> str | None:
        path = self.root / "output" / "failure"
        return path.read_text() if path.exists() else None

    def code(self) -> int:
        return self.process.wait(LONG_S)


def run_job(roots: Sequence[Path], port: int) -> list[Host]:
    """Run a job to its end, which must be a success."""
    hosts = [Host(root, "--port", str(port)) for root in roots]
    codes = [host.code() for host in hosts]
    assert codes == [0] * len(hosts), "\n".join(host.printed for host in hosts)
    assert [host.failure for host in hosts] == [None] * len(hosts)
    return hosts
