"""Terraform variables: from --var, --var-file and the work folder, into one private file per root."""

from __future__ import annotations

import base64
import difflib
import json
import re
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from maskfleet.errors import ConfigError, InfraError
from maskfleet.infra.terraform.diagnose import ANSI, remedy_for
from maskfleet.infra.terraform.progress import TerraformProgress, parse_event
from maskfleet.infra.terraform.root import Program
from maskfleet.system.files import write_private_json
from maskfleet.system.process import capture

Settings = dict[str, Any]
VARIABLES_FILE = "maskfleet.auto.tfvars.json"
_BLOCK = re.compile(r'^(\w+)(?:\s+"([^"]+)")?', re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_][\w-]*")
_ASSIGNED = re.compile(r'^\s*"?([A-Za-z_][\w-]*)"?\s*[=:]', re.MULTILINE)


def from_options(assignments: Sequence[str], files: Sequence[Path], program: Program) -> Settings:
    """The settings of the command line: files in the given order, then single values."""
    found: Settings = {}
    for file in files:
        found |= read_var_file(file, program)
    for text in assignments:
        name, equals, value = text.partition("=")
        if not equals or not _NAME.fullmatch(name.strip()):
            raise ConfigError(f"--var {text.partition('=')[0]!r} has no value", remedy="write --var NAME=VALUE")
        found[name.strip()] = parse_value(name.strip(), value)
    return found


def parse_value(name: str, value: str) -> Any:
    """A value from the command line: lists, objects, quoted strings and null are JSON, everything else is a string.

    Terraform converts strings to numbers and booleans; parsed as a number here, version 1.30 would become 1.3.
    """
    text = value.strip()
    if text[:1] in ("[", "{", '"') or text == "null":
        try:
            return json.loads(text)
        except ValueError as error:
            raise ConfigError(
                f"--var {name}: the value starts like JSON but is not valid: {error}",
                remedy=f"""write lists as --var '{name}=["a", "b"]'""",
            ) from error
    return value


def read_var_file(path: Path, program: Program) -> Settings:
    """The variables in a file: JSON, or a .tfvars file as Terraform itself reads it."""
    if not path.is_file():
        raise ConfigError(f"--var-file {path} does not exist", remedy="name a .tfvars or .json file")
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON: {error}", remedy="fix the file") from error
    else:
        data = _evaluated(path, text, program)
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is not an object of names and values", remedy='write {"cluster_name": "fleet", …}')
    return data


def declared(folder: Path) -> set[str]:
    """Names of the variables of a root."""
    return set(_blocks(folder, "variable"))


def required(folder: Path) -> set[str]:
    """Names of the variables of a root that have no default."""
    blocks = _blocks(folder, "variable")
    return {name for name, body in blocks.items() if not re.search(r"\bdefault\s*=", body)}


def outputs_declared(folder: Path) -> set[str]:
    """Names of the outputs of a root."""
    return set(_blocks(folder, "output"))


def check_known(settings: Iterable[str], known: Iterable[str]) -> None:
    """Raise an error for an unknown setting, which Terraform would silently ignore."""
    names = sorted(known)
    for name in settings:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(
                f"there is no variable {name}",
                remedy=f"{hint}docs/run-anywhere/eks/terraform.md and docs/run-anywhere/eks/addons.md list them",
            )


def check_values(folder: Path, settings: Settings, program: Program) -> None:
    """Raise an error for a value that a variable of the root in `folder` refuses.

    Terraform evaluates the variables alone, without providers and without what the root gets from another one.
    """
    blocks = {name: body for name, body in _blocks(folder, "variable").items() if name in settings}
    if not blocks:
        return
    with tempfile.TemporaryDirectory() as alone:
        text = "\n".join(f'variable "{name}"{body}' for name, body in blocks.items())
        (Path(alone) / "variables.tf").write_text(text, encoding="utf-8")
        write_private_json(Path(alone) / VARIABLES_FILE, {name: settings[name] for name in blocks})
        argv = [program.path, "plan", "-json", "-input=false"]
        done = capture(argv, cwd=Path(alone), env=program.env, timeout_s=300)
    progress = TerraformProgress()
    for line in done.out.splitlines():
        progress.add(parse_event(line), time.monotonic())
    wrong = [one for one in progress.errors if one.summary.endswith("variable")]
    if wrong:
        what = "; ".join(one.detail.partition("\n\n")[0].rstrip(".") for one in wrong)
        raise InfraError(what, remedy=str(remedy_for(wrong[0], folder=folder)))


def write_variables(folder: Path, settings: Settings) -> None:
    """Write the settings that a root declares to a file that Terraform loads; a command line would expose them."""
    names = declared(folder)
    write_private_json(folder / VARIABLES_FILE, {name: value for name, value in settings.items() if name in names})


def _blocks(folder: Path, kind: str) -> dict[str, str]:
    """Bodies of the top-level blocks of one kind, by name; in formatted files only these and `}` start at column 0."""
    found = {}
    for file in sorted(folder.glob("*.tf")):
        text = file.read_text(encoding="utf-8")
        heads = list(_BLOCK.finditer(text))
        for head, following in zip(heads, [*heads[1:], None], strict=True):
            if head.group(1) == kind and head.group(2):
                found[head.group(2)] = text[head.end() : following.start() if following else len(text)]
    return found


def _evaluated(path: Path, text: str, program: Program) -> Any:
    """What Terraform itself reads in `path`: `terraform console` in an empty root with those variables.

    Names inside of values may be declared as variables too; nothing sets them, so they are null and dropped.
    """
    names = sorted(set(_ASSIGNED.findall(text)))
    if not names:
        return {}
    expression = ", ".join(f"{name} = var.{name}" for name in names)
    with tempfile.TemporaryDirectory() as folder:
        root = {"variable": {name: {"default": None} for name in names}}
        (Path(folder) / "main.tf.json").write_text(json.dumps(root), encoding="utf-8")
        done = capture(
            [program.path, "console", f"-var-file={path.resolve()}"],
            cwd=Path(folder),
            env=program.env,
            stdin=f"base64encode(jsonencode({{ {expression} }}))\n",
        )
    if done.code != 0:
        problem = " ".join(ANSI.sub("", done.err).replace("│", " ").split())
        raise ConfigError(
            f"{path} cannot be read: {problem[:400]}", remedy="fix the file; it consists of NAME = VALUE lines"
        )
    data = json.loads(base64.b64decode(done.out.strip().strip('"')))
    return {name: value for name, value in data.items() if value is not None}
