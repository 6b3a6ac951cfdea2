"""plan and up with the real terraform."""

from __future__ import annotations

import io
import json
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from maskfleet.errors import InfraError
from maskfleet.infra.terraform.plan import plan
from maskfleet.infra.terraform.status import outputs, status
from maskfleet.infra.terraform.up import up
from maskfleet.infra.terraform.variables import VARIABLES_FILE


def test_the_first_plan_lists_every_resource_and_changes_nothing(stage: Any) -> None:
    planned = plan(stage.open())
    shown = stage.shown()
    assert planned[0].has_changes
    assert planned[1] is None
    assert 'terraform_data.subnet["b"]: to create' in shown
    assert "aws: 10 to create" in shown
    assert "addons: planned once aws exists" in shown
    assert stage.read().base.state().resources == ()


def test_up_creates_both_roots_and_passes_outputs_to_the_second(stage: Any) -> None:
    up(stage.open())
    shown = stage.shown()
    assert "aws: 10 created, 0 changed, 0 destroyed" in shown
    assert re.search(r"terraform_data\.cluster: create done after \d+s", shown)
    assert "(10/10)" in shown
    session = stage.read()
    [storage] = session.addons.state().resources
    assert storage.address == "terraform_data.storage"
    assert outputs(session)["storage"] == "fleet"


def test_a_second_up_has_nothing_to_do_and_asks_nothing(made: Any) -> None:
    up(made.open(yes=False))  # nobody could answer
    assert "nothing to do" in made.shown()
    assert [one is None or one.has_changes for one in plan(made.open())] == [False, False]


