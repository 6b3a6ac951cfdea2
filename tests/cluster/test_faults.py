"""Faults of the shared folder and of a host: the run ends by itself, and every answer of `status` is true.

`make chaos` tries all of them; these are two that once made a run hang.
"""

from __future__ import annotations

import random

import pytest
from client import Client
from faults import FAULTS
from one_fault import outcome_of

BY_NAME = {fault.name: fault for fault in FAULTS}


@pytest.mark.parametrize("name", ["read-only", "host stopped"])
def test_the_run_ends_by_itself_and_status_is_true_in_every_phase(client: Client, name: str) -> None:
    result = outcome_of(BY_NAME[name], client, random.Random(1), epochs=100)
    assert (result["outcome"], result["complete"], result["untrue"]) == ("done", True, [])
