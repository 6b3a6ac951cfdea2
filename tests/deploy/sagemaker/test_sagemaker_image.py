"""The SageMaker image: linters for its Dockerfile, and the programs that SageMaker starts."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from maskfleet.system.deploy_files import deploy_path
from tools import run_tool

FOLDER = deploy_path("docker", "sagemaker")


def test_hadolint_finds_nothing_in_the_sagemaker_image() -> None:
    assert run_tool("hadolint", FOLDER / "Dockerfile") == ""


def test_the_image_asks_nvidias_container_runtime_for_all_gpus() -> None:
    """Without the variable the runtime gives a container none. The train image has it not: any pod would get them."""
    variables = ("NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=compute,utility")
    text = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
    assert all(variable in text for variable in variables)
    assert "NVIDIA_" not in deploy_path("docker", "train", "Dockerfile").read_text(encoding="utf-8")


@pytest.mark.slow
def test_checkov_finds_nothing_in_the_sagemaker_image() -> None:
    options = ["--framework", "dockerfile", "--skip-download", "--output", "json", "--compact"]
    report = json.loads(run_tool("checkov", "--file", FOLDER / "Dockerfile", *options))
    assert report["results"]["failed_checks"] == []
    skipped = {check["check_id"] for check in report["results"]["skipped_checks"]}
    assert skipped <= {"CKV_DOCKER_7", "CKV_DOCKER_8"}


@pytest.mark.parametrize(("program", "arguments"), [("train", "sagemaker train"), ("serve", "sagemaker serve")])
def test_the_programs_start_ours(tmp_path: Path, program: str, arguments: str) -> None:
    fake = tmp_path / "maskfleet"
    fake.write_text('#!/bin/sh\necho "$@"\n')
    fake.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run([FOLDER / program], env={"PATH": path}, capture_output=True, text=True, check=True)
    assert ran.stdout.startswith(arguments)