def test_up_without_a_terminal_changes_nothing(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(Exception, match="not a terminal"):
        up(stage.open(yes=False))
    assert stage.read().base.state().resources == ()


def test_a_setting_of_the_second_root_changes_only_that_root(made: Any) -> None:
    first, second = plan(made.open("addon=two"))
    assert not first.has_changes
    assert second is not None
    assert second.has_changes
    assert "addons: 1 to change" in made.shown()
    up(made.open())  # the setting is remembered
    assert "addons: 0 created, 1 changed, 0 destroyed" in made.shown()


def test_a_wrong_value_of_the_second_root_is_refused_before_the_first_is_created(stage: Any) -> None:
    with pytest.raises(InfraError, match="addon must be short") as caught:
        up(stage.open("addon=much too long"))
    assert "--var NAME=VALUE" in str(caught.value.remedy)
    assert not stage.workdir.joinpath("state", "aws.tfstate").exists()
    up(stage.open("addon=two"))  # the wrong value was not remembered
    assert "addons: 1 created, 0 changed, 0 destroyed" in stage.shown()


def test_a_failure_names_resource_and_cause_and_the_next_up_resumes(stage: Any, tmp_path: Path) -> None:
    missing = tmp_path / "ready"
    with pytest.raises(InfraError) as caught:
        up(stage.open(f"needs_file={missing}"))
    assert "terraform_data.nodes" in caught.value.what
    assert "exit status 1" in caught.value.what
    assert "terraform_data.nodes: create failed" in stage.shown()
    found = status(stage.read())
    assert found.roots[0].tainted == ("terraform_data.nodes",)
    assert "up failed" in found.roots[0].last
    assert not found.is_well
    missing.touch()
    up(stage.open())
    shown = stage.shown()
    assert "replace: terraform_data.nodes (tainted)" in shown
    assert "aws: 1 created, 0 changed, 1 destroyed" in shown
    assert "addons: 1 created" in shown


def test_secrets_are_on_no_command_line_and_in_private_files_only(stage: Any, tmp_path: Path) -> None:
    secret = "correct horse battery"
    file = tmp_path / "secret.json"
    file.write_text(json.dumps({"password": secret}))
    up(stage.open(var_files=(file,)))
    commands = stage.commands()
    assert {command[0] for command in commands} >= {"init", "plan", "apply", "state"}
    assert not [command for command in commands if any("-var" in word or secret in word for word in command)]
    assert secret not in stage.shown()
    work = stage.workdir
    for path in (work / "eks.tfvars.json", work / "deploy/terraform/eks/aws" / VARIABLES_FILE):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert secret in path.read_text()
    assert stat.S_IMODE(work.stat().st_mode) == 0o700
    held = [path for path in work.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in held} == {0o600}
    assert outputs(stage.read())["admin_password"] == "(sensitive)"


def test_the_second_root_gets_only_settings_that_it_declares(made: Any) -> None:
    given = json.loads((made.workdir / "deploy/terraform/eks/addons" / VARIABLES_FILE).read_text())
    assert set(given) == {"cluster_id", "efs_id", "region"}


def test_a_plan_is_saved_and_exactly_that_is_applied(stage: Any) -> None:
    session = stage.open()
    plan(session)
    saved = session.base.plan_file
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    session.base.apply()
    assert not saved.exists()
    assert len(session.base.state().resources) == 10


def test_the_error_about_a_locked_state_says_how_to_unlock_it(stage: Any) -> None:
    session = stage.open()
    session.write_settings()
    session.base.init()
    states = stage.workdir / "state"
    # A lock file as the local backend writes it, held by a real lock on the state.
    import fcntl

    (states / "aws.tfstate").touch()
    lock_info = {"ID": "11111111-2222-3333-4444-555555555555", "Operation": "apply", "Who": "ann@host"}
    (states / ".aws.tfstate.lock.info").write_text(json.dumps(lock_info))
    with (states / "aws.tfstate").open("r+") as held:
        fcntl.lockf(held, fcntl.LOCK_EX)
        with pytest.raises(InfraError) as caught:
            session.base.plan()
    assert "force-unlock 11111111-2222-3333-4444-555555555555" in caught.value.remedy
    assert "state lock" in caught.value.what


def test_the_state_in_a_bucket_is_locked_and_encrypted(stage: Any) -> None:
    session = stage.open(state_bucket="our-states")
    written = json.loads((session.base.folder / "maskfleet_override.tf.json").read_text())
    assert written == {
        "terraform": {
            "backend": {
                "s3": {
                    "bucket": "our-states",
                    "key": "maskfleet/eks/fleet/aws.tfstate",
                    "region": "us-west-2",
                    "encrypt": True,
                    "use_lockfile": True,
                }
            }
        }
    }
    assert "is kept in" not in stage.shown()


def test_a_state_on_this_machine_shows_a_warning(stage: Any) -> None:
    stage.open()
    assert "--state-bucket stores it in S3" in stage.shown()


def test_another_bucket_for_a_state_in_use_is_rejected(made: Any) -> None:
    with pytest.raises(InfraError, match="the state is in this work folder"):
        made.open(state_bucket="our-states")


def test_a_work_folder_serves_one_cluster(made: Any) -> None:
    with pytest.raises(InfraError, match="belongs to the cluster fleet, not to other"):
        made.open("cluster_name=other")


def test_a_plan_that_changes_only_outputs_is_passed_to_the_second_root(made: Any) -> None:
    up(made.open("region=eu-west-1"))
    shown = made.shown()
    assert "aws: no change, outputs: region" in shown
    assert "addons: 1 to change" in shown
    assert outputs(made.read())["region"] == "eu-west-1"


def test_settings_that_would_delete_data_are_rejected_without_delete_data(made: Any) -> None:
    root = made.workdir / "deploy/terraform/eks/aws/main.tf"
    file_system = 'resource "terraform_data" "efs" {'
    root.write_text(root.read_text().replace(file_system, f"{file_system}\n  triggers_replace = var.password"))
    before = {resource.address: resource.id for resource in made.read().base.state().resources}
    with pytest.raises(InfraError, match=r"would delete terraform_data\.efs with all data"):
        up(made.open("password=other"))
    assert "terraform_data.efs (cannot_update), WITH ALL DATA IN IT" in made.shown()
    assert {resource.address: resource.id for resource in made.read().base.state().resources} == before
    up(made.open(), delete_data=True)
    after = {resource.address: resource.id for resource in made.read().base.state().resources}
    assert after["terraform_data.efs"] != before["terraform_data.efs"]
