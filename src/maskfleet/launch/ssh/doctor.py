"""Can a cluster train? Checks all hosts at the same time; each finding has a remedy."""

from __future__ import annotations

import asyncio
import inspect
import ipaddress
import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from maskfleet.config.launch import SshLaunch
from maskfleet.errors import LaunchError
from maskfleet.launch.address import address_parts
from maskfleet.launch.findings import Finding, Verdict, judged
from maskfleet.launch.ssh import probe
from maskfleet.launch.ssh.connect import Ask, Connection, ask_on_terminal, connect
from maskfleet.launch.ssh.hosts import Cluster
from maskfleet.launch.supervise.job_files import Host
from maskfleet.system.process import remote_line

GIB = 2**30
MIN_PYTHON = (3, 11)
SKEW_S = 2.0
REDUCE_S = 40
OPEN_PORT = "let a firewall or security group admit the training hosts only: who reaches these ports can disturb a run"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Facts:
    """What the probe on a host reported."""

    host: Host
    report: dict[str, Any]
    skew_s: float


def examine_hosts(cluster: Cluster, *, data: str | None = None, ask: Ask = ask_on_terminal) -> list[Finding]:
    """Check every host of `cluster`, alone and together; `data` is the data folder on the hosts."""
    return asyncio.run(_examine(cluster, data, ask))


async def _examine(cluster: Cluster, data: str | None, ask: Ask) -> list[Finding]:
    hosts, launch = cluster.hosts, cluster.launch
    accept_new = launch.accept_new_host_keys
    opened = await asyncio.gather(
        *(connect(host.address, accept_new=accept_new, ask=ask, routes=cluster.routes) for host in hosts),
        return_exceptions=True,
    )
    findings, good = _sorted_out("login", hosts, opened, ok="key and host key accepted")
    try:
        return findings + await _examine_reached(launch, data, hosts, good)
    finally:
        for _, connection in good:
            connection.close()


async def _examine_reached(
    launch: SshLaunch, data: str | None, hosts: list[Host], good: list[tuple[Host, Connection]]
) -> list[Finding]:
    root = launch.run_root.rstrip("/")
    asked = {"what": "facts", "root": root, "port": launch.rendezvous_port, "data": data}
    answers = await asyncio.gather(
        *(_ask(launch, connection, asked | {"others": _others(hosts, host)}) for host, connection in good),
        return_exceptions=True,
    )
    findings, told = _sorted_out("python", [host for host, _ in good], answers)
    facts = [Facts(host, report, skew_s) for host, (report, skew_s) in told]
    for one in facts:
        findings += judge_host(one, needs_data=data is not None)
    findings += judge_together(facts)
    able = [(host, connection) for host, connection in good if any(one.host == host for one in facts)]
    if len(able) > 1:
        findings.append(await _shared(launch, able))
    if len(able) == len(hosts) and all(one.report["torch"] for one in facts):
        return [*findings, await _reduce(launch, able, hosts)]
    remedy = "fix the hosts that fail first; all must have torch"
    return [*findings, Finding("all", "all-reduce", Verdict.FAIL, "not tried", remedy)]


def _sorted_out(
    name: str, hosts: Sequence[Host], results: Sequence[T | BaseException], *, ok: str = ""
) -> tuple[list[Finding], list[tuple[Host, T]]]:
    """(findings `name` about hosts that failed, and with `ok` about the others; results of the others)."""
    findings, good = [], []
    for host, one in zip(hosts, results, strict=True):
        if isinstance(one, LaunchError):
            findings.append(Finding(host.address, name, Verdict.FAIL, one.what, one.remedy))
        elif isinstance(one, BaseException):
            raise one
        else:
            good.append((host, one))
            findings += [Finding(host.address, name, Verdict.OK, ok)] if ok else []
    return findings, good


