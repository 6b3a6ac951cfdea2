"""The notebook chart as rendered by helm, and its containers' commands run on this machine instead of in a pod."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from maskfleet.system.deploy_files import deploy_path
from tools import ROOT, tool, try_tool

CHART = deploy_path("helm", "notebook")
PASSWORD = "correct horse battery"
HASH = "$2b$10$BjjXabIzFgg//QvgNulZoOXW9nfhroPR/.EgvuMMPHQRoYrtfYfVO"
MD5 = "$apr1$oJ2nFGpm$nHwHTAsOx40NRvAsaUke8."
IMAGE = "registry.example/maskfleet@sha256:" + "ab" * 32
GOOD: Mapping[str, Any] = {"image": IMAGE, "htpasswd": HASH}
NOBODY = 65534


def try_render(
    folder: Path, values: Mapping[str, Any], *options: str, name: str = "r50-notebook"
) -> subprocess.CompletedProcess[str]:
    """The result of `helm template` with `values`, which may fail."""
    file = folder / "values.json"
    file.write_text(json.dumps(values), encoding="utf-8")
    return try_tool("helm", "template", name, CHART, "--namespace", "kubeflow", "--values", file, *options)


def render(folder: Path, values: Mapping[str, Any], *options: str, name: str = "r50-notebook") -> list[dict[str, Any]]:
    """The objects that helm renders from valid `values`."""
    done = try_render(folder, values, *options, name=name)
    assert done.returncode == 0, done.stderr
    return [item for item in YAML(typ="safe").load_all(done.stdout) if item]


def one(objects: list[dict[str, Any]], kind: str, name: str | None = None) -> dict[str, Any]:
    """The only object of that kind, and name where it is given."""
    [found] = [item for item in objects if item["kind"] == kind and name in (None, item["metadata"]["name"])]
    return found


def pod_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """The pod that the Deployment makes."""
    spec: dict[str, Any] = one(objects, "Deployment")["spec"]["template"]["spec"]
    return spec


def container(objects: list[dict[str, Any]], name: str) -> dict[str, Any]:
    [found] = [item for item in pod_of(objects)["containers"] if item["name"] == name]
    return found


def lay_out(objects: list[dict[str, Any]], folder: Path, *, owner: int) -> None:
    """Write what the kubelet would mount below `folder`: ConfigMaps, Secrets, and empty folders of `owner`."""
    volumes = {item["name"]: item for item in pod_of(objects)["volumes"]}
    for part in pod_of(objects)["containers"]:
        for mount in part["volumeMounts"]:
            path = Path(mount["mountPath"])
            if not path.is_relative_to(folder):
                continue
            path.mkdir(parents=True, exist_ok=True)
            _fill(path, volumes[mount["name"]], objects, owner)


def _fill(folder: Path, volume: dict[str, Any], objects: list[dict[str, Any]], owner: int) -> None:
    if "configMap" in volume:
        for key, text in one(objects, "ConfigMap", volume["configMap"]["name"])["data"].items():
            (folder / key).write_text(text, encoding="utf-8")
    elif "secret" in volume:
        data = one(objects, "Secret", volume["secret"]["secretName"])["data"]
        for item in volume["secret"]["items"]:
            (folder / item["path"]).write_bytes(base64.b64decode(data[item["key"]]))
    else:
        assert "emptyDir" in volume
        if os.geteuid() == 0:
            os.chown(folder, owner, owner)


def notebook_tool(name: str) -> str:
    """A program of .tools/notebook (JupyterLab, TensorBoard); skips the test with a hint if it is missing."""
    found = shutil.which(name, path=str(ROOT / ".tools" / "notebook" / "bin"))
    if found is None:
        pytest.skip(f"{name} is not installed: make test-tools installs it into .tools/notebook")
    return found


def notebook_command(command: list[str]) -> list[str]:
    """`command` with the path of its program in .tools/notebook.

    `jupyter lab` becomes the program that it executes, jupyter-lab. It searches for that with access(2), which ignores
    the capability that `as_nobody` keeps, so it finds nothing in a checkout that only its owner may enter.
    """
    if command[:2] == ["jupyter", "lab"]:
        return [notebook_tool("jupyter-lab"), *command[2:]]
    return [notebook_tool(command[0]), *command[1:]]


def as_nobody(command: list[str]) -> list[str]:
    """`command` as user nobody, with one capability: to read everything, since Python may be in root's home folder."""
    if os.geteuid() != 0:
        return command
    capability = "+dac_read_search"
    start = [tool("setpriv"), f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    return [*start, f"--inh-caps=-all,{capability}", f"--ambient-caps={capability}", *command]
