"""The command line: its options, exit codes and output, with moto as AWS."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_stack import SMALL
from typer.testing import CliRunner, Result

from maskfleet.cli import infra_stack
from maskfleet.cli.main import app


def infra(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["infra", *arguments], env={"COLUMNS": "200"})


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file for the small stack, which takes the place of `ec2`."""
    monkeypatch.setattr(infra_stack, "_kind", lambda name: SMALL)
    file = tmp_path / "cluster.yaml"
    file.write_text("name: fleet\nregion: us-east-1\n")
    return str(file)


@pytest.mark.slow
@pytest.mark.usefixtures("moto")
def test_a_stack_from_plan_to_down(config: str) -> None:
    assert infra("status", "ec2", "--config", config).exit_code == 1
    planned = infra("plan", "ec2", "--config", config, "--detailed-exitcode")
    assert planned.exit_code == 2, planned.output
    assert "create  Files     AWS::EFS::FileSystem" in planned.output
    assert "USD per hour" in planned.output

    made = infra("up", "ec2", "--config", config, "--yes")
    assert made.exit_code == 0, made.output
    assert "stack fleet in us-east-1 is CREATE_COMPLETE" in made.output
    again = infra("up", "ec2", "--config", config, "--yes")
    assert "nothing to do: the stack matches the settings" in again.output
    assert infra("plan", "ec2", "--config", config, "--detailed-exitcode").exit_code == 0

    # moto gives a stack that a change set created no outputs, which `status` notices.
    shown = infra("status", "ec2", "--config", config, "--json")
    assert shown.exit_code == 1
    found = json.loads(shown.output)
    assert (found["status"], found["resources"]) == ("CREATE_COMPLETE", 3)
    assert found["missing_outputs"] == ["FilesId", "FirstArn"]

    Path(config).write_text("name: fleet\nregion: us-east-1\ntitle: second\n")
    changed = infra("up", "ec2", "--config", config, "--yes")
    assert "stack fleet in us-east-1 is UPDATE_COMPLETE" in changed.output, changed.output

    gone = infra("down", "ec2", "--config", config, "--yes")
    assert gone.exit_code == 0, gone.output
    assert "stack fleet in us-east-1 is deleted" in gone.output
    assert "nothing is left to remove" in infra("down", "ec2", "--config", config, "--yes").output


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("plan", "ec2"), "ec2 needs a file with its settings"),
        (("plan", "ec2", "--config", "no-such.yaml"), "cannot read no-such.yaml"),
        (("up", "ec2", "--config", "x.yaml", "--var", "a=b"), "--var is no option of ec2"),
        (("outputs", "ec2", "--config", "x.yaml", "--kubeconfig", "-"), "--kubeconfig is no option of ec2"),
        (("down", "eks", "--config", "x.yaml"), "--config is no option of eks"),
        (("up", "eks", "--wait", "9"), "--wait is no option of eks"),
        (("plan", "gke"), "there is no infrastructure 'gke'"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments: tuple[str, ...], what: str) -> None:
    done = infra(*arguments)
    assert done.exit_code != 0
    assert what in str(done.exception) + done.output
