"""Heartbeats as a supervisor would write them that is this process, or one on another machine."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

from maskfleet.launch.supervise.job_files import Heartbeat
from maskfleet.system.machine import boot_clock, machine_id, process_start


def own_beat(count: int = 1, state: str = "running", **fields: Any) -> Heartbeat:
    """A heartbeat of this process, just now."""
    beat = Heartbeat(count, os.getpid(), state, 0, 0, time.time(), "10.0.0.1", [])
    started = process_start(os.getpid())
    assert started is not None
    return replace(beat, machine=machine_id(), uptime_s=boot_clock(), started=started, **fields)


def other_beat(count: int = 1, state: str = "running", **fields: Any) -> Heartbeat:
    """A heartbeat of a process on another machine, at any time by its clock."""
    return replace(Heartbeat(count, 7, state, 0, 0, time.time(), "10.0.0.2", [], machine="another"), **fields)
