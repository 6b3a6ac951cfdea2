"""A rank that never joins is named, with its host."""

from __future__ import annotations

import threading
from collections.abc import Collection
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from by_hand import outputs, start_ranks, train_argv
from processes import LONG_S, prepared

from maskfleet.config.base import replaced
from maskfleet.config.run import RunConfig
from maskfleet.errors import TrainingError
from maskfleet.training.ranks.joining import check_in, hosts_from_env, ranks_text

HOSTS = {"MASKFLEET_HOSTS": '[["oak", 2], ["elm", 2]]'}
# Two ranks that begin together: on a busy machine one may import torch many seconds later than the other.
TRAIN_TOGETHER = """
import pathlib, sys, time
import maskfleet.training.run
from maskfleet.cli.main import main
ready = pathlib.Path(sys.argv[1])
ready.touch()
while not all(ready.with_name(f"rank{rank}").exists() for rank in range(2)):
    time.sleep(0.01)
sys.argv = ["maskfleet", "train", sys.argv[2]]
main()
"""


class TimedOutStore(dist.HashStore):
    """A store that waits for ranks that come as long as it takes, and that knows at once which do not."""

    def __init__(self, absent: Collection[int]) -> None:
        super().__init__()
        self.missing = {f"maskfleet/joined/{rank}" for rank in absent}

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        super().wait([key for key in keys if key not in self.missing], timedelta(seconds=LONG_S))
        if not self.missing.isdisjoint(keys):
            raise dist.DistStoreError("timed out")


def check_in_together(ranks: list[int], world_size: int, env: dict[str, str], timeout_s: float) -> dict[int, object]:
    """What `check_in` returns or raises for each of `ranks`, which are threads with one store."""
    absent = {*range(world_size)} - {*ranks}
    store = TimedOutStore(absent) if 0 in ranks else dist.HashStore()  # without rank 0 only a timeout ends the wait
    results = dict[int, object]()

    def one(rank: int) -> None:
        try:
            results[rank] = check_in(store, rank, world_size, env=env, timeout_s=timeout_s)
        except TrainingError as error:
            results[rank] = error.what

    threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_every_rank_learns_the_host_of_every_rank() -> None:
    hosts = ["oak", "oak", "elm", "elm"]
    assert check_in_together([0, 1, 2, 3], 4, HOSTS, 60) == dict.fromkeys(range(4), hosts)


def test_ranks_that_do_not_join_are_named_with_their_host() -> None:
    text = "ranks 2-3 on elm did not join within 60 s; ranks 0-1 on oak did"
    assert check_in_together([0, 1], 4, HOSTS, 60) == {0: text, 1: text}


def test_a_rank_that_waits_in_vain_names_rank_0() -> None:
    assert check_in_together([1], 4, HOSTS, 0.1) == {1: "rank 0 on oak did not join within 0 s"}


def test_without_planned_hosts_the_ranks_that_joined_say_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "oak")
    found = check_in_together([0, 1], 4, {}, 60)
    assert found[1] == "ranks 2-3 did not join within 60 s; ranks 0-1 on oak did"


def test_hosts_must_have_as_many_ranks_as_there_are() -> None:
    assert hosts_from_env({}, 4) is None
    assert hosts_from_env(HOSTS, 4) == ["oak", "oak", "elm", "elm"]
    with pytest.raises(TrainingError, match="has 4 ranks, but there are 3"):
        hosts_from_env(HOSTS, 3)


def test_ranks_read_as_ranges() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([6, 0, 1, 2]) == "ranks 0-2, 6"


@pytest.mark.slow
def test_training_ends_when_a_rank_does_not_join(tmp_path: Path, micro: RunConfig) -> None:
    run_dir = prepared(tmp_path, replaced(micro, {"train.join_timeout_s": 10.0}))
    argvs = [["-c", TRAIN_TOGETHER, str(tmp_path / f"rank{rank}"), str(run_dir)] for rank in range(2)]
    ranks = start_ranks(argvs, world_size=4, env=HOSTS)
    for text in outputs(ranks):
        assert "ranks 2-3 on elm did not join within 10 s" in " ".join(text.split()), text
        assert "Traceback" not in text
    assert [process.returncode for process in ranks] == [2, 2]


@pytest.mark.slow
def test_a_rank_says_that_rank_0_does_not_join(tmp_path: Path, micro: RunConfig) -> None:
    argv = train_argv(prepared(tmp_path, replaced(micro, {"train.join_timeout_s": 5.0})))
    [rank] = start_ranks([argv], world_size=2, env={"RANK": "1"})
    [text] = outputs([rank])
    assert rank.returncode == 2
    assert "rank 0 at 127.0.0.1" in text, text
    assert "did not join within 5 s" in " ".join(text.split()), text
