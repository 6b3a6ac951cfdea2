"""The systemd user unit of a run, and whether user units start at boot."""

from __future__ import annotations

from pathlib import Path

from maskfleet.errors import LaunchError, MaskfleetError
from maskfleet.system.files import write_atomically
from maskfleet.system.process import Shell

STOP_S = 120  # the ranks save when the machine shuts down

# %h is the home directory. The unit stays active after its script has exited, and with it the supervisor it started.
_UNIT = """\
[Unit]
Description=maskfleet run {name}

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh %h/{script}
TimeoutStartSec=infinity
TimeoutStopSec={stop_s}

[Install]
WantedBy=default.target
"""


def unit_text(name: str, script: str) -> str:
    """The unit that runs `script`, relative to the home directory."""
    return _UNIT.format(name=name, script=script, stop_s=STOP_S)


def has_user_manager(run: Shell) -> bool:
    """Whether systemd manages units of this user here."""
    return _succeeds(run, ["systemctl", "--user", "show-environment"])


def lingers(run: Shell, user: str) -> bool:
    """Whether the user's units start at boot, and not only when the user logs in."""
    try:
        done = run(["loginctl", "show-user", "--property=Linger", "--value", "--", user])
    except MaskfleetError:
        return False
    return done.code == 0 and done.out.strip() == "yes"


def enable(home: Path, name: str, script: str, run: Shell) -> None:
    """Install the unit; it starts with the next boot."""
    path = _path(home, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, unit_text(name, script))
    for command in (["daemon-reload"], ["enable", "--", f"{name}.service"]):
        done = run(["systemctl", "--user", *command])
        if done.code != 0:
            raise LaunchError(
                f"systemd does not take the unit {name}: {done.err.strip()}",
                remedy="see the log of systemd (`journalctl`), or launch without --persist",
            )


def disable(home: Path, name: str, run: Shell) -> None:
    """Remove the unit; what it started continues."""
    run(["systemctl", "--user", "disable", "--", f"{name}.service"])
    path = _path(home, name)
    for left in (path.parent / "default.target.wants" / path.name, path):  # also without a connection to systemd
        left.unlink(missing_ok=True)
    run(["systemctl", "--user", "daemon-reload"])


def is_enabled(home: Path, name: str) -> bool:
    """Whether the unit is installed."""
    return _path(home, name).exists()


def _path(home: Path, name: str) -> Path:
    return home / ".config" / "systemd" / "user" / f"{name}.service"


def _succeeds(run: Shell, argv: list[str]) -> bool:
    try:
        return run(argv).code == 0
    except MaskfleetError:
        return False  # it is not installed
