"""The transport that NCCL chose, read from lines as NCCL writes them (see transport.py for where they are from)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from maskfleet.errors import TrainingError
from maskfleet.training.distributed import Ranks, Worker
from maskfleet.training.ranks import transport
from maskfleet.training.ranks.transport import (
    efa_problem,
    own_log,
    parsed,
    recorded_nccl_log,
    report_transport,
    unused_efa,
)

EFA = """
NCCL version 2.21.5+cuda12.4
algo-1:18063:18063 [6] NCCL INFO NET/OFI Initializing aws-ofi-nccl 1.13.2-aws
algo-1:18063:18146 [6] NCCL INFO NET/OFI Selected Provider is efa (found 32 nics)
algo-1:18063:18146 [6] NCCL INFO Using network AWS Libfabric
algo-1:18063:20783 [6] NCCL INFO Channel 05/1 : 6[6] -> 10[2] [send] via NET/AWS Libfabric/1(2)/GDRDMA/Shared
algo-1:18063:20783 [6] NCCL INFO Channel 00/1 : 6[6] -> 7[7] via P2P/CUMEM/read
"""
NEW_EFA = """
host:6310:6318 [0] NCCL INFO NCCL version 2.28.9+cuda13.0
host:6310:6318 [0] NCCL INFO NET/OFI Selected provider is efa, fabric is efa-direct (found 16 nics)
host:6310:6318 [0] NCCL INFO Initialized NET plugin Libfabric
host:6310:6318 [0] NCCL INFO Assigned NET plugin Libfabric to comm
host:6310:6320 [0] NCCL INFO Channel 02/0 : 0[0] -> 8[0] [receive] via NET/Libfabric/0/GDRDMA
"""
SOCKETS = """
NCCL version 2.20.5+cuda12.4
user:695835:695835 [4] NCCL INFO NET/Plugin : Plugin load (libnccl-net.so) returned 2 : libnccl-net.so: cannot open \
shared object file: No such file or directory
user:695835:695835 [4] NCCL INFO NET/Plugin : No plugin found, using internal implementation
user:695835:695901 [4] NCCL INFO NET/IB : No device found.
user:695835:695901 [4] NCCL INFO NET/Socket : Using [0]eth0:192.168.1.14<0>
user:695835:695901 [4] NCCL INFO Using network Socket
user:695835:695901 [4] NCCL INFO Channel 00/0 : 4[4] -> 0[0] [send] via NET/Socket/0
user:695835:695901 [4] NCCL INFO Channel 00 : 4[4] -> 5[5] via SHM/direct/direct
"""
ONE_HOST = """
host:79:79 [0] NCCL INFO NCCL version 2.27.3+cuda12.9
host:79:90 [0] NCCL INFO Initialized NET plugin Socket
host:79:90 [0] NCCL INFO Assigned NET plugin Socket to comm
host:79:90 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
"""
INFINIBAND = """
H20:4015539:4015652 [0] NCCL INFO Using network IB
H20:4015539:4015652 [0] NCCL INFO Channel 07/0 : 0[0] -> 2[0] [receive] via NET/IB/3/GDRDMA
"""
OTHER_PROVIDER = EFA.replace("Provider is efa", "Provider is tcp;ofi_rxm")
ASKED = {"FI_PROVIDER": "efa"}


class TwoHosts(Ranks):
    """Rank 0 of two, whose other rank says the same from another host."""

    def __init__(self) -> None:
        super().__init__(Worker(0, 2, 0, 1), None, ("oak", "elm"))

    def gather(self, value: Any) -> list[Any]:
        return [value, value]

    def broadcast(self, value: Any) -> Any:
        return value

    def reporting_lost_ranks(self, doing: str) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.mark.parametrize(
    ("log", "text", "is_efa"),
    [
        (EFA, "NCCL 2.21.5: P2P (NVLink or PCIe), EFA with GPUDirect RDMA", True),
        (NEW_EFA, "NCCL 2.28.9: EFA with GPUDirect RDMA", True),
        (SOCKETS, "NCCL 2.20.5: shared memory, TCP sockets", False),
        (ONE_HOST, "NCCL 2.27.3: P2P (NVLink or PCIe)", False),
        (INFINIBAND, "NCCL: InfiniBand or RoCE with GPUDirect RDMA", False),
        (
            OTHER_PROVIDER,
            "NCCL 2.21.5: P2P (NVLink or PCIe), AWS Libfabric tcp;ofi_rxm with GPUDirect RDMA",
            False,
        ),
        ("", "NCCL: an unknown network", False),
    ],
)
def test_the_log_says_which_transport_is_used(log: str, text: str, is_efa: bool) -> None:
    assert str(parsed(log)) == text
    assert parsed(log).is_efa is is_efa


def test_a_job_that_asked_for_efa_and_has_none_is_an_error_that_names_the_hosts() -> None:
    problem = efa_problem(("oak", "oak", "elm"), [True, True, False], ASKED)
    assert problem == "the job asked for EFA (FI_PROVIDER=efa), but NCCL does not use it on elm"


def test_efa_is_needed_only_between_hosts_and_only_if_it_was_asked_for() -> None:
    assert efa_problem(("oak", "elm"), [False, False], {}) is None
    assert efa_problem(("oak", "oak"), [False, False], ASKED) is None
    assert efa_problem(("oak", "elm"), [True, True], ASKED) is None


def test_efa_that_is_there_and_not_used_is_a_warning_that_names_the_hosts() -> None:
    hosts, there = ("oak", "oak", "elm", "ash"), [True, True, True, False]
    warning = unused_efa(hosts, [False, False, True, False], there)
    assert warning is not None
    assert warning.startswith("oak has EFA, but NCCL does not use it: ")
    assert unused_efa(hosts, [True, True, True, False], there) is None
    assert unused_efa(("oak", "oak"), [False, False], [True, True]) is None


@pytest.mark.parametrize(("env", "is_error"), [({}, False), (ASKED, True)])
def test_ranks_that_could_use_efa_and_use_sockets_are_told_so(
    env: dict[str, str],
    is_error: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(transport, "_VERBS", tmp_path)
    monkeypatch.setattr(transport, "has_efa", lambda: True)
    monkeypatch.setattr(transport, "own_log", lambda env: SOCKETS)
    monkeypatch.setattr(transport.dist, "all_reduce", lambda tensor: None)
    monkeypatch.setattr(transport.torch, "zeros", lambda *shape, device: None)
    monkeypatch.setattr(transport.torch.cuda, "synchronize", lambda device: None)
    with pytest.raises(TrainingError, match="does not use it on elm, oak") if is_error else nullcontext():
        report_transport(TwoHosts(), torch.device("cuda"), env)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [one.partition(":")[0] for one in warnings] == (
        [] if is_error else ["elm, oak has EFA, but NCCL does not use it"]
    )


def test_nccl_writes_to_a_private_file_while_a_run_lasts(caplog: pytest.LogCaptureFixture) -> None:
    env, gpu = {"NCCL_DEBUG": "WARN"}, torch.device("cuda")

    def failing_run() -> None:
        with recorded_nccl_log(env, gpu):
            assert env["NCCL_DEBUG"] == "INFO"
            path = Path(env["NCCL_DEBUG_FILE"])
            assert path.stat().st_mode & 0o077 == 0
            assert own_log(env) is None
            path.write_text("a:1:1 [0] NCCL WARN the cable is loose\na:1:1 [0] NCCL INFO Using network Socket\n")
            assert parsed(own_log(env) or "").network == "Socket"
            raise ValueError("it fails")

    with pytest.raises(ValueError, match="it fails"):
        failing_run()
    assert env == {"NCCL_DEBUG": "WARN"}
    assert [record.message for record in caplog.records] == ["a:1:1 [0] NCCL WARN the cable is loose"]


@pytest.mark.parametrize("wanted", [{"NCCL_DEBUG": "INFO"}, {"NCCL_DEBUG_FILE": "/var/log/nccl.%h.%p"}])
def test_a_log_that_the_user_wants_elsewhere_stays_there(wanted: dict[str, str]) -> None:
    env = dict(wanted)
    with recorded_nccl_log(env, torch.device("cuda")):
        assert env == wanted
        assert own_log(env) is None


def test_without_gpus_nothing_is_reported() -> None:
    report_transport(Ranks(Worker(), None), torch.device("cpu"), ASKED)
