"""The layout: small folders, names that exist once, and nothing that only tests use."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import maskfleet

PACKAGE = Path(maskfleet.__file__).parent
ROOT = Path(__file__).resolve().parent.parent
MAX_FILES = 12
ONE_FILE_PER_COMMAND = {"cli"}
FORBIDDEN_NAMES = {"utils", "helpers", "common", "misc", "core"}
# Fakes that ship with the package so that its users can test against them.
SHIPPED_FAKES = {"RecordingShell", "FakeKube", "RerunRecorder"}


def folders(package: Path) -> list[Path]:
    return [package, *sorted(path for path in package.rglob("*") if path.is_dir() and path.name != "__pycache__")]


def modules(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("__"))


def shared_prefixes(names: Iterable[str]) -> list[str]:
    """Prefixes (`eks_`) that three or more names share."""
    counts = Counter(name.split("_")[0] for name in names if "_" in name)
    return sorted(prefix for prefix, count in counts.items() if count >= 3)


def public_definitions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node


def classes_defined_twice(package: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        for node in public_definitions(path):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(package)))
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def unused(package: Path, users: Iterable[Path]) -> list[str]:
    """Public functions and classes of `package` that nothing in `users` names, apart from their own definition."""
    texts = {path: path.read_text(encoding="utf-8") for path in users}
    counts: Counter[str] = Counter(word for text in texts.values() for word in re.findall(r"\w+", text))
    found = []
    for path in sorted(package.rglob("*.py")):
        for node in public_definitions(path):
            is_command = any(
                "command" in ast.unparse(one) or "callback" in ast.unparse(one) for one in node.decorator_list
            )
            if counts[node.name] <= 1 and not is_command and node.name not in SHIPPED_FAKES:
                found.append(f"{path.relative_to(package)}: {node.name}")
    return found


def product_files() -> list[Path]:
    """Everything that may use the package, apart from its tests."""
    suffixes = {".py", ".ipynb", ".yaml", ".tpl", ".toml", ".md", ".j2", ".jinja"}
    found = [
        path
        for folder in ("src", "benchmarks", "scripts", "deploy", "notebooks", "docs")
        for path in (ROOT / folder).rglob("*")
    ]
    return [path for path in [*found, ROOT / "pyproject.toml", ROOT / "README.md"] if path.suffix in suffixes]


def test_a_folder_holds_at_most_twelve_files() -> None:
    counts = {str(folder.relative_to(PACKAGE)): len(list(folder.glob("*.py"))) for folder in folders(PACKAGE)}
    large = {name: count for name, count in counts.items() if count > MAX_FILES}
    assert set(large) <= ONE_FILE_PER_COMMAND, large


def test_no_three_files_of_a_folder_share_a_prefix() -> None:
    assert {str(f): shared_prefixes(modules(f)) for f in folders(PACKAGE) if shared_prefixes(modules(f))} == {}
    assert shared_prefixes(["eks_logs", "eks_files", "eks_doctor", "ssh_files"]) == ["eks"]


def test_no_file_or_folder_is_called_utils() -> None:
    names = {path.stem for path in PACKAGE.rglob("*")}
    assert names & FORBIDDEN_NAMES == set()


def test_a_public_class_name_exists_once() -> None:
    assert classes_defined_twice(PACKAGE) == {}


def test_public_code_is_used_by_more_than_its_tests() -> None:
    assert unused(PACKAGE, product_files()) == []


def test_the_rules_can_fail(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("class Place:\n    pass\ndef lonely():\n    pass\ndef used():\n    pass\n")
    (tmp_path / "two.py").write_text("class Place:\n    pass\nused()\n")
    assert classes_defined_twice(tmp_path) == {"Place": ["one.py", "two.py"]}
    assert unused(tmp_path, sorted(tmp_path.glob("*.py"))) == ["one.py: lonely"]
