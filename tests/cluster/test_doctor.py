"""The health check of a cluster, on three hosts."""

from __future__ import annotations

import json
import time
from typing import Any

from client import Client


def doctor(client: Client, *more: str) -> tuple[int, list[dict[str, Any]]]:
    options = [text for text in client.options(*more) if text not in ("launch", "-c", str(client.run_file))]
    done = client("doctor", "-c", str(client.run_file), *options, "--json")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def verdicts(findings: list[dict[str, Any]], name: str) -> dict[str, str]:
    return {finding["host"]: finding["verdict"] for finding in findings if finding["name"] == name}


def test_a_healthy_cluster_passes_within_a_minute_with_a_real_all_reduce(client: Client) -> None:
    started_at = time.monotonic()
    code, findings = doctor(client)
    elapsed_s = time.monotonic() - started_at
    print(f"the doctor took {elapsed_s:.1f} s")
    assert code == 0, findings
    every = {"node1": "ok", "node2": "ok", "node3": "ok"}
    for name in ("login", "python", "torch", "clock", "reach", "data"):
        assert verdicts(findings, name) == every
    assert verdicts(findings, "shared folder") == {"all": "ok"}
    assert verdicts(findings, "same data") == {"all": "ok"}
    [reduced] = [finding for finding in findings if finding["name"] == "all-reduce"]
    assert reduced["verdict"] == "ok"
    assert reduced["found"].startswith("3 ranks, ")
    assert not list(client.cluster.shared.glob(".maskfleet-doctor"))


def test_a_host_that_is_down_fails_and_the_others_are_still_checked(client: Client) -> None:
    client.cluster.cut_host(2)
    try:
        code, findings = doctor(client)
    finally:
        client.cluster.start_host(2)
    assert code == 1
    assert verdicts(findings, "login") == {"node1": "ok", "node2": "fail", "node3": "ok"}
    assert verdicts(findings, "reach") == {"node1": "fail", "node3": "fail"}
    assert verdicts(findings, "all-reduce") == {"all": "fail"}
    assert all(finding["remedy"] for finding in findings if finding["verdict"] != "ok")


def test_a_folder_that_is_not_shared_is_found(client: Client) -> None:
    code, findings = doctor(client, "--launch-set", "run_root=~/maskfleet")
    assert code == 1
    assert verdicts(findings, "shared folder") == {"all": "fail"}


def test_a_host_behind_a_jump_host_is_reached_through_it(client: Client) -> None:
    config = client.cluster.client_home / ".ssh" / "config"
    before = config.read_text()
    config.write_text(f"{before}Host far\n  HostName {client.cluster.address(3)}\n  User root\n  ProxyJump node1\n")
    log = client.cluster.folder / "home3" / "sshd.log"
    doctor(client)  # records the host keys
    seen = len(log.read_text())
    options = client.options()
    options[options.index("--hosts") + 1] = "far"
    try:
        done = client(
            "doctor", *(text for text in options if text not in ("launch", "-c", str(client.run_file))), "--json"
        )
    finally:
        config.write_text(before)
    assert done.stdout, done.stderr
    assert verdicts(json.loads(done.stdout), "login") == {"far": "ok"}, done.stdout
    news = log.read_text()[seen:]
    assert f"Accepted publickey for root from {client.cluster.address(1)} " in news
    assert f"Accepted publickey for root from {client.cluster.network}.1 " not in news