def judge_host(facts: Facts, *, needs_data: bool) -> list[Finding]:
    """Findings about one host."""
    name, report = facts.host.address, facts.report
    release = tuple(int(part) for part in report["python"].split(".")[:2])
    is_open = [f"ranks listen on {one}" for one in report["open_sockets"]]
    if ipaddress.ip_address(report["address"]).is_global:
        is_open.append(f"ranks use {report['address']}, an address of the internet")
    rows: list[tuple[str, bool, Verdict, str, str]] = [
        ("python", release >= MIN_PYTHON, Verdict.FAIL, report["python"], "install Python 3.11 or newer there"),
        ("torch", report["torch"] is not None, Verdict.FAIL, str(report["torch"]), "pip install 'torch>=2.11' there"),
        ("clock", abs(facts.skew_s) < SKEW_S, Verdict.FAIL, f"{facts.skew_s:+.1f} s", "start an NTP client there"),
        ("port", report["port_free"], Verdict.WARN, "free" if report["port_free"] else "in use",
         "end the earlier run, or leave out rendezvous_port to take a free one"),
        ("open port", not is_open, Verdict.WARN, "; ".join(is_open) or "none", OPEN_PORT),
        ("reach", not report["unreachable"], Verdict.FAIL,
         f"does not reach {', '.join(report['unreachable'])}" if report["unreachable"] else "reaches all other hosts",
         "open all TCP ports between the hosts, and let their names resolve on each of them"),
        ("disk", report["disk_free"] > 10 * GIB, Verdict.WARN, f"{report['disk_free'] / GIB:.1f} GiB free",
         "a run needs about 2 GiB, an environment 6: free some, or use another run_root"),
        ("locks", report["locks"], Verdict.FAIL, "taken" if report["locks"] else "not taken by the folder of the runs",
         "mount it with locks: Lustre with the option flock, NFS without nolock"),
        ("write speed", report["write_mib_per_s"] > 20, Verdict.WARN, f"{report['write_mib_per_s']:.0f} MiB/s",
         "checkpoints will be slow: use another file system or more throughput"),
    ]  # fmt: skip
    if report["shm_free"] is not None:
        shm = report["shm_free"] / GIB
        rows.append(("shared memory", shm > 1, Verdict.WARN, f"{shm:.1f} GiB free", "enlarge /dev/shm (--shm-size=8g)"))
    if needs_data:
        there = report["data"] is not None
        rows.append(("data", there, Verdict.FAIL, report["data"] or "not there", "stage the data there"))
    findings = [judged(name, what, good, found, remedy, bad) for what, good, bad, found, remedy in rows]
    return findings + _judge_gpus(facts)


def _judge_gpus(facts: Facts) -> list[Finding]:
    name, gpus = facts.host.address, facts.report["gpus"]
    if not gpus:
        remedy = "training works on the CPU, slowly; install the driver"
        return [Finding(name, "gpu", Verdict.WARN, "none seen", remedy)]
    findings = []
    if len(gpus) < facts.host.slots:
        what = f"{len(gpus)} GPUs for {facts.host.slots} slots"
        findings.append(Finding(name, "gpus", Verdict.FAIL, what, "lower slots, or bring the missing GPUs back"))
    for index, model, used, total, busy, errors, _ in gpus:
        found = f"{model}, {used} of {total} MiB used, {busy} % busy, {errors} ECC errors"
        if errors.isdigit() and int(errors) > 0:
            findings.append(Finding(name, f"gpu {index}", Verdict.FAIL, found, "reset the GPU or replace the machine"))
        elif float(used) > 500 or (busy.isdigit() and int(busy) > 5):
            findings.append(Finding(name, f"gpu {index}", Verdict.WARN, found, "it is in use: see nvidia-smi"))
        else:
            findings.append(Finding(name, f"gpu {index}", Verdict.OK, found))
    return findings


def judge_together(facts: Sequence[Facts]) -> list[Finding]:
    """Whether the hosts have the same versions, drivers and data."""
    if len(facts) < 2:
        return []
    questions: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
        ("same python", lambda said: ".".join(said["python"].split(".")[:2]), "use one version of Python"),
        ("same torch", lambda said: said["torch"], "use one version of torch"),
        ("same driver", lambda said: sorted({gpu[6] for gpu in said["gpus"]}), "install one driver version"),
        ("same gpus", lambda said: sorted(gpu[1] for gpu in said["gpus"]), "the slowest GPU limits the speed"),
        ("same data", lambda said: said["data"], "stage the same data on all hosts"),
    ]
    findings = []
    for name, of, remedy in questions:
        values = {one.host.address: of(one.report) for one in facts}
        same = len({str(value) for value in values.values()}) == 1
        differing = ", ".join(f"{host}: {value}" for host, value in values.items())
        found = str(next(iter(values.values())) or "none") if same else differing
        bad = Verdict.WARN if name == "same gpus" else Verdict.FAIL
        findings.append(judged("all", name, same, found, remedy, bad))
    return findings


