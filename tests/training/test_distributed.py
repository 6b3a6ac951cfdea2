"""Several ranks: the same numbers as one, and a clear end when one dies."""

from __future__ import annotations

import math
import os
import pickle
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from processes import ENV, LONG_S, as_ranks, children_of, prepared, rank_of, start, wait_for_step
from safetensors.torch import load_file

from maskfleet.config.base import replaced
from maskfleet.config.load import write_run_file
from maskfleet.config.run import RunConfig
from maskfleet.errors import TrainingError
from maskfleet.system.network import listeners, listening_socket
from maskfleet.system.rank_variables import ATTEMPT, STORE_SOCKET
from maskfleet.training.distributed import Worker, _decoded, _encoded, open_store, worker_from_env
from ports import free_port


def test_launchers_say_who_a_process_is() -> None:
    ours = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    mpirun = {
        f"OMPI_COMM_WORLD_{k}": v for k, v in {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items()
    }
    assert worker_from_env(ours) == worker_from_env(mpirun) == Worker(3, 4, 1, 2)
    assert worker_from_env({}) == Worker(0, 1, 0, 1)
    assert worker_from_env({}).is_chief


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"RANK": ""}, "RANK is '' in the environment, not a number"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two' in the environment, not a number"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK is '-1' in the environment, not a number"),
        ({"RANK": "2"}, "RANK is 2, but WORLD_SIZE is 2"),
    ],
)
def test_a_rank_that_cannot_be_is_an_error(changed: dict[str, str], what: str) -> None:
    with pytest.raises(TrainingError) as caught:
        worker_from_env({"RANK": "1", "WORLD_SIZE": "2", **changed})
    assert caught.value.what == what
    assert "unset RANK and WORLD_SIZE" in caught.value.remedy


def test_a_port_that_is_no_number_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="MASTER_PORT is 'http' in the environment, not a number"):
        open_store(Worker(0, 2, 0, 2), {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "http"}, tmp_path)


def test_ranks_on_several_machines_must_be_told_where_to_meet(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="have no rendezvous address") as caught:
        open_store(Worker(0, 4, 0, 2), {}, tmp_path)
    assert "MASTER_ADDR" in caught.value.remedy


def test_ranks_of_one_mpirun_meet_in_a_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    job = {"PMIX_NAMESPACE": "job1"}
    stores = [open_store(Worker(rank, 2, rank, 2), job, tmp_path) for rank in range(2)]
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"
    [file] = (tmp_path / ".store").iterdir()
    assert stat.filemode(file.stat().st_mode) == "-rw-------"
    assert stat.filemode(file.parent.stat().st_mode) == "drwx------"
    other = open_store(Worker(0, 2, 0, 2), {"PMIX_NAMESPACE": "job2"}, tmp_path)
    assert not other.check(["key"])
    del stores
    assert file not in (tmp_path / ".store").iterdir(), "the last rank that closes it removes it"


def test_rank_0_listens_on_the_one_address_that_it_was_given(tmp_path: Path) -> None:
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    before = listeners([os.getpid()])
    store = open_store(Worker(0, 2, 0, 2), env, tmp_path)
    [new] = [one for one in listeners([os.getpid()]) if one not in before]
    assert (new.address, new.port) == ("127.0.0.1", int(env["MASTER_PORT"]))
    with pytest.raises(TrainingError, match=r"rank 0 cannot listen on 127\.0\.0\.1, port") as caught:
        open_store(Worker(0, 2, 0, 2), env, tmp_path)
    assert "ss -ltnp" in caught.value.remedy
    del store


def test_rank_0_takes_the_socket_that_it_inherited_and_ranks_of_another_attempt_stay_apart(tmp_path: Path) -> None:
    with listening_socket("127.0.0.1") as listening:
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listening.getsockname()[1])}
        server = open_store(Worker(0, 2, 0, 1), {**env, STORE_SOCKET: str(os.dup(listening.fileno()))}, tmp_path)
    server.set("key", "value")
    assert open_store(Worker(1, 2, 0, 1), env, tmp_path).get("key") == b"value"
    assert not open_store(Worker(1, 2, 0, 1), {**env, ATTEMPT: "1"}, tmp_path).check(["key"])


