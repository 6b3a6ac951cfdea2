"""Helm's record of a release: its status and values, kept after the release was uninstalled.

A namespace holds releases of other people and of other charts. Only a release whose chart and label say that
maskfleet installed it may be removed or replaced.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import json
import re
from dataclasses import dataclass
from typing import Any

from maskfleet.errors import LaunchError
from maskfleet.launch.eks.permission import if_permitted
from maskfleet.system.kube.client import Json, Kube

CHART = "train"
LABEL, OURS = "app.kubernetes.io/part-of", "maskfleet"
_LABELLED = re.compile(rf"^\s+{re.escape(LABEL)}: [\"']?{OURS}[\"']?\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ReleaseRecord:
    """The newest revision of a release."""

    status: str  # deployed, uninstalled, failed, pending-install, …
    description: str
    chart: str
    values: Json  # the chart's defaults with the user's values
    is_labelled: bool  # whether its objects have the label of maskfleet

    @property
    def is_removed(self) -> bool:
        return self.status == "uninstalled"

    def is_of(self, chart: str) -> bool:
        """Whether maskfleet installed it from its own chart of this name."""
        return self.chart == chart and self.is_labelled


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
        is_labelled = _LABELLED.search(data.get("manifest") or "") is not None
        return ReleaseRecord(
            info["status"], info.get("description", ""), chart["metadata"]["name"], values, is_labelled
        )
    except (KeyError, ValueError, TypeError, OSError, binascii.Error) as error:
        raise LaunchError(
            f"helm's record {secret.get('metadata', {}).get('name')} cannot be read: {error}",
            remedy="see `helm history RELEASE`; another version of helm may have written it",
        ) from error


def refuse_strangers(record: ReleaseRecord | None, thing: Json | None, chart: str, release: str) -> None:
    """Raise unless helm's record of `release`, and the object that has its name, are those of our `chart`."""
    if record is not None and not record.is_of(chart):
        raise LaunchError(
            f"the helm release {release} is not maskfleet's: it belongs to the chart {record.chart}",
            remedy="choose another name; `helm list --all` shows the names in use in the namespace",
        )
    if thing is not None and thing["metadata"].get("labels", {}).get(LABEL) != OURS:
        raise LaunchError(
            f"the {thing.get('kind') or 'object'} {release} is not maskfleet's: it lacks the label {LABEL}={OURS}",
            remedy="choose another name, or ask its owner to remove it",
        )


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
