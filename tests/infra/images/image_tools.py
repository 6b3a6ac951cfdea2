"""A program that stands for docker, podman or buildah: it records what it was given, and answers as told."""

from __future__ import annotations

import json
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAKE = """#!PYTHON -IS
import json, os, pathlib, stat, sys
here = pathlib.Path(__file__).parent
argv = sys.argv[1:]
call = {"argv": argv, "config": os.environ.get("DOCKER_CONFIG"), "host": os.environ.get("DOCKER_HOST")}
def value(option):
    return argv[argv.index(option) + 1] if option in argv else None
login = value("--authfile") or (os.path.join(call["config"], "config.json") if call["config"] else None)
if login:
    call["login"] = json.loads(pathlib.Path(login).read_text())
    call["mode"] = [stat.S_IMODE(os.stat(path).st_mode) for path in (login, os.path.dirname(login))]
with open(here / "calls", "a") as file:
    file.write(json.dumps(call) + "\\n")
answer = json.loads((here / "answers.json").read_text()).get(argv[0], {})
if argv[0] == "build":
    call["context"] = sorted(str(path) for path in pathlib.Path().rglob("*") if path.is_file())
    (here / "context.json").write_text(json.dumps(call["context"]))
    pathlib.Path(value("--iidfile")).write_text("sha256:" + "ab" * 32)
if value("--digestfile"):
    pathlib.Path(value("--digestfile")).write_text("sha256:" + "cd" * 32)
print(answer.get("out", ""))
sys.exit(answer.get("code", 0))
"""
IMAGE_ID = "ab" * 32
DIGEST = f"sha256:{'cd' * 32}"


@dataclass
class FakeTool:
    """The folder of the program, which is first in PATH."""

    folder: Path
    name: str

    @property
    def env(self) -> dict[str, str]:
        """An environment in which nothing of the user is found."""
        home = self.folder.parent
        state = {"XDG_STATE_HOME": str(home / "state"), "XDG_CACHE_HOME": str(home / "cache")}
        return {"PATH": f"{self.folder}:/usr/bin:/bin", "HOME": str(home), **state}

    def answer(self, command: str, out: str = "", code: int = 0) -> None:
        path = self.folder / "answers.json"
        answers = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**answers, command: {"out": out, "code": code}}))

    def calls(self, command: str) -> list[Any]:
        lines = (self.folder / "calls").read_text().splitlines() if (self.folder / "calls").exists() else []
        return [one for one in map(json.loads, lines) if one["argv"][0] == command]


def fake_tool(folder: Path, name: str) -> FakeTool:
    """Create the program `name`."""
    folder = folder / "bin"
    folder.mkdir()
    program = folder / name
    program.write_text(FAKE.replace("PYTHON", sys.executable, 1))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    tool = FakeTool(folder, name)
    tool.answer("version", "1")
    tool.answer("inspect", IMAGE_ID)
    tool.answer("image", f"sha256:{IMAGE_ID}")
    return tool
