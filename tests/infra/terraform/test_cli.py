"""`maskfleet infra` as it is typed."""

from __future__ import annotations

import json
import os
import pty
import select
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from maskfleet.cli.main import app
from maskfleet.errors import MaskfleetError

GIVEN = ["--var", "region=us-west-2", "--var", "cluster_name=fleet"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a command on a stage; errors for people are raised."""

    def command(stage: Any, *words: str) -> Any:
        monkeypatch.setattr("maskfleet.infra.stacks.eks", lambda: stage.stack)
        for name, value in stage.env.items():
            monkeypatch.setenv(name, value)
        done = CliRunner().invoke(app, ["infra", *words, "--workdir", str(stage.workdir)])
        if isinstance(done.exception, MaskfleetError):
            raise done.exception
        return done

    return command


def test_plan_exits_with_2_if_requested_and_something_changes(stage: Any, made: Any, run: Any) -> None:
    assert run(stage, "plan", "eks", *GIVEN).exit_code == 0
    assert run(stage, "plan", "eks", "--detailed-exitcode").exit_code == 2
    assert "nothing exists yet" in run(stage, "outputs", "eks").stderr
    done = run(made, "plan", "eks", "--detailed-exitcode")
    assert done.exit_code == 0
    assert "aws: no change" in done.stderr
    assert "addons: no change" in done.stderr


def test_outputs_merge_both_roots_and_mask_secrets(made: Any, run: Any) -> None:
    found = json.loads(run(made, "outputs", "eks", "--json").stdout)
    assert found["cluster_id"] == "fleet"
    assert found["storage"] == "fleet"
    assert found["admin_password"] == "(sensitive)"
    text = run(made, "outputs", "eks").stdout
    assert "cluster_id        fleet\n" in text
    assert "unset" not in text


def test_outputs_give_a_kubeconfig_or_the_command_for_one(made: Any, run: Any, tmp_path: Path) -> None:
    done = run(made, "outputs", "eks", "--kubeconfig", "-")
    assert done.stdout == "aws eks update-kubeconfig --region us-west-2 --name fleet\n"
    file = tmp_path / "kube"
    run(made, "outputs", "eks", "--kubeconfig", str(file))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    user = json.loads(file.read_text())["users"][0]["user"]
    assert user["exec"]["args"] == [
        "--region",
        "us-west-2",
        "eks",
        "get-token",
        "--cluster-name",
        "fleet",
        "--output",
        "json",
    ]
    with pytest.raises(MaskfleetError, match="exists"):
        run(made, "outputs", "eks", "--kubeconfig", str(file))


def test_status_shows_what_exists_and_whether_the_cluster_answers(made: Any, kube_api: Any, run: Any) -> None:
    done = run(made, "status", "eks")
    assert done.exit_code == 0
    assert "fleet, state in this work folder" in done.stdout
    assert "aws: 10 resources" in done.stdout
    assert "up succeeded" in done.stdout
    assert "cluster: answers, v1.35.0" in done.stdout
    root = made.workdir / "deploy/terraform/eks/addons/main.tf"
    root.write_text(f"{root.read_text()}# edited\n")
    done = run(made, "status", "eks", "--json")
    found = json.loads(done.stdout)
    assert [one["settings_changed"] for one in found["roots"]] == [False, True]
    assert found["reachable"] is True


def test_status_after_a_plan_alone_exits_with_1(stage: Any, run: Any) -> None:
    run(stage, "plan", "eks", *GIVEN)
    done = run(stage, "status", "eks")
    assert done.exit_code == 1
    assert "aws: 0 resources, serial 0; no command has changed it from this work folder" in done.stdout
    assert "cluster: not created" in done.stdout


def test_down_can_be_run_twice(made: Any, kube_api: Any, run: Any) -> None:
    with pytest.raises(MaskfleetError, match="not a terminal"):
        run(made, "down", "eks")
    assert run(made, "down", "eks", "--yes").exit_code == 0
    done = run(made, "down", "eks", "--yes")
    assert done.exit_code == 0
    assert "nothing is left to remove" in done.stderr
    assert run(made, "status", "eks").exit_code == 1
    assert "there is no cluster now" in run(made, "outputs", "eks").stderr
    with pytest.raises(MaskfleetError, match="no cluster to reach"):
        run(made, "outputs", "eks", "--kubeconfig", "-")


def test_an_unknown_stack_is_rejected(stage: Any, run: Any) -> None:
    with pytest.raises(MaskfleetError, match="there is no infrastructure 'gke'"):
        run(stage, "plan", "gke")


def test_a_terminal_shows_a_live_table_and_asks(stage: Any, driver: list[str]) -> None:
    shown = on_a_terminal(
        [*driver, "up", "eks", *GIVEN, "--var", "sleep_s=4", "--workdir", str(stage.workdir)],
        stage.env,
        answers={"apply this to aws?": "y\n"},
    )
    assert "resource" in shown
    assert "elapsed" in shown
    assert "running" in shown
    assert "aws: apply: 10/10 done" in shown
    assert "addons: 1 created" in shown
    assert len(stage.read().base.state().resources) == 10


def test_up_changes_nothing_if_the_user_answers_no(stage: Any, driver: list[str]) -> None:
    argv = [*driver, "up", "eks", *GIVEN, "--workdir", str(stage.workdir)]
    shown = on_a_terminal(argv, stage.env, answers={"apply this to aws?": "\n"}, code=2)
    assert "nothing was changed" in shown
    assert stage.read().base.state().resources == ()


def on_a_terminal(argv: list[str], env: dict[str, str], *, answers: dict[str, str], code: int = 0) -> str:
    """What a command shows on a terminal of its own, where each question gets its answer."""
    mine, theirs = pty.openpty()
    size = {"COLUMNS": "100", "LINES": "30", "TERM": "xterm"}
    process = subprocess.Popen(argv, env={**env, **size}, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown, left, end = "", dict(answers), time.monotonic() + 240
    try:
        while time.monotonic() < end:
            ready, _, _ = select.select([mine], [], [], 0.2)
            try:
                chunk = os.read(mine, 65536) if ready else b""
            except OSError:  # the other side is closed
                break
            shown += chunk.decode(errors="replace")
            for question in [one for one in left if one in shown]:
                os.write(mine, left.pop(question).encode())
        assert process.wait(timeout=240) == code, shown
    finally:
        os.close(mine)
        if process.poll() is None:
            process.kill()
            process.wait()
    return shown