async def _shared(launch: SshLaunch, able: list[tuple[Host, Connection]]) -> Finding:
    """Whether all hosts can read a token that the first one wrote."""
    secret, root = secrets.token_hex(8), launch.run_root.rstrip("/")
    first = able[0][1]
    await _ask(launch, first, {"what": "token", "do": "write", "root": root, "token": secret})
    read = await asyncio.gather(
        *(_ask(launch, connection, {"what": "token", "do": "read", "root": root}) for _, connection in able)
    )
    await _ask(launch, first, {"what": "token", "do": "remove", "root": root})
    blind = [host.address for (host, _), (answer, _) in zip(able, read, strict=True) if answer["token"] != secret]
    if blind:
        what = f"{root}: {', '.join(blind)} cannot read what {able[0][0].address} wrote"
        return Finding("all", "shared folder", Verdict.FAIL, what, "mount one file system there on all hosts")
    return Finding("all", "shared folder", Verdict.OK, f"{root} is the same on all hosts")


async def _reduce(launch: SshLaunch, able: list[tuple[Host, Connection]], hosts: list[Host]) -> Finding:
    addresses = await asyncio.gather(
        *(_ask(launch, one, {"what": "address", "others": _others(hosts, host)}) for host, one in able)
    )
    first_ranks = [sum(host.slots for host, _ in able[:index]) for index in range(len(able))]
    world_size = sum(host.slots for host, _ in able)
    asked = {"what": "reduce", "world_size": world_size, "store": addresses[0][0], "timeout_s": REDUCE_S}
    answers = await asyncio.gather(
        *(
            _ask(launch, connection, asked | address | {"slots": host.slots, "first_rank": first_rank})
            for first_rank, (host, connection), (address, _) in zip(first_ranks, able, addresses, strict=True)
        )
    )
    said = [(host.address, answer) for (host, _), (answer, _) in zip(able, answers, strict=True)]
    errors = [f"{address}: {answer['error']}" for address, answer in said if "error" in answer]
    measured = next((answer for _, answer in said if "gb_per_s" in answer), None)
    remedy = "open all TCP ports between the hosts; see whether their versions of torch are equal"
    if errors or measured is None or not measured["right"]:
        return Finding("all", "all-reduce", Verdict.FAIL, "; ".join(errors) or "a wrong sum", remedy)
    return Finding("all", "all-reduce", Verdict.OK, f"{measured['ranks']} ranks, {measured['gb_per_s']:.2f} GB/s")


async def _ask(launch: SshLaunch, connection: Connection, question: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """(report of the probe on a host, seconds by which its clock is ahead of ours)."""
    root = launch.run_root.rstrip("/")
    script = f"{root}/.maskfleet-probe-{address_parts(connection.address)[1]}.py"
    if question["what"] == "facts":
        await connection.put(script, inspect.getsource(probe).encode())
    python = f"{launch.environment.rstrip('/')}/bin/python" if launch.environment else launch.python
    before = time.time()
    done = await connection.run(remote_line([python, script, json.dumps(question)]), timeout_s=REDUCE_S + 15)
    if done.code != 0:
        said = (done.err.strip() or done.out.strip() or f"code {done.code}").splitlines()[-1]
        raise LaunchError(
            f"host {connection.address}: {said}", remedy="install Python 3.11 or newer there, and check run_root"
        )
    answer = json.loads(done.out.strip().splitlines()[-1])
    now = float(answer.get("time", before))
    ahead = max(0.0, now - time.time()) + min(0.0, now - before)  # beyond the duration of the request
    return answer, ahead


def _others(hosts: list[Host], own: Host) -> list[tuple[str, int]]:
    parts = [address_parts(host.address) for host in hosts if host != own]
    return [(name, port or 22) for _, name, port in parts]
