"""The work folder and its settings: nothing of the user's is overwritten, nothing is silently ignored."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from maskfleet.errors import ConfigError, InfraError
from maskfleet.infra.terraform.root import Program, find_terraform
from maskfleet.infra.terraform.variables import (
    declared,
    from_options,
    outputs_declared,
    parse_value,
    read_var_file,
    required,
)
from maskfleet.infra.workdir import WorkFolder
from tools import tool

MAIN = "terraform/eks/aws/main.tf"


@pytest.fixture
def folder(stage: Any) -> WorkFolder:
    work = WorkFolder(stage.workdir, stage.stack)
    work.refresh(lambda text: None)
    return work


def refresh(folder: WorkFolder, **more: Any) -> list[str]:
    said: list[str] = []
    folder.refresh(said.append, **more)
    return said


def test_new_shipped_files_are_copied_and_old_ones_removed(folder: WorkFolder, stage: Any) -> None:
    shipped = stage.stack.deploy
    (shipped / MAIN).write_text("# new\n")
    (shipped / "terraform/eks/aws/more.tf").write_text("# more\n")
    (shipped / "helm/storage/Chart.yaml").unlink()
    (shipped / "terraform/eks/aws/.terraform").mkdir()
    (shipped / "terraform/eks/aws/.terraform/cache.tf").write_text("x")
    (shipped / "terraform/eks/aws/terraform.tfstate").write_text("{}")
    assert refresh(folder) == []
    copy = folder.path / "deploy"
    assert (copy / MAIN).read_text() == "# new\n"
    assert (copy / "terraform/eks/aws/more.tf").exists()
    assert not (copy / "helm/storage/Chart.yaml").exists()
    assert not (copy / "terraform/eks/aws/.terraform").exists()
    assert not (copy / "terraform/eks/aws/terraform.tfstate").exists()


def test_an_edited_file_is_kept_with_a_message(folder: WorkFolder) -> None:
    mine = folder.path / "deploy" / MAIN
    mine.write_text("# mine\n")
    own = mine.with_name("own.tf")
    own.write_text("# a file of my own\n")
    [said] = refresh(folder)
    assert str(mine) in said
    assert "differs from ours" in said
    assert mine.read_text() == "# mine\n"
    assert own.exists()


def test_a_file_changed_on_both_sides_is_an_error_without_take_ours(folder: WorkFolder, stage: Any) -> None:
    mine = folder.path / "deploy" / MAIN
    mine.write_text("# mine\n")
    (stage.stack.deploy / MAIN).write_text("# theirs\n")
    with pytest.raises(InfraError, match=r"you edited terraform/eks/aws/main\.tf") as caught:
        refresh(folder)
    assert "--take-ours" in caught.value.remedy
    assert mine.read_text() == "# mine\n"
    [said] = refresh(folder, take_ours=True)
    assert "main.tf.yours" in said
    assert mine.read_text() == "# theirs\n"
    assert mine.with_name("main.tf.yours").read_text() == "# mine\n"
    assert refresh(folder) == []


def test_a_new_shipped_file_does_not_overwrite_a_file_of_the_user(folder: WorkFolder, stage: Any) -> None:
    mine = folder.path / "deploy/terraform/eks/aws/extra.tf"
    mine.write_text("# mine\n")
    (stage.stack.deploy / "terraform/eks/aws/extra.tf").write_text("# ours\n")
    with pytest.raises(InfraError, match=r"extra\.tf"):
        refresh(folder)
    assert mine.read_text() == "# mine\n"


def test_the_lock_file_that_init_writes_does_not_count_as_edited(folder: WorkFolder, stage: Any) -> None:
    (stage.stack.deploy / "terraform/eks/aws/.terraform.lock.hcl").write_text("# one\n")
    refresh(folder)
    (folder.path / "deploy/terraform/eks/aws/.terraform.lock.hcl").write_text("# one and more\n")
    assert refresh(folder) == []


def test_only_the_owner_can_read_the_work_folder(folder: WorkFolder) -> None:
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1.30", "1.30"),
        ("true", "true"),
        ("a=b", "a=b"),
        ("", ""),
        ('["a", "b"]', ["a", "b"]),
        ('{"team": "x"}', {"team": "x"}),
        ('"[quoted"', "[quoted"),
        ("null", None),
    ],
)
def test_values_from_the_command_line_are_strings_or_json(text: str, value: Any) -> None:
    assert parse_value("x", text) == value


@pytest.mark.parametrize("text", ["name", "=x", "bad name=x", "azs=[a, b]"])
def test_a_bad_assignment_is_rejected_without_showing_its_value(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_options([text], [], Program("terraform", (1, 11), {}))
    assert "--var" in caught.value.what + caught.value.remedy


def test_a_tfvars_file_is_read_as_terraform_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "x.tfvars"
    file.write_text(
        'azs = ["a", "b"] # two\ncluster_name = "a\\"b"\ntags = {\n  team = "x"\n  "z" = 1\n}\n'
        "note = <<EOT\nhidden = 3\nEOT\ncount_ = 3\n"
    )
    env = {**os.environ, "TF_CLI_CONFIG_FILE": os.devnull}
    found = read_var_file(file, Program(tool("terraform"), (1, 11), env))
    assert found == {
        "azs": ["a", "b"],
        "cluster_name": 'a"b',
        "tags": {"team": "x", "z": 1},
        "note": "hidden = 3\n",
        "count_": 3,
    }
    file.write_text("azs = [\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_var_file(file, Program(tool("terraform"), (1, 11), env))


@pytest.mark.parametrize(("text", "problem"), [("{", "is not JSON"), ("[1]", "is not an object of names")])
def test_a_bad_json_file_is_rejected(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_var_file(file, Program("terraform", (1, 11), {}))


def test_an_unknown_setting_is_rejected_with_the_nearest_name(stage: Any) -> None:
    with pytest.raises(ConfigError, match="there is no variable cluster_nam") as caught:
        stage.open("cluster_nam=x")
    assert "did you mean cluster_name?" in caught.value.remedy


def test_settings_are_remembered_and_null_removes_them(stage: Any) -> None:
    stage.open("password=one", 'azs=["a", "b", "c"]')
    again = stage.open()
    assert (again.settings["password"], again.settings["azs"]) == ("one", ["a", "b", "c"])
    assert "password" not in stage.open("password=null").settings
    assert "password" not in json.loads((stage.workdir / "eks.tfvars.json").read_text())


def test_variables_and_outputs_of_a_root_are_found(stage: Any) -> None:
    root = stage.stack.deploy / "terraform/eks"
    assert required(root / "aws") == {"region", "cluster_name"}
    assert declared(root / "addons") == {"cluster_id", "efs_id", "addon", "region"}
    assert {"cluster_id", "admin_password"} <= outputs_declared(root / "aws")


def test_a_missing_terraform_is_an_error_that_names_the_version_to_install(tmp_path: Path) -> None:
    with pytest.raises(InfraError, match="terraform is not installed here") as caught:
        find_terraform({"PATH": str(tmp_path)})
    assert "1.5.0 or newer" in caught.value.remedy


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ('echo \'{"terraform_version": "1.4.6"}\'', r"is Terraform 1\.4\.6; 1\.5\.0 is needed"),
        ("echo nonsense", "does not print its version"),
        ("exit 1", "does not print its version"),
    ],
)
def test_a_terraform_that_is_too_old_or_prints_no_version_is_rejected(
    tmp_path: Path, answer: str, problem: str
) -> None:
    program = tmp_path / "terraform"
    program.write_text(f"#!/bin/sh\n{answer}\n")
    program.chmod(0o700)
    with pytest.raises(InfraError, match=problem):
        find_terraform({"PATH": f"{tmp_path}:/usr/bin:/bin"})


def test_a_prerelease_counts_as_its_release(tmp_path: Path) -> None:
    program = tmp_path / "terraform"
    program.write_text('#!/bin/sh\necho \'{"terraform_version": "1.12.0-beta1"}\'\n')
    program.chmod(0o700)
    assert find_terraform({"PATH": str(tmp_path)}).version == (1, 12, 0)


def test_an_old_terraform_needs_a_dynamodb_table_to_lock_a_state_in_s3(
    stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Program(tool("terraform"), (1, 9, 0), {})
    monkeypatch.setattr("maskfleet.infra.terraform.session.find_terraform", lambda env: old)
    with pytest.raises(InfraError, match="cannot lock a state in S3"):
        stage.open(state_bucket="our-states")
    session = stage.open(state_bucket="our-states", state_lock_table="locks")
    written = json.loads((session.base.folder / "maskfleet_override.tf.json").read_text())
    assert written["terraform"]["backend"]["s3"]["dynamodb_table"] == "locks"


def test_a_folder_that_is_no_work_folder_is_an_error(stage: Any) -> None:
    with pytest.raises(InfraError, match="is not a work folder"):
        stage.read()
    assert not stage.workdir.exists()
