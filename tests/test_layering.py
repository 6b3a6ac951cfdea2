"""Who may import whom. `a <- b`: b may import a, never the reverse."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import maskfleet
from maskfleet.config.launch import LAUNCH_CLASSES
from maskfleet.launch.backend import BACKENDS, Backend, backend_class
from maskfleet.launch.local.backend import LocalBackend

PACKAGE = Path(maskfleet.__file__).parent

BELOW_INFERENCE = {"errors", "log", "system", "config", "batch", "ops", "rle", "viz", "model", "data"}
# Each package with the packages it may import; itself is always allowed.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "log": {"errors"},
    "system": {"errors", "log"},
    "html": {"errors", "log"},
    "config": {"errors", "log", "system"},
    "batch": {"errors"},
    "ops": {"errors", "log", "batch"},
    "viz": {"errors"},
    "rle": {"errors"},
    "model": {"errors", "log", "system", "config", "batch", "ops"},
    "data": {"errors", "log", "system", "html", "config", "batch", "ops", "rle", "viz"},
    "inference": {*BELOW_INFERENCE},
    "evaluation": {*BELOW_INFERENCE, "html", "inference"},
    "serve": {*BELOW_INFERENCE, "html", "inference"},
    "training": {*BELOW_INFERENCE, "inference", "evaluation"},
    "bench": {"errors", "log", "system", "html", "config", "batch", "ops", "model", "data", "inference", "training"},
    "launch": {"errors", "log", "system", "config"},
    "infra": {"errors", "log", "system", "config"},
}
# Only `system` may import these packages and make these calls, which rename a file into place or start a process.
MACHINE_PACKAGES = {"subprocess", "fcntl", "filelock", "kr8s", "boto3", "botocore"}
MACHINE_CALLS = {
    "os": {"replace", "rename", "renames", "link", "fsync", "system", "popen", "fork", "posix_spawn"},
    "shutil": {"move"},
    "asyncio": {"create_subprocess_exec", "create_subprocess_shell"},
}
# Sent to another host, where they run alone, without maskfleet; their docstrings say so.
HOST_SCRIPTS = {"launch/ssh/environment.py", "launch/ssh/probe.py", "launch/files/agent.py"}
NO_TORCH = {"__init__", "__main__", "errors", "log", "system", "config", "launch", "infra", "cli"}


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, whether it is imported as soon as the file is) for every import in the file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {
        id(node) for function in ast.walk(tree) if isinstance(function, ast.FunctionDef) for node in ast.walk(function)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) not in inside) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            home = ["maskfleet", *path.relative_to(PACKAGE).parts[: -node.level]] if node.level else []
            source = ".".join([*home, node.module or ""]).strip(".")
            found += [(f"{source}.{alias.name}", id(node) not in inside) for alias in node.names]
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_follow_the_layers(path: Path) -> None:
    package = package_of(path)
    for module, at_once in imports(path):
        parts = module.split(".")
        if (
            parts[0] == "maskfleet"
            and package not in ("cli", "__main__", "__init__")
            and len(parts) > 1
            and parts[1] != "__version__"
        ):
            allowed = MAY_IMPORT.get(package, set()) | {package}
            assert parts[1] in allowed, f"{package} must not import {module}"
        if at_once and package in NO_TORCH:
            assert parts[0] not in ("torch", "cv2", "boto3", "numpy"), f"{path.name} imports {module} at once"


def test_the_rule_can_fail(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text("import torch\ndef f():\n    import cv2\n")
    assert imports(file) == [("torch", True), ("cv2", False)]


def machine_uses(path: Path) -> list[str]:
    """What a file does that only `system` may do, as the text of the code.

    Path.replace is a `.replace` with one positional argument and nothing else: that of a string has two, those of
    dataclasses and datetimes have keywords.
    """
    found = [f"import {module}" for module, _ in imports(path) if module.split(".")[0] in MACHINE_PACKAGES]
    found += [f"import {module}" for module, _ in imports(path) if _is_machine_call(*module.rpartition(".")[::2])]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_move = node.func.attr in ("rename", "hardlink_to") or (
                node.func.attr == "replace" and len(node.args) == 1 and not node.keywords
            )
            if is_move or _is_machine_call(ast.unparse(node.func.value), node.func.attr):
                found.append(ast.unparse(node))
    return found


def _is_machine_call(module: str, name: str) -> bool:
    return name in MACHINE_CALLS.get(module, set())


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_system_touches_the_machine(path: Path) -> None:
    name = path.relative_to(PACKAGE).as_posix()
    if name in HOST_SCRIPTS:
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        assert "runs there alone" in str(docstring)
        assert not [module for module, _ in imports(path) if module.split(".")[0] == "maskfleet"]
    elif package_of(path) != "system":
        assert machine_uses(path) == [], f"use maskfleet.system in {name}"


@pytest.mark.parametrize(
    "code",
    [
        "import subprocess",
        "def f():\n    from botocore.exceptions import ClientError",
        "from subprocess import run",
        "from os import replace",
        "import os\nos.replace(a, b)",
        "import os\nos.fsync(file)",
        "import shutil\nshutil.move(a, b)",
        "temporary.replace(path)",
        "Path(a).rename(b)",
        "import asyncio\nasyncio.create_subprocess_exec(a)",
    ],
)
def test_the_rule_about_the_machine_can_fail(code: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text(code)
    assert machine_uses(file)


def test_text_and_dataclasses_may_be_replaced(tmp_path: Path) -> None:
    file = tmp_path / "good.py"
    file.write_text("text.replace('a', 'b')\ndataclasses.replace(batch, ids=ids)\nmoment.replace(hour=0)\n")
    assert machine_uses(file) == []


TARGETS = ("local", "ssh", "eks", "sagemaker")
# Here "eks" is the name of a stack of infrastructure, not of a launch target.
STACKS = ("infra/", "cli/infra")
PROGRAMS = ("cli/sagemaker.py", "cli/endpoint.py")  # commands of one target alone
SHARED_NAMES = ("doctor", "files", "notebook")  # a method of Backend, and the file that implements it


def may_know_targets(name: str) -> bool:
    """Whether the file `name`, from the package, may compare with the name of a target."""
    return name in ("config/launch.py", *PROGRAMS) or name.startswith(
        (*(f"launch/{target}/" for target in TARGETS), *STACKS)
    )


def target_comparisons(path: Path) -> list[str]:
    """Lines that compare with a target's name, or use a target's config class or modules."""
    faults = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        compared: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            compared = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            compared = [node.value]
        constants = {part.value for one in compared for part in ast.walk(one) if isinstance(part, ast.Constant)}
        if constants & set(TARGETS):
            faults.append(f"{path.name}:{node.lineno}")  # type: ignore[attr-defined]
        if isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            is_class = names & {"LocalLaunch", "SshLaunch", "EksLaunch", "SageMakerLaunch"}
            if is_class or (node.module or "").startswith(tuple(f"maskfleet.launch.{target}" for target in TARGETS)):
                faults.append(f"{path.name}:{node.lineno}")
    return faults


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_a_target_knows_its_name(path: Path) -> None:
    if not may_know_targets(path.relative_to(PACKAGE).as_posix()):
        assert target_comparisons(path) == []


def test_the_rule_about_targets_can_fail(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text(
        'if on == "eks" or on in ("local", "ssh"):\n    pass\n'
        'match on:\n    case "sagemaker":\n        pass\n'
        "from maskfleet.config.launch import EksLaunch, AnyLaunch\n"
        "from maskfleet.launch.ssh.doctor import examine_hosts\n"
        'on = "local"\n'
    )
    assert sorted(set(target_comparisons(file))) == ["bad.py:1", "bad.py:4", "bad.py:6", "bad.py:7"]


def misplaced_files(kind: type[Backend]) -> list[str]:
    """Methods of `kind` whose file its folder lacks, and files whose method it lacks."""
    folder = Path(inspect.getfile(kind)).parent
    return [
        f"{folder.name}/{name}.py" for name in SHARED_NAMES if (name in vars(kind)) != (folder / f"{name}.py").exists()
    ]


@pytest.mark.parametrize("on", sorted(BACKENDS))
def test_targets_use_the_same_file_names(on: str) -> None:
    kind = backend_class(on)
    assert Path(inspect.getfile(kind)) == PACKAGE / "launch" / on / "backend.py"
    assert misplaced_files(kind) == []


def test_every_folder_of_a_target_is_a_backend_and_has_a_config_class() -> None:
    folders = {path.parent.name for path in (PACKAGE / "launch").glob("*/backend.py")}
    assert folders == set(BACKENDS) <= set(LAUNCH_CLASSES) == set(TARGETS)


def test_the_rule_about_file_names_can_fail() -> None:
    odd = type("LocalBackend", (), {"__module__": LocalBackend.__module__, "files": LocalBackend.files})
    assert misplaced_files(odd) == ["local/doctor.py", "local/notebook.py"]
