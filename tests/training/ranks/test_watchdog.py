"""A rank that hangs or dies ends the others soon, with an error that names it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from by_hand import kill, start_ranks, train_argv
from processes import ENV, LONG_S, prepared, wait_for_step

from maskfleet.config.base import replaced
from maskfleet.config.run import RunConfig
from maskfleet.errors import TrainingError
from maskfleet.training.distributed import Ranks, Worker
from maskfleet.training.ranks import watchdog
from maskfleet.training.ranks.watchdog import Watchdog

STUCK = """
import sys, time
import torch.distributed as dist
from maskfleet.training.ranks import watchdog
watchdog.POLL_S, watchdog.ANSWER_S, watchdog.EXIT_S = 0.05, 0.2, 0.5
dog = watchdog.Watchdog(dist.FileStore(sys.argv[1], 1), 0, ["oak", "elm"], timeout_s=0.1)
with dog.waiting("in a step"):
    time.sleep(600)
"""
HOSTS = {"MASKFLEET_HOSTS": '[["oak", 1], ["elm", 2]]'}


def endless(micro: RunConfig, **changes: object) -> RunConfig:
    schedule = {"train.epoch_schedule": ((4000, None),), "eval.every_epochs": 0, "train.images_per_gpu": 1}
    return replaced(micro, {**schedule, **changes})


@pytest.mark.slow
@pytest.mark.parametrize(("hung", "host"), [(2, "elm"), (0, "oak")])  # rank 0 serves the store
def test_a_hung_rank_ends_the_others_within_the_timeout(tmp_path: Path, micro: RunConfig, hung: int, host: str) -> None:
    run_dir = prepared(tmp_path, endless(micro, **{"train.peer_timeout_s": 10.0}))  # longer than a step ever takes
    ranks = start_ranks([train_argv(run_dir)] * 3, env=HOSTS)
    try:
        wait_for_step(ranks[0], run_dir, 3)
        ranks[hung].send_signal(signal.SIGSTOP)
        stopped_at = time.monotonic()
        others = [process for rank, process in enumerate(ranks) if rank != hung]
        printed = [process.communicate(timeout=LONG_S)[0] for process in others]
        print(f"the others ended after {time.monotonic() - stopped_at:.0f} s")
    finally:
        kill(ranks)
    for process, text in zip(others, printed, strict=True):
        assert process.returncode == 2, text
        assert f"no answer from rank {hung} on {host}" in " ".join(text.split()), text
        assert "Traceback" not in text


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent ranks are given up soon; nothing else depends on how busy the machine is."""
    monkeypatch.setattr(watchdog, "POLL_S", 0.02)
    monkeypatch.setattr(watchdog, "ANSWER_S", 0.3)
    monkeypatch.setattr(watchdog, "STORE_S", LONG_S)
    monkeypatch.setattr(watchdog, "EXIT_S", LONG_S)


def test_collectives_are_aborted_when_one_takes_too_long(quick: None) -> None:
    aborted = threading.Event()
    dog = Watchdog(dist.HashStore(), 0, ["oak", "elm"], timeout_s=0.1, abort=aborted.set)
    with dog.waiting("in a step"):
        assert aborted.wait(LONG_S)
        assert dog.lost() == "; no answer from rank 1 on elm"
    dog.stop()
    assert dog.aborted


def test_a_rank_that_is_busy_with_something_else_is_named(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "ANSWER_S", LONG_S)  # all of them answer
    store, hosts, aborted = dist.HashStore(), ["oak", "oak", "elm"], threading.Event()
    dogs = [Watchdog(store, rank, hosts, timeout_s=LONG_S, abort=aborted.set) for rank in range(3)]
    with dogs[0].waiting("in a step"), dogs[1].waiting("in a step"):
        assert dogs[0].lost() == "; rank 2 on elm did not get there"
        assert aborted.wait(LONG_S), "the result reaches the other rank that waits, long before its own timeout"
    for dog in dogs:
        dog.stop()


class SilentStore(dist.HashStore):
    """The store of a rank 0 that was stopped, or whose host was cut off: nothing returns."""

    silent = threading.Event()

    def clone(self) -> SilentStore:
        return self

    def check(self, keys: list[str]) -> bool:
        return self.silent.wait(LONG_S)


def test_a_store_that_never_answers_holds_nobody_up(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "STORE_S", 0.5)
    aborted = threading.Event()
    dog = Watchdog(SilentStore(), 1, ["oak", "elm"], timeout_s=0.1, abort=aborted.set)
    with dog.waiting("in a step"):
        assert aborted.wait(LONG_S)
        assert dog.lost() == "; no answer from rank 0 on oak, which serves the store"
    dog.stop()
    SilentStore.silent.set()


def test_nothing_is_aborted_while_ranks_respond(quick: None) -> None:
    dog = Watchdog(dist.HashStore(), 0, ["oak"], timeout_s=LONG_S)
    with dog.waiting("saving"), dog.waiting("in a step"):
        pass
    dog.stop()
    assert not dog.aborted


def test_an_exchange_ended_by_the_timeout_of_another_reports_the_lost_rank(quick: None) -> None:
    """Which of the buckets sees the timeout first is chance; here it is the one that nobody waits for yet."""
    store, hosts = dist.HashStore(), ["oak", "elm"]
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=LONG_S)), range(2)))
    dog = Watchdog(dist.HashStore(), 0, hosts, timeout_s=LONG_S)
    ranks = Ranks(Worker(0, 2, 0, 1), None, hosts, dog)
    works = [groups[0].allreduce([torch.ones(4)], reduce_within(timeout_s)) for timeout_s in (0.2, LONG_S)]
    with (
        pytest.raises(TrainingError, match=r"no answer from rank 1 on elm: .*pair closure"),
        ranks.reporting_lost_ranks("in a step"),
    ):
        works[1].wait()
    dog.stop()


def reduce_within(timeout_s: float) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=timeout_s)
    return options


@pytest.mark.slow
def test_a_rank_exits_when_aborting_does_not_help(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", STUCK, str(tmp_path / "store")]
    ended = subprocess.run(argv, env=ENV, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert ended.returncode == 2, ended.stderr
    assert "rank 0 is stuck while in a step; no answer from rank 1 on elm" in ended.stderr
