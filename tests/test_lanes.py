"""The lanes of the tests: no test is in none of them or in two, and CI runs them all."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tools import ROOT


def recipes() -> dict[str, list[str]]:
    """The commands of each target of the Makefile, with its variables replaced."""
    text = (ROOT / "Makefile").read_text("utf-8")
    variables = dict(re.findall(r"^(\w+) [:?]= ?(.*)$", text, re.MULTILINE))
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if target := re.match(r"([\w-]+):(?!=)", line):
            found[target[1]] = []
        elif line.startswith("\t"):
            expanded = line.strip().lstrip("@")
            while names := re.findall(r"\$\((\w+)\)", expanded):
                for name in names:
                    expanded = expanded.replace(f"$({name})", variables[name])
            found[list(found)[-1]].append(expanded)
    return found


def collected(options: list[str]) -> tuple[set[str], int]:
    """Ids of the tests that pytest selects, and how many tests there are before the selection."""
    argv = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *options]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    total = re.search(r"^\d+/(\d+) tests collected", done.stdout, re.MULTILINE)
    assert total is not None, done.stdout
    return {line for line in done.stdout.splitlines() if "::" in line}, int(total[1])


@pytest.mark.slow
def test_every_test_is_in_exactly_one_lane() -> None:
    selections = []
    for lane in ("test", "test-slow"):
        [command] = recipes()[lane]
        options = shlex.split(command.partition(" -m pytest ")[2])
        # Anything else, such as --ignore or a path, could leave tests out of both.
        assert options[:-1] == ["-n", "2", "--dist", "loadscope", "-m"]
        selections.append(collected(options))
    (fast, total), (slow, same_total) = selections
    assert fast & slow == set()
    assert len(fast) + len(slow) == total == same_total
    assert len(fast) > 3000
    assert len(slow) > 50


def test_ci_runs_both_lanes_and_the_checks() -> None:
    lines = (ROOT / ".ci" / "run").read_text("utf-8").splitlines()
    assert lines[-1] == "exec make check test test-slow"


def test_every_make_target_that_ci_hooks_or_documents_name_exists() -> None:
    workflow = YAML(typ="safe").load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    named = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert {"make check", "make test", "make test-slow"} <= set(named)
    hooks = YAML(typ="safe").load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    assert [repository["repo"] for repository in hooks["repos"]] == ["local"], "a hook would need the network"
    named += [hook["entry"] for repository in hooks["repos"] for hook in repository["hooks"]]
    documents = [ROOT / "CONTRIBUTING.md", ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    named += [document.read_text("utf-8") for document in documents]
    # At the start of a line, of code in a line, or after a prompt or sudo: the verb "make" is in the text too.
    targets = set(re.findall(r"(?:^|`|\$ |sudo )make ([a-z][a-z0-9-]*)", "\n".join(named), re.MULTILINE))
    assert {"check", "demo", "format", "test", "test-slow", "test-tools"} <= targets
    assert targets - set(recipes()) == set()


def test_the_table_of_durations_sums_up_a_junit_file(tmp_path: Path) -> None:
    report = tmp_path / "junit.xml"
    case = '<testcase classname="tests.ops.test_nms" name="test_a[{}]" time="{}" />'
    report.write_text(f"<testsuites><testsuite>{case.format(1, 3.0)}{case.format(2, 2.5)}</testsuite></testsuites>")
    table = runpy.run_path(str(ROOT / "scripts" / "durations.py"))["table"]([report])
    assert table == {"files": {"tests/ops/test_nms.py": 5.5}, "tests": {"tests/ops/test_nms.py::test_a": 5.5}}
