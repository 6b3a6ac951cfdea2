"""Charts rendered by helm and checked by kubernetes-validate, the CRD schemas and checkov."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

from maskfleet.system.deploy_files import deploy_path
from tools import run_tool, try_tool

Manifest = dict[str, Any]
CRDS = Path(__file__).parent / "crds"
KUBERNETES_VERSIONS = ("1.31", "1.35")
KARPENTER = {
    "NodePool": "karpenter-nodepool-v1.schema.json",
    "EC2NodeClass": "karpenter-ec2nodeclass-v1.schema.json",
}


def rendered(
    chart: str,
    *,
    values: Mapping[str, Any] | None = None,
    release: str = "it",
    namespace: str = "kubeflow",
    crds: bool = False,
    is_live: bool = False,
) -> list[Manifest]:
    """Objects that `helm install` would send; `is_live` with what the cluster of KUBECONFIG has already."""
    flags = (*(["--include-crds"] if crds else []), *(["--dry-run=server"] if is_live else []))
    done = _template(chart, values or {}, release, namespace, *flags)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def refusal(chart: str, *, values: Mapping[str, Any], release: str = "it", namespace: str = "kubeflow") -> str:
    """The error message of helm for values that it must reject."""
    done = _template(chart, values, release, namespace)
    assert done.returncode != 0, f"{chart} accepted {values}"
    return done.stderr


def of_kind(manifests: Iterable[Manifest], kind: str) -> list[Manifest]:
    return [one for one in manifests if one["kind"] == kind]


def kubernetes_complaints(manifests: Iterable[Manifest], folder: Path) -> list[str]:
    """Errors against the strict Kubernetes schemas of the oldest and the newest version that we support."""
    files = _files(manifests, folder)
    complaints = []
    for version in KUBERNETES_VERSIONS:
        done = try_tool("kubernetes-validate", "--strict", "--no-warn", "-k", version, *files)
        if done.returncode != 0:
            complaints.append(f"{version}: {done.stdout}{done.stderr}")
    return complaints


def karpenter_complaints(manifests: Iterable[Manifest]) -> list[str]:
    """Errors against the schemas of Karpenter's v1 API."""
    complaints = []
    for one in manifests:
        schema = json.loads((CRDS / KARPENTER[one["kind"]]).read_text(encoding="utf-8"))
        name = f"{one['kind']}/{one['metadata']['name']}"
        errors = Draft202012Validator(schema).iter_errors(one)
        complaints += [f"{name}: {error.json_path}: {error.message}" for error in errors]
    return complaints


def checkov_findings(target: Path, framework: str, skips: Sequence[str]) -> list[str]:
    """Failed checks for a file or folder, without `skips`; it is an error if checkov checked nothing."""
    command = ["--framework", framework, "--compact", "--quiet", "--skip-download", "-o", "json"]
    command += ["--download-external-modules", "false"]
    command += ["--skip-check", ",".join(skips)] if skips else []
    command += ["-d" if target.is_dir() else "-f", str(target)]
    done = try_tool("checkov", *command)
    report = json.loads(done.stdout)
    assert isinstance(report, dict), report
    assert report["summary"]["parsing_errors"] == 0, report
    assert report["summary"]["passed"] > 0, f"checkov checked nothing: {done.stdout}{done.stderr}"
    failed = report["results"]["failed_checks"]
    return [f"{one['check_id']} {one['resource']}: {one['check_name']}" for one in failed]


def written(manifests: Iterable[Manifest], file: Path) -> Path:
    file.write_text(yaml.safe_dump_all(list(manifests)), encoding="utf-8")
    return file


def lint(chart: str, values: Mapping[str, Any], folder: Path) -> str:
    """Output of `helm lint --strict`, which must pass."""
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(dict(values)), encoding="utf-8")
    return run_tool("helm", "lint", "--strict", deploy_path("helm", chart), "-f", file)


def _template(
    chart: str, values: Mapping[str, Any], release: str, namespace: str, *flags: str
) -> subprocess.CompletedProcess[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        yaml.safe_dump(dict(values), file)
        file.flush()
        return try_tool(
            "helm", "template", release, deploy_path("helm", chart), "-n", namespace, "-f", file.name, *flags
        )


def _files(manifests: Iterable[Manifest], folder: Path) -> list[Path]:
    folder.mkdir(exist_ok=True)
    files = []
    for index, one in enumerate(manifests):
        files.append(folder / f"{index}-{one['kind']}.yaml")
        files[-1].write_text(yaml.safe_dump(one), encoding="utf-8")
    return files
