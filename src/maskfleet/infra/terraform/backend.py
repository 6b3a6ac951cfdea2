"""Where Terraform stores its state: S3 with a lock and encryption, or the work folder."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from maskfleet.errors import InfraError
from maskfleet.infra.terraform.root import MINIMUM_FOR_S3_LOCK, Program
from maskfleet.system.files import read_json, write_private_json

# Terraform merges files with this ending over the others, so this one overrides a backend in the root itself.
OVERRIDE_FILE = "maskfleet_override.tf.json"


@dataclass(frozen=True, slots=True)
class StateBackend:
    """An S3 bucket for states; without a bucket, the work folder."""

    bucket: str | None = None
    region: str | None = None
    prefix: str = ""
    lock_table: str | None = None

    @property
    def text(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}" if self.bucket else "this work folder"

    def block(self, root: str, folder: Path, states: Path) -> dict[str, Any]:
        """Terraform's backend block for the root in `folder`."""
        if self.bucket is None:
            return {"local": {"path": os.path.relpath(states / f"{root}.tfstate", folder)}}
        lock: dict[str, Any] = {"dynamodb_table": self.lock_table} if self.lock_table else {"use_lockfile": True}
        key = f"{self.prefix}/{root}.tfstate"
        return {"s3": {"bucket": self.bucket, "key": key, "region": self.region, "encrypt": True, **lock}}


def backend_from(
    file: Path, *, bucket: str | None, region: str | None, cluster: str | None, lock_table: str | None, stack: str
) -> StateBackend:
    """The backend that the options name; without any, the one used before; else the work folder."""
    before = StateBackend(**read_json(file))
    if bucket is None or (before.bucket == bucket and lock_table in (None, before.lock_table)):
        return before
    if region is None or cluster is None:
        raise InfraError(
            "--state-bucket needs the region and the name of the cluster, which are part of the state's key",
            remedy="add --var region=… and --var cluster_name=…",
        )
    return StateBackend(bucket, region, f"maskfleet/{stack}/{cluster}", lock_table)


def check_change(file: Path, wanted: StateBackend, *, in_use: bool) -> None:
    """Raise an error if changing the backend would leave a state behind."""
    before = StateBackend(**read_json(file))
    if file.exists() and before != wanted and in_use:
        raise InfraError(
            f"the state is in {before.text}, but {wanted.text} was requested",
            remedy="keep --state-bucket as it was, or use another --workdir for another cluster",
        )


def write_backend(
    file: Path, wanted: StateBackend, *, folders: dict[str, Path], states: Path, program: Program
) -> None:
    """Make every root in `folders` (by name) store its state in `wanted`."""
    if wanted.bucket and not wanted.lock_table and program.version < MINIMUM_FOR_S3_LOCK:
        raise InfraError(
            f"Terraform {'.'.join(map(str, program.version))} cannot lock a state in S3 by itself",
            remedy="install Terraform 1.10 or newer, or give a DynamoDB table with --state-lock-table",
        )
    states.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, folder in folders.items():
        write_private_json(folder / OVERRIDE_FILE, {"terraform": {"backend": wanted.block(name, folder, states)}})
    write_private_json(file, asdict(wanted))
