"""The `@reboot` line of a run in the user's crontab; all other lines stay as they are."""

from __future__ import annotations

from maskfleet.errors import LaunchError
from maskfleet.system.process import Shell


def with_line(table: str, name: str, script: str) -> str:
    """The crontab `table` with a line that runs `script`, relative to the home directory; `name` marks it as ours."""
    kept = without_line(table, name)
    if kept and not kept.endswith("\n"):
        kept += "\n"
    return f'{kept}@reboot sh "$HOME"/{script} {_mark(name)}\n'


def without_line(table: str, name: str) -> str:
    """The crontab `table` without the line of `name`."""
    return "".join(line for line in table.splitlines(keepends=True) if not line.rstrip("\n").endswith(_mark(name)))


def read_table(run: Shell) -> str:
    """The user's crontab; empty if there is none."""
    done = run(["crontab", "-l"])
    if done.code == 0:
        return done.out
    if "no crontab for" in done.err:
        return ""
    raise _refused(done.err)


def write_table(table: str, run: Shell) -> None:
    """Replace the user's crontab; an empty one is removed."""
    done = run(["crontab", "-"], table) if table else run(["crontab", "-r"])
    if done.code != 0 and (table or "no crontab for" not in done.err):
        raise _refused(done.err)


def _mark(name: str) -> str:
    return f"# {name}"


def _refused(why: str) -> LaunchError:
    return LaunchError(
        f"crontab refuses to work: {why.strip()}", remedy="ask for permission to use cron, or launch without --persist"
    )
