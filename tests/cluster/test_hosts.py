"""Faults of hosts, and paths that could do harm."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from client import Client, run_dir_of

SHORT = ("-s", "train.epoch_schedule=[[1, null]]", "-s", "eval.every_epochs=0")
NASTY = "a b'\"$(touch harm)`touch harm`;\n&"


@pytest.fixture
def known_hosts(client: Client) -> Iterator[Path]:
    """The client's known_hosts file, restored afterwards."""
    file = client.cluster.client_home / ".ssh" / "known_hosts"
    before = file.read_text() if file.exists() else None
    yield file
    file.unlink(missing_ok=True)
    if before is not None:
        file.write_text(before)


def refused(client: Client, *options: str) -> str:
    done = client(*client.options("--name", "refused", "--detach", *SHORT, *options))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "→" in done.stderr
    return done.stderr


def test_a_wheel_is_shipped_where_no_environment_is_named(client: Client) -> None:
    options = client.options("--name", "shipped", "--detach", *SHORT)
    at = next(i for i, text in enumerate(options) if text.startswith("environment="))
    options[at] = f"python={json.dumps(str(Path(sys.base_prefix) / 'bin' / 'python3'))}"
    done = client(*options)
    assert done.returncode == 0, done.stderr
    output = client.finish(done.stdout.strip())
    assert "training is done" in output
    made = list((client.cluster.shared / "environments").glob("*/lib/python3*/site-packages/maskfleet/__init__.py"))
    assert len(made) == 1


def test_folders_with_quotes_spaces_and_newlines_do_no_harm(client: Client) -> None:
    root = client.cluster.shared / NASTY
    root.mkdir()
    setting = f"run_root={json.dumps(str(root))}"
    done = client(*client.options("--name", "nasty", "--detach", *SHORT, "--launch-set", setting))
    assert done.returncode == 0, done.stderr
    handle = done.stdout.strip()
    assert run_dir_of(handle) == root / "runs" / "nasty"
    assert "training is done" in client.finish(handle)
    assert client("cancel", handle).returncode == 0
    assert not list(client.cluster.folder.rglob("harm"))
    shutil.rmtree(root)


def test_a_host_that_is_down_is_named(client: Client) -> None:
    client.cluster.cut_host(2)
    try:
        words = refused(client)
    finally:
        client.cluster.start_host(2)
    assert "host node2 cannot be reached" in words
    assert "node1" not in words


def test_a_host_that_rejects_the_key_is_named(client: Client) -> None:
    keys = client.cluster.folder / "home3" / ".ssh" / "authorized_keys"
    before = keys.read_text()
    keys.write_text("")
    try:
        words = refused(client)
    finally:
        keys.write_text(before)
    assert "host node3 does not accept your key" in words


def test_an_unknown_host_is_not_trusted_silently(client: Client, known_hosts: Path) -> None:
    known_hosts.unlink(missing_ok=True)
    options = [text for text in client.options("--name", "refused", "--detach", *SHORT) if text != "--accept-new"]
    done = client(*options)
    assert done.returncode == 2
    assert "the key of host node1 is not known" in done.stderr
    assert "--accept-new" in done.stderr


def test_a_host_whose_key_changed_is_rejected_even_with_accept_new(client: Client, known_hosts: Path) -> None:
    other = (client.cluster.folder / "home1" / "host_key.pub").read_text().split()
    known_hosts.write_text(f"{client.cluster.address(2)} {other[0]} {other[1]}\n")
    assert "the key of host node2 is not the one it had before" in refused(client)


def test_a_missing_python_is_named_with_its_host(client: Client) -> None:
    words = refused(client, "--launch-set", "environment=/nowhere/env")
    assert "host node1 failed" in words
    assert "/nowhere/env/bin/python" in words


def test_a_full_disk_is_named_with_its_host(client: Client) -> None:
    folder = client.cluster.shared / "full"
    folder.mkdir(exist_ok=True)
    client.cluster.fill_disk(1, folder)
    try:
        words = refused(client, "--launch-set", f"run_root={json.dumps(str(folder))}")
    finally:
        client.cluster.free_disk(1, folder)
    assert "host node1 cannot store" in words
    assert "disk is full" in words


def test_a_folder_that_is_not_shared_is_rejected(client: Client) -> None:
    words = refused(client, "--launch-set", "run_root=~/maskfleet")
    assert "is not shared between the hosts: node" in words


def test_a_fault_in_the_data_fails_the_run_after_its_restarts_and_is_explained(client: Client) -> None:
    done = client(*client.options("--name", "faulty", "--max-restarts", "1", *SHORT, "-s", "data.root=/nowhere"))
    assert done.returncode == 1
    assert "cause: missing data" in done.stderr
    handle = done.stdout.splitlines()[0]
    status = client.status(handle)
    assert (status["state"], status["restarts"]) == ("failed", 1)
    assert "there is no folder /nowhere" in client("explain", handle).stdout
    client.cluster.until_idle()
