"""Runs over three hosts."""

from __future__ import annotations

from pathlib import Path

from client import Client, run_dir_of
from processes import losses


def test_the_same_run_has_the_same_losses_under_local_ssh_and_mpirun(client: Client, tmp_path: Path) -> None:
    by_torchrun = client.launched("--name", "by-torchrun")
    output = client.finish(by_torchrun)
    assert "3 ranks on CPU" in output
    by_mpirun = client.launched("--name", "by-mpirun", "--with", "mpirun")
    output = client.finish(by_mpirun)
    assert "3 ranks on CPU" in output
    local = client("launch", "-c", str(client.run_file), "--name", "here", "--ranks", "3")
    assert local.returncode == 0, local.stdout + local.stderr
    here = run_dir_of(local.stdout.splitlines()[0])
    assert len(losses(here)) == 12 + 2
    assert losses(run_dir_of(by_torchrun)) == losses(here)
    assert losses(run_dir_of(by_mpirun)) == losses(here)
