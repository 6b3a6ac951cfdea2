"""`--persist`: what is installed for a run, and that nothing else is touched."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from maskfleet.config.launch import LocalLaunch, SshLaunch
from maskfleet.config.recipes import recipe
from maskfleet.errors import LaunchError, MaskfleetError
from maskfleet.launch.job import job_for
from maskfleet.launch.local.backend import LocalBackend
from maskfleet.launch.persist import cron, systemd
from maskfleet.launch.persist.install import Boot, install, remove, resume, resume_script
from maskfleet.launch.ssh.backend import SshBackend
from maskfleet.launch.supervise.job_files import Host, Job, JobFolder
from maskfleet.launch.supervise.status import main, status_of
from maskfleet.system.process import Finished

OTHERS = "# my own table\nMAILTO=me\n0 3 * * * backup 100\\% # nightly\n@reboot sh other.sh # maskfleet-other-0\n"
NASTY = "a b'\"$(touch harm)`touch harm`;%h%%\n&"


@dataclass
class Account:
    """A user's crontab, systemd manager and login, as their commands show them."""

    table: str | None = None  # None: no crontab
    has_cron: bool = True
    has_manager: bool = False
    linger: bool = False
    units: list[list[str]] = field(default_factory=list)

    def __call__(self, argv: Sequence[str], stdin: str = "", *, timeout_s: float = 60) -> Finished:
        match list(argv):
            case ["crontab", *_] if not self.has_cron:
                raise MaskfleetError("crontab is not installed here", remedy="install crontab")
            case ["crontab", "-l"]:
                return Finished(0, self.table) if self.table is not None else Finished(1, "", "no crontab for me")
            case ["crontab", "-"]:
                self.table = stdin
            case ["crontab", "-r"]:
                self.table = None
            case ["systemctl", "--user", *rest]:
                self.units.append(rest)
                return Finished(0 if self.has_manager else 1)
            case ["loginctl", *_]:
                return Finished(0, "yes\n" if self.linger else "no\n")
            case other:
                raise AssertionError(other)
        return Finished(0)

    def detach(self, *arguments: object, **options: object) -> None:
        raise AssertionError("nothing is detached")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = JobFolder(tmp_path / "runs" / "a")
    folder.path.mkdir(parents=True)
    (folder.path / "job.json").write_text(Job("a", "torchrun", (Host("node1", 1),), 1, 0, 0, "/").to_json())
    return folder.run_dir


def boot_of(account: Account, tmp_path: Path) -> Boot:
    return Boot(tmp_path / "home", "me", account)


@pytest.mark.parametrize("table", [None, "", OTHERS, OTHERS.rstrip("\n")])
def test_cron_gets_one_line_and_keeps_the_others(table: str | None, run_dir: Path, tmp_path: Path) -> None:
    account = Account(table)
    boot = boot_of(account, tmp_path)
    for _ in range(2):
        assert install(run_dir, 0, boot=boot, env={}).kind == "cron"
    assert account.table is not None
    added = account.table.removeprefix(table or "").strip()
    assert added.startswith('@reboot sh "$HOME"/.local/state/maskfleet/maskfleet-')
    assert "\n" not in added
    assert status_of(run_dir).persist.startswith("an @reboot line of the crontab")
    remove(run_dir, 0, boot=boot)
    assert (account.table or "").rstrip("\n") == (table or "").rstrip("\n")
    assert status_of(run_dir).persist == ""
    assert [path.name for path in (tmp_path / "home" / ".local/state/maskfleet").iterdir()] == ["lock"]
    remove(run_dir, 0, boot=boot)  # there is nothing left


def test_a_lingering_user_gets_a_systemd_unit(run_dir: Path, tmp_path: Path) -> None:
    account = Account(OTHERS, has_manager=True, linger=True)
    boot = boot_of(account, tmp_path)
    assert str(install(run_dir, 0, boot=boot, env={})) == "a systemd user unit"
    (unit,) = (tmp_path / "home/.config/systemd/user").glob("*.service")
    assert ["enable", "--", unit.name] in account.units
    remove(run_dir, 0, boot=boot)
    assert not unit.exists()
    assert account.table == OTHERS


@pytest.mark.parametrize(("has_cron", "kind", "note"), [(True, "cron", ""), (False, "systemd", "enable-linger")])
def test_without_lingering_cron_is_better(has_cron: bool, kind: str, note: str, run_dir: Path, tmp_path: Path) -> None:
    account = Account(has_manager=True, has_cron=has_cron)
    done = install(run_dir, 0, boot=boot_of(account, tmp_path), env={})
    assert done.kind == kind
    assert note in done.note