def test_messages_keep_every_bit_and_do_not_unpickle(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path}/harm",)

    value = {"sums": [0.1, 1e-310, -0.0, math.inf, 2**0.5], "none": None, "text": "é", "ids": [2**60]}
    assert repr(_decoded(_encoded(value))) == repr(value)
    assert math.isnan(_decoded(_encoded(math.nan)))
    message = torch.frombuffer(bytearray(_encoded("x" * 200).numpy().tobytes()), dtype=torch.uint8)
    bomb = pickle.dumps(Bomb())
    message[8 : 8 + len(bomb)] = torch.frombuffer(bytearray(bomb), dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"codec|Expecting"):
        _decoded(message)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_two_ranks_of_two_images_have_the_gradients_of_one_rank_of_four(tmp_path: Path, micro: RunConfig) -> None:
    """At a rate of 1 without momentum and decay the weights move by the gradients. Samples belong to the image."""
    write_run_file(tmp_path, micro)
    script = [str(Path(__file__).with_name("one_step.py")), str(tmp_path)]
    subprocess.run([sys.executable, *script, str(tmp_path / "one")], env=ENV, check=True, timeout=LONG_S)
    two = as_ranks(2, tmp_path, [*script, str(tmp_path / "two")])
    subprocess.run(two, env=ENV, check=True, timeout=LONG_S)
    one, two = load_file(tmp_path / "one"), load_file(tmp_path / "two")
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert float((value - two[name]).abs().max()) <= 1e-6, name


def endless(micro: RunConfig) -> RunConfig:
    return replaced(
        micro, {"train.epoch_schedule": ((400, None),), "eval.every_epochs": 0, "checkpoint.every_epochs": 5}
    )


def kill_rank(launcher: int, rank: int, name: str = "RANK") -> None:
    victims = [child for child in children_of(launcher) if rank_of(child, name) == rank]
    assert victims, "the rank has no process"
    os.kill(victims[0], signal.SIGKILL)


@pytest.mark.slow
def test_a_training_ends_naming_the_rank_that_died(tmp_path: Path, micro: RunConfig) -> None:
    process = start(prepared(tmp_path, endless(micro)), ranks=2)
    wait_for_step(process, tmp_path, 3)
    kill_rank(process.pid, 1)
    killed_at = time.monotonic()
    output, _ = process.communicate(timeout=LONG_S)
    print(f"it ended {time.monotonic() - killed_at:.1f} s after the rank")
    assert process.returncode != 0
    assert "no answer from rank 1" in output, output
    assert "rank 1 ended with code 137" in output
    assert not list(tmp_path.glob(".ranks*"))
    assert not any(rank_of(child) is not None for child in children_of(process.pid))


@pytest.mark.slow
def test_mpirun_ends_naming_the_rank_that_died(tmp_path: Path, micro: RunConfig) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed: `make test-tools` installs Open MPI where it may")
    run_dir = prepared(tmp_path, endless(micro))
    process = subprocess.Popen(
        [
            "mpirun",
            "--allow-run-as-root",
            "--oversubscribe",
            "-np",
            "2",
            sys.executable,
            "-m",
            "maskfleet",
            "train",
            str(run_dir),
        ],
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    wait_for_step(process, run_dir, 3)
    kill_rank(process.pid, 1, "OMPI_COMM_WORLD_RANK")
    output, _ = process.communicate(timeout=LONG_S)
    assert process.returncode != 0
    assert "rank 1" in output, output


@pytest.mark.slow
def test_a_rank_that_dies_in_evaluation_does_not_leave_the_others_waiting(tmp_path: Path, micro: RunConfig) -> None:
    """Started by hand, so that no launcher cleans up: the survivor itself must notice and say who is gone."""
    config = replaced(micro, {"eval.every_epochs": 1, "train.epoch_schedule": ((400, None),)})
    run_dir = prepared(tmp_path, config)
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "maskfleet", "train", str(run_dir)],
            env={**ENV, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        wait_for_step(ranks[0], run_dir, 4)
        ranks[1].send_signal(signal.SIGSTOP)  # so that the other waits for it in a step or in the evaluation
        time.sleep(1)
        ranks[1].kill()
        output, _ = ranks[0].communicate(timeout=LONG_S)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert ranks[0].returncode not in (0, None)
    assert "no answer from rank 1" in output, output
    assert "Traceback" not in output
