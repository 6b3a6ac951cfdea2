"""Worker processes: what they learn of the program that starts them."""

from __future__ import annotations

import pickle
import sys
from multiprocessing import spawn
from pathlib import Path

import pytest

from maskfleet.system.workers.fork_server import main_hidden

WHERE_FROM = ("init_main_from_name", "init_main_from_path")


def of_main() -> None:
    """Stands for a function of the user's script."""


def test_a_hidden_main_is_not_run_again_in_workers_and_comes_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    main = sys.modules["__main__"]  # in a process of pytest-xdist it does not come from a file
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.setattr(main, "__file__", str(tmp_path / "script.py"), raising=False)
    before = spawn.get_preparation_data("worker")
    with main_hidden():
        assert not set(WHERE_FROM) & set(spawn.get_preparation_data("worker"))
    assert spawn.get_preparation_data("worker") == before
    assert set(WHERE_FROM) & set(before)


def test_what_a_hidden_main_defines_can_be_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_main, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "of_main", of_main, raising=False)
    with main_hidden():
        assert pickle.loads(pickle.dumps(of_main)) is of_main