def test_a_host_with_neither_is_an_error(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="neither a systemd user manager nor cron"):
        install(run_dir, 0, boot=boot_of(Account(has_cron=False), tmp_path), env={})


def test_the_script_survives_any_value_and_holds_no_secret(tmp_path: Path) -> None:
    env = {
        "PATH": NASTY,
        "CUDA_X": NASTY,
        "AWS_SECRET_ACCESS_KEY": "s3cret",
        "CUDA_$(touch harm)": "x",
        "HOME": "/root",
    }
    script = resume_script(tmp_path / NASTY, 3, env)
    assert "s3cret" not in script
    printing = script.replace("exec ", "printf '%s\\0' ")
    done = subprocess.run(
        ["/bin/sh", "-c", printing + '/usr/bin/printf "%s" "$CUDA_X"'], capture_output=True, cwd=tmp_path, check=True
    )
    *argv, variable = done.stdout.decode().split("\0")
    assert argv[-4:-1] == [str(tmp_path / NASTY), "resume", "3"]
    assert variable == NASTY
    assert not list(tmp_path.iterdir()), "nothing was executed"


def test_the_script_is_private(run_dir: Path, tmp_path: Path) -> None:
    install(run_dir, 0, boot=boot_of(Account(), tmp_path), env={})
    (script,) = (tmp_path / "home/.local/state/maskfleet").glob("*.sh")
    assert stat.S_IMODE(script.stat().st_mode) == 0o600
    assert stat.S_IMODE(script.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(("ended", "started"), [(False, [0]), (True, [])])
def test_after_a_boot_the_run_continues_unless_it_has_ended(
    ended: bool, started: list[int], run_dir: Path, tmp_path: Path
) -> None:
    account, starts = Account(OTHERS), list[int]()
    boot = boot_of(account, tmp_path)
    install(run_dir, 0, boot=boot, env={})
    if ended:
        JobFolder(run_dir).write_outcome("done", 0)
    resume(run_dir, 0, start=lambda run_dir, index: starts.append(index), boot=boot)
    assert starts == started
    assert (account.table == OTHERS) is ended


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EIO, errno.ENOTCONN, errno.EACCES])
def test_after_a_boot_it_waits_for_the_shared_folder(
    number: int, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, waits, real = list[int](), list[float](), Path.stat

    def fails(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if len(waits) < 3 and path.name == "job.json":
            raise OSError(number, os.strerror(number), str(path))
        return real(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", fails)
    monkeypatch.setattr(time, "sleep", waits.append)
    boot = boot_of(Account(OTHERS), tmp_path)
    resume(run_dir, 0, start=lambda run_dir, index: starts.append(index), boot=boot)
    assert (len(waits), starts) == (3, [0])


def test_a_host_that_shares_the_home_directory_starts_nothing(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maskfleet.launch.supervise.status.start", lambda run_dir, index: pytest.fail("started"))
    assert main([str(run_dir), "resume", "0", "--installation=another"]) == 0


def test_a_refusal_of_crontab_is_no_empty_crontab() -> None:
    def refuses(argv: Sequence[str], stdin: str = "", *, timeout_s: float = 60) -> Finished:
        return Finished(1, "", "You (me) are not allowed to use this program (crontab)")

    with pytest.raises(LaunchError, match="not allowed"):
        cron.read_table(refuses)  # type: ignore[arg-type]


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("NOT TESTED: the unit file: systemd-analyze is not installed")
    unit = tmp_path / "maskfleet-0123456789abcdef-0.service"
    unit.write_text(systemd.unit_text(unit.stem, ".local/state/maskfleet/a.sh"))
    env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(
        ["systemd-analyze", "--user", "verify", str(unit)], capture_output=True, text=True, env=env, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_render_shows_what_persist_runs_on_each_host(tmp_path: Path) -> None:
    local = LocalBackend(LocalLaunch(persist=True), cwd=tmp_path).render(job_for(recipe("demo"), slots=(1,), name="a"))
    assert [command[-2:] for command in local.commands] == [("persist", "0"), (str(tmp_path / "runs/a"), "0")]
    launch = SshLaunch(hosts=("a", "b"), environment="/opt/env", persist=True)
    remote = SshBackend(launch).render(job_for(recipe("demo"), slots=(1, 1), name="a")).commands
    assert [command[3].split()[-2:] for command in remote[-4:]] == [
        ["persist", "0"],
        ["persist", "1"],
        ["start", "0"],
        ["start", "1"],
    ]
