"""A run that continues after everything was killed, started by the real cron as after a boot."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from workshop import ENV, Workshop

from maskfleet.launch.supervise.job_files import JobFolder
from maskfleet.launch.supervise.processes import job_id, processes_of
from maskfleet.training.output.metrics import read_metrics

OTHERS = "# my own table\n@reboot touch other-job-ran\n"
# A machine with its own crontabs, and nothing else for cron to run.
MACHINE = """
mount --bind "$1/spool" /var/spool/cron/crontabs && mount -t tmpfs tmpfs /etc/cron.d &&
mount --bind "$1/empty" /etc/crontab && mount --bind "$1/passwd" /etc/passwd && mount -t tmpfs tmpfs /run &&
shift && exec "$@"
"""


def until(condition: Callable[[], object], timeout_s: float = 240) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.1)


@pytest.fixture
def machine(tmp_path: Path) -> list[str]:
    """Runs a command on a machine where root's home directory is TMP_PATH/home."""
    if os.getuid() != 0 or shutil.which("cron") is None:
        pytest.skip("NOT TESTED: a reboot: needs root and the Debian package cron")
    for name in ("spool", "home", "empty"):
        (tmp_path / name).mkdir() if name != "empty" else (tmp_path / name).touch()
    shutil.chown(tmp_path / "spool", "root", "crontab")
    (tmp_path / "spool").chmod(0o1730)
    users = [line for line in Path("/etc/passwd").read_text().splitlines() if not line.startswith("root:")]
    (tmp_path / "passwd").write_text("\n".join([f"root:x:0:0:root:{tmp_path / 'home'}:/bin/sh", *users, ""]))
    return ["unshare", "--mount", "sh", "-c", MACHINE, "sh", str(tmp_path)]


@pytest.mark.slow
def test_after_a_reboot_cron_continues_the_run_and_its_line_is_removed_at_the_end(
    workshop: Workshop, machine: list[str]
) -> None:
    env = {**ENV, "HOME": str(workshop.folder / "home")}
    subprocess.run([*machine, "crontab", "-"], input=OTHERS, text=True, env=env, check=True)
    short = ["-s", "train.epoch_schedule=[[60, null]]", "-s", "eval.every_epochs=0", "--detach", "--persist"]
    command = [sys.executable, "-m", "maskfleet", "launch", "-c", str(workshop.run_file), "--name", "a", *short]
    done = subprocess.run(
        [*machine, *command], capture_output=True, text=True, cwd=workshop.folder, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    run_dir, table = workshop.folder / "runs" / "a", workshop.folder / "spool" / "root"
    until(lambda: any(record["step"] >= 10 for record in read_metrics(run_dir)))
    assert "@reboot line of the crontab" in str(workshop.status(done.stdout.strip())["persist"])
    beat = JobFolder(run_dir).heartbeat(0)
    assert beat is not None
    for pid in (beat.pid, *processes_of(job_id(run_dir))):  # power failure
        os.kill(pid, signal.SIGKILL)
    until(lambda: not processes_of(job_id(run_dir)))
    stopped_at = read_metrics(run_dir)[-1]["step"]
    minimal = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    cron = subprocess.Popen([*machine, "cron", "-f"], env=minimal, cwd="/", start_new_session=True)
    try:
        until(lambda: JobFolder(run_dir).outcome() is not None)
        until(lambda: "maskfleet" not in table.read_text())
    finally:
        os.killpg(cron.pid, signal.SIGKILL)
        cron.wait()
    outcome = JobFolder(run_dir).outcome()
    assert outcome is not None
    assert outcome.state == "done"
    assert read_metrics(run_dir)[-1]["step"] == 360 > stopped_at
    assert table.read_text().endswith(OTHERS)
    assert (workshop.folder / "home" / "other-job-ran").exists(), "cron really ran the table"
    assert not list((workshop.folder / "home").rglob("maskfleet-*"))
    until(lambda: workshop.status(done.stdout.strip())["persist"] == "")
