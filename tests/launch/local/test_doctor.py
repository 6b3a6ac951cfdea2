"""Findings about this machine."""

from __future__ import annotations

from pathlib import Path

from maskfleet.launch.findings import Finding, Verdict
from maskfleet.launch.local.doctor import HERE, _free, _package, _tool, examine


def test_everything_is_looked_at_and_every_fault_has_a_remedy(tmp_path: Path) -> None:
    findings = examine(tmp_path / "not" / "yet" / "there")
    names = {finding.name.split()[0] for finding in findings}
    assert {"python", "torch", "gpu", "memory", "disk", "shared", "boto3", "helm", "ssh"} <= names
    assert all(finding.remedy for finding in findings if finding.verdict is not Verdict.OK)
    assert not any(finding.verdict is Verdict.FAIL for finding in findings)


def test_too_little_disk_space_is_a_warning() -> None:
    assert _free("disk", 5, 10, "free some").verdict is Verdict.WARN
    assert _free("disk", 10, 10, "free some") == Finding(HERE, "disk", Verdict.OK, "0.0 GiB free")


def test_a_missing_required_package_fails_and_an_optional_one_warns() -> None:
    assert _package("no-such-package", "does it", "install it", True).verdict is Verdict.FAIL
    assert _package("no-such-package", "does it", "install it", False).verdict is Verdict.WARN


def test_a_missing_tool_says_what_it_is_for() -> None:
    finding = _tool("helm", "installs charts", "install helm", which=lambda name: None)
    assert finding == Finding(HERE, "helm", Verdict.WARN, "not found; installs charts", "install helm")
