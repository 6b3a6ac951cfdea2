"""Shared by tests of the AWS root: its provider, working copies, and moto as AWS."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from maskfleet.system.deploy_files import deploy_path
from tools import run_tool

ROOT = deploy_path("terraform", "eks", "aws")
OPERATOR_POLICY = ROOT.parent / "operator-policy.json"
FOLDERS = ("~/.terraform.d/plugins", "/usr/share/terraform/plugins", "/usr/local/share/terraform/plugins")
PARENTS = ("/opt", "/usr/local/lib", "/usr/lib")


def provider_mirror() -> Path:
    """A mirror folder with the AWS provider; skips the test with the folders searched if there is none."""
    for folder in _candidates():
        if any(folder.glob("registry.terraform.io/hashicorp/aws/*/*/terraform-provider-aws*")):
            return folder
    searched = ", ".join(("TF_PLUGIN_MIRROR", *FOLDERS, *(f"{parent}/*" for parent in PARENTS)))
    pytest.skip(f"the AWS provider of Terraform is not installed: searched {searched}")


def _candidates() -> Iterator[Path]:
    if "TF_PLUGIN_MIRROR" in os.environ:
        yield Path(os.environ["TF_PLUGIN_MIRROR"])
    yield from (Path(folder).expanduser() for folder in FOLDERS)
    for parent in map(Path, PARENTS):
        yield from sorted(parent.iterdir()) if parent.is_dir() else ()


def operator_policy(cluster: str = "fleet") -> str:
    """The operator's policy with its placeholders filled in."""
    text = OPERATOR_POLICY.read_text(encoding="utf-8")
    names = {"STATE-BUCKET": "my-state", "BUCKET": "my-bucket", "PREFIX": "ml-platform"}
    for word, value in {**names, "REGION": "us-west-2", "ACCOUNT": "111122223333", "CLUSTER": cluster}.items():
        text = text.replace(word, value)
    return text


def environment(folder: Path, mirror: Path) -> dict[str, str]:
    """Environment in which Terraform takes providers from `mirror` alone and asks no questions."""
    config = folder / "terraform.rc"
    config.write_text(f'provider_installation {{\n  filesystem_mirror {{\n    path = "{mirror}"\n  }}\n}}\n')
    return {
        "TF_CLI_CONFIG_FILE": str(config),
        "TF_IN_AUTOMATION": "1",
        "TF_INPUT": "0",
        "CHECKPOINT_DISABLE": "1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def ready_copy(folder: Path) -> tuple[Path, dict[str, str]]:
    """A copy of the root with its provider in place and state on disk, and the variables to run Terraform with."""
    given = environment(folder, provider_mirror())
    copy = folder / "aws"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".terraform*", "*.tfstate*"))
    (copy / "backend_override.tf").write_text('terraform {\n  backend "local" {}\n}\n', encoding="utf-8")
    run_tool("terraform", "init", "-no-color", cwd=copy, **given)
    return copy, given
