"""Helm's record of a release: its status and values, kept after the release was uninstalled."""

from __future__ import annotations

import base64
import binascii
import gzip
import json
from dataclasses import dataclass
from typing import Any

from maskfleet.errors import LaunchError
from maskfleet.launch.eks.permission import if_permitted
from maskfleet.system.kube.client import Json, Kube

CHART = "train"


@dataclass(frozen=True, slots=True)
class ReleaseRecord:
    """The newest revision of a release."""

    status: str  # deployed, uninstalled, failed, pending-install, …
    description: str
    chart: str
    values: Json  # the chart's defaults with the user's values

    @property
    def is_removed(self) -> bool:
        return self.status == "uninstalled"


@dataclass(frozen=True, slots=True)
class RunStorage:
    """The volume that holds the files of a run, and an image that can read them."""

    mount: str  # /fsx
    claim: str
    folder: str  # run directory, relative to the mount
    image: str
    pull_secrets: tuple[str, ...] = ()


def record_of(kube: Kube, release: str) -> ReleaseRecord | None:
    """The newest record of `release`; None if there is none, or without permission to read it."""
    secrets = if_permitted(kube.items, kube.of_namespace("secrets"), labelSelector=f"owner=helm,name={release}")
    if not secrets:
        return None
    newest = max(secrets, key=lambda one: int(one["metadata"]["labels"].get("version", "0")))
    return read_record(newest)


def read_record(secret: Json) -> ReleaseRecord:
    """The record that helm encoded in `secret`."""
    try:
        packed = base64.b64decode(base64.b64decode(secret["data"]["release"]))
        data = json.loads(gzip.decompress(packed) if packed[:2] == b"\x1f\x8b" else packed)
        info, chart = data["info"], data["chart"]
        values = _merged(chart.get("values") or {}, data.get("config") or {})
        return ReleaseRecord(info["status"], info.get("description", ""), chart["metadata"]["name"], values)
    except (KeyError, ValueError, TypeError, OSError, binascii.Error) as error:
        raise LaunchError(
            f"helm's record {secret.get('metadata', {}).get('name')} cannot be read: {error}",
            remedy="see `helm history RELEASE`; another version of helm may have written it",
        ) from error


def storage_of(record: ReleaseRecord | None, release: str) -> RunStorage:
    """Where the run of `release` stores its files, according to its values."""
    values = record.values if record is not None else {}
    if record is None or not values.get("shared_pvc") or not values.get("shared_fs") or not values.get("image"):
        raise LaunchError(
            f"helm knows no release {release} that trains, so the location of its files is unknown",
            remedy="check the handle; if helm's record was removed, `maskfleet launch` the same run under the same "
            "name, which resumes in the same folder",
        )
    secrets = values.get("image_pull_secrets") or []
    names = tuple(str(one["name"] if isinstance(one, dict) else one) for one in secrets)
    folder = f"{values.get('log_dir') or 'logs'}/{values.get('run_id') or release}"
    return RunStorage(f"/{values['shared_fs']}", values["shared_pvc"], folder, values["image"], names)


def _merged(base: Json, changes: Json) -> Json:
    """Merge as helm does: null removes a value."""
    result: dict[str, Any] = dict(base)
    for name, value in changes.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, dict) and isinstance(result.get(name), dict):
            result[name] = _merged(result[name], value)
        else:
            result[name] = value
    return result
