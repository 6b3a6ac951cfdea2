"""What the kernel says about GPUs and file systems."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from maskfleet.system.machine import file_system_of, gpu_errors

XID = "NVRM: Xid (PCI:0000:10:1c): 79, pid=4711, name=python3, GPU has fallen off the bus."


def test_recent_errors_of_the_driver_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_us = 2_000_000_000
    monkeypatch.setattr(time, "clock_gettime", lambda clock: now_us / 1e6)  # this machine may have just booted
    # Records of /dev/kmsg: priority, number, microseconds since boot and flags, then the text and its properties.
    log = tmp_path / "kmsg"
    log.write_text(
        f"3,41,{now_us - 700_000_000},-;NVRM: Xid (PCI:0000:10:1c): 31, long ago\n"
        f"6,42,{now_us - 1_000_000},-;eth0: link up about NVRM: Xid\n SUBSYSTEM=net\n"
        f"3,43,{now_us},-,caller=T12;{XID}\n"
    )
    assert gpu_errors(log=log) == [XID]
    assert gpu_errors(1000.0, log)[0].endswith("31, long ago")


def test_a_log_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    assert gpu_errors(log=tmp_path / "missing") == []
    assert gpu_errors(log=tmp_path) == []
    assert isinstance(gpu_errors(), list), "the log of this machine, which ends"


def test_the_innermost_mount_tells_the_kind_of_file_system(tmp_path: Path) -> None:
    data = tmp_path / "shared data" / "coco"
    data.mkdir(parents=True)
    mounts = tmp_path / "mountinfo"
    escaped = str(data.parent).replace(" ", "\\040")
    mounts.write_text(
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw\n"
        f"30 22 0:50 / {escaped} rw,noatime shared:9 master:2 - lustre 10.0.0.1@tcp:/abcdefgh rw,flock\n"
        f"31 22 0:51 / {escaped}-other rw - nfs4 server:/ rw\n"
    )
    assert file_system_of(data, mounts) == "lustre"
    assert file_system_of(tmp_path, mounts) == "ext4"
    assert file_system_of(data, tmp_path / "missing") == ""
    assert file_system_of(Path("/proc")) == "proc"
