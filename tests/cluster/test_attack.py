"""Strangers on the network of the hosts: they reach the port of the ranks, and run no code with it."""

from __future__ import annotations

import base64
import os
import pickle
import socket
import struct
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from client import Client, run_dir_of, until
from processes import losses

from cluster import Cluster
from maskfleet.launch.supervise.job_files import JobFolder
from maskfleet.training.output.metrics import read_metrics

MEDIUM = ("-s", "eval.every_epochs=0", "-s", "checkpoint.every_epochs=5", "-s", "train.epoch_schedule=[[40, null]]")
EPOCHS = 250  # of the run that is attacked: it must outlast the search for its store


class Bomb:
    """Runs a command where it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch '{self.target}'",)


def listening(cluster: Cluster, number: int) -> list[tuple[str, int]]:
    """(address in hexadecimal, port) of every listening socket of a host but its sshd."""
    found = []
    for table in ("tcp", "tcp6"):
        for line in cluster.inside(number, "cat", f"/proc/net/{table}").stdout.splitlines()[1:]:
            fields = line.split()
            address, port = fields[1].split(":")
            if fields[3] == "0A" and int(port, 16) != 22:
                found.append((address, int(port, 16)))
    return found


def is_store(address: str, port: int) -> bool:
    """Whether torch's store listens there: torch's own client would wait for a port of gloo without end."""
    validate, ping = struct.pack("<BI", 0, 0x3C85F7CE), struct.pack("<BI", 13, 77)  # as in TCPStoreBackend.hpp
    try:
        with socket.create_connection((address, port), timeout=1) as connection:
            connection.sendall(validate + ping)
            return connection.recv(4) == struct.pack("<I", 77)
    except OSError:
        return False


def attack(address: str, port: int, run: str, bomb: bytes) -> None:
    """Write `bomb` into every key of the store at `address`."""
    store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=9), wait_for_workers=False)
    # torchrun kept its state under this key, in base 64, and unpickled it every few seconds.
    for generation in range(3):
        store.set(f"torch.rendezvous.{run}-{generation}", base64.b64encode(bomb))
    for key in store.list_keys():
        if not key.startswith("torch.rendezvous"):
            store.set(key, bomb)


def test_a_stranger_who_reaches_the_store_runs_no_code_and_the_run_finishes(client: Client) -> None:
    cluster = client.cluster
    handle = client.launched("--name", "attacked", *MEDIUM[:-1], f"train.epoch_schedule=[[{EPOCHS}, null]]")
    run_dir = run_dir_of(handle)
    until(lambda: any(record["step"] >= 5 for record in read_metrics(run_dir)))
    sockets = {number: listening(cluster, number) for number in (1, 2, 3)}
    target = cluster.shared / "harm"
    bomb = pickle.dumps(Bomb(target))
    places = [(cluster.address(number), port) for number, found in sockets.items() for _, port in found]
    stores = [place for place in places if is_store(*place)]
    assert stores, "the ranks have a store on the network of the hosts"
    for address, port in stores:
        attack(address, port, "attacked", bomb)
    attacked_at = read_metrics(run_dir)[-1]["step"]
    client("logs", "-f", handle)
    assert not target.exists(), "what was written to the store ran as the user who trains"
    client.finish(handle)
    assert read_metrics(run_dir)[-1]["step"] == EPOCHS * 4 > attacked_at
    everywhere = [found for of_host in sockets.values() for found in of_host if not int(found[0], 16)]
    assert everywhere == [], "no socket listens on all interfaces"


def test_two_runs_on_the_same_hosts_at_the_same_time_do_not_meet(client: Client) -> None:
    first, second = (client.launched("--name", name, *MEDIUM) for name in ("twin-1", "twin-2"))
    client.finish(first)
    client.finish(second)
    ports = []
    for handle in (first, second):
        endpoint = JobFolder(run_dir_of(handle)).endpoint()
        assert endpoint is not None
        ports.append(endpoint.port)
        assert client.status(handle)["restarts"] == 0
    assert ports[0] != ports[1]
    assert losses(run_dir_of(first)) == losses(run_dir_of(second))
    assert len(losses(run_dir_of(first))) == 40 * 4
