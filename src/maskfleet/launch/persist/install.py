"""Installs and removes what continues a run after a reboot, on one host.

A script in ~/.local/state/maskfleet starts the supervisor of the host; a systemd user unit or an `@reboot` line of the
crontab runs the script at boot. Neither holds a value of the run, only the script's name, which is a hash. The
supervisor removes all of it when the run ends, and so does the script if it finds that the run has ended meanwhile.
"""

from __future__ import annotations

import getpass
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path
from typing import Literal

from maskfleet.errors import LaunchError, MaskfleetError
from maskfleet.launch.persist import cron, systemd
from maskfleet.launch.supervise.job_files import JobFolder, Persisted
from maskfleet.launch.supervise.processes import job_id
from maskfleet.system.files import write_atomically
from maskfleet.system.lock import locked
from maskfleet.system.machine import installation_id
from maskfleet.system.process import Shell, run_command

FOLDER = ".local/state/maskfleet"
MOUNT_S = 1800.0  # how long after a boot the shared folder may take to be mounted
# Variables that decide whether and how ranks run; others may hold secrets, and are not written to a file.
_VARIABLE = re.compile(r"PATH|LD_LIBRARY_PATH|PYTHONPATH|(?:CUDA|NCCL|GLOO|FI|OMP|MKL|TORCH|PYTORCH)_[A-Za-z0-9_]+")


@dataclass(frozen=True, slots=True)
class Boot:
    """The user's account on this host, in which a run is installed."""

    home: Path
    user: str
    run: Shell

    @classmethod
    def here(cls) -> Boot:
        return cls(Path.home(), getpass.getuser(), run_command)


def install(run_dir: Path, index: int, *, boot: Boot, env: Mapping[str, str]) -> Persisted:
    """Continue host `index` of the run after a reboot; installing it again replaces what was there."""
    name, script = _name(run_dir, index), _script(run_dir, index)
    with _locked(boot):
        path = boot.home / script
        write_atomically(path, resume_script(run_dir, index, env), private=True)
        kind, note = _choose(boot)
        if kind == "systemd":
            systemd.enable(boot.home, name, script, boot.run)
        else:
            cron.write_table(cron.with_line(cron.read_table(boot.run), name, script), boot.run)
    done, record = Persisted(kind, note), _record(run_dir, index)
    record.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(record, dumps(asdict(done)))
    return done


def remove(run_dir: Path, index: int, *, boot: Boot) -> None:
    """Remove what `install` installed, and nothing else; does nothing if there is nothing."""
    path, record = boot.home / _script(run_dir, index), _record(run_dir, index)
    if not path.exists() and not record.exists():
        return
    name = _name(run_dir, index)
    with _locked(boot):
        if systemd.is_enabled(boot.home, name):
            systemd.disable(boot.home, name, boot.run)
        elif (table := cron.read_table(boot.run)) != (rest := cron.without_line(table, name)):
            cron.write_table(rest, boot.run)
        path.unlink(missing_ok=True)
    record.unlink(missing_ok=True)


def remove_at_end(run_dir: Path, index: int, say: Callable[[str], None], *, boot: Boot | None = None) -> None:
    """`remove` for a run that has ended; what goes wrong is only logged."""
    try:
        remove(run_dir, index, boot=boot or Boot.here())
    except (MaskfleetError, OSError) as error:
        what = error.what if isinstance(error, MaskfleetError) else str(error)
        say(f"host {index}: the run has ended, but what continues it after a reboot is still installed: {what}")


def resume(run_dir: Path, index: int, *, start: Callable[[Path, int], None], boot: Boot | None = None) -> None:
    """After a boot: wait for the shared folder, then start the supervisor; a run that has ended is removed instead."""
    folder, deadline = JobFolder(run_dir), time.monotonic() + MOUNT_S
    while not _is_there(folder) and time.monotonic() < deadline:
        time.sleep(5)
    if _is_there(folder) and folder.outcome() is None and not folder.cancel_requested():
        start(run_dir, index)
    else:
        remove(run_dir, index, boot=boot or Boot.here())


def _is_there(folder: JobFolder) -> bool:
    try:
        return folder.exists()
    except LaunchError:
        return False  # its file system is not ready yet


def resume_script(run_dir: Path, index: int, env: Mapping[str, str]) -> str:
    """The script that cron or systemd runs at boot."""
    kept = {name: value for name, value in env.items() if _VARIABLE.fullmatch(name)}
    argv = [sys.executable, "-m", "maskfleet.launch.supervise.status", str(run_dir), "resume", str(index)]
    argv.append(f"--installation={installation_id()}")
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(kept.items()))
    about = "# Continues a maskfleet run after a reboot. Removed when the run ends."
    return f"#!/bin/sh\n{about}\n{exports}exec {shlex.join(argv)}\n"


def _choose(boot: Boot) -> tuple[Literal["systemd", "cron"], str]:
    """What runs scripts at boot here, and a note for the user."""
    has_manager = systemd.has_user_manager(boot.run)
    if has_manager and systemd.lingers(boot.run, boot.user):
        return "systemd", ""
    try:
        cron.read_table(boot.run)
    except MaskfleetError:
        if has_manager:
            note = f"it starts when {boot.user} logs in; `loginctl enable-linger` makes it start at boot"
            return "systemd", note
        raise LaunchError(
            f"{os.uname().nodename} has neither a systemd user manager nor cron, so nothing can continue the run",
            remedy="install cron there, or launch without --persist",
        ) from None
    return "cron", "" if _cron_runs() else "no cron daemon runs there now; start it, or nothing happens at boot"


def _cron_runs() -> bool:
    return any(Path(path).exists() for path in ("/run/crond.pid", "/run/cron.pid", "/var/run/crond.pid"))


def _locked(boot: Boot) -> AbstractContextManager[None]:
    folder = boot.home / FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return locked(folder / "lock", "changing what runs at boot", wait_s=60)


def _name(run_dir: Path, index: int) -> str:
    return f"maskfleet-{job_id(run_dir)}-{index}"


def _script(run_dir: Path, index: int) -> str:
    return f"{FOLDER}/{_name(run_dir, index)}.sh"


def _record(run_dir: Path, index: int) -> Path:
    return JobFolder(run_dir).host(index) / "persist.json"
