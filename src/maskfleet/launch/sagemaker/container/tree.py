"""The folder tree through which SageMaker and a training container talk: /opt/ml."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maskfleet.config.load import RUN_FILE
from maskfleet.errors import LaunchError

ROOT = Path("/opt/ml")
MAX_FAILURE_BYTES = 1024  # SageMaker shows no more


@dataclass(frozen=True, slots=True)
class Resources:
    """The hosts of the job, as `resourceconfig.json` lists them."""

    hosts: tuple[str, ...]  # in the same order on every host
    current_host: str
    interface: str | None = None
    instance_type: str | None = None  # without `ml.`

    @property
    def index(self) -> int:
        """The number of this host."""
        return self.hosts.index(self.current_host)


@dataclass(frozen=True, slots=True)
class Tree:
    """Paths of a training container, and what SageMaker wrote there; `root` is /opt/ml except in tests."""

    root: Path = ROOT

    @property
    def model(self) -> Path:
        """What SageMaker uploads at the end, as model.tar.gz."""
        return self.root / "model"

    @property
    def failure(self) -> Path:
        """Why the job failed, for its FailureReason."""
        return self.root / "output" / "failure"

    @property
    def work(self) -> Path:
        """Files of this container that nobody else reads."""
        return self.root / "run"

    @property
    def run_dir(self) -> Path:
        """The run directory: a run to resume from S3, else the channel `log`, else the folder that is copied to S3."""
        log, synchronised = self._channel("log"), self.root / "checkpoints"
        return log if log.is_dir() and not (synchronised / RUN_FILE).exists() else synchronised

    def channel(self, name: str) -> Path:
        """Folder of an input channel."""
        folder = self._channel(name)
        if not folder.is_dir():
            known = sorted(self._read("inputdataconfig.json"))
            raise LaunchError(
                f"the job has no channel {name}: its channels are {', '.join(known) or 'none'}",
                remedy=f"give the job an input channel named {name}",
            )
        return folder

    def hyperparameters(self) -> dict[str, str]:
        """The hyper-parameters as text; SageMaker sends no other type."""
        return {name: str(value) for name, value in self._read("hyperparameters.json").items()}

    def resources(self) -> Resources:
        """The hosts of the job; a job without the file has one host."""
        found = self._read("resourceconfig.json")
        current = str(found.get("current_host", "localhost"))
        hosts = tuple(sorted(map(str, found.get("hosts", [current]))))
        if current not in hosts:
            raise LaunchError(
                f"resourceconfig.json: the host {current} is not one of {', '.join(hosts)}",
                remedy="start the container through SageMaker, or correct the file",
            )
        types = {str(group.get("instance_type")) for group in found.get("instance_groups", [])}
        if len(types) > 1:
            raise LaunchError(
                f"the hosts have different instance types: {', '.join(sorted(types))}",
                remedy="use one instance group: every host runs the same number of ranks",
            )
        kind = found.get("current_instance_type")
        return Resources(
            hosts, current, found.get("network_interface_name"), str(kind).removeprefix("ml.") if kind else None
        )

    def write_failure(self, text: str) -> None:
        """Write why the job failed; beyond SageMaker's limit its beginning and its end, which says what to do."""
        self.failure.parent.mkdir(parents=True, exist_ok=True)
        short = shortened(text.strip(), MAX_FAILURE_BYTES, start=MAX_FAILURE_BYTES // 2)
        self.failure.write_text(short, encoding="utf-8")

    def _channel(self, name: str) -> Path:
        return self.root / "input" / "data" / name

    def _read(self, name: str) -> Mapping[str, Any]:
        path = self.root / "input" / "config" / name
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise LaunchError(f"cannot read {path}: {error}", remedy="it must hold one JSON object") from error
        if not isinstance(content, dict):
            raise LaunchError(f"{path} holds no JSON object", remedy="SageMaker writes one; correct the file")
        return content


def shortened(text: str, space: int, *, start: int) -> str:
    """At most `space` bytes of `text`: up to `start` from its beginning, the others from its end."""
    encoded, between = text.encode(), "\n…\n" if start else ""
    if len(encoded) <= space:
        return text
    first = encoded[:start].decode(errors="ignore") + between
    return first + encoded[len(first.encode()) - space :].decode(errors="ignore")
