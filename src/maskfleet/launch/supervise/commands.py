"""The command lines and environment with which torchrun or mpirun starts the ranks of a job."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from maskfleet.errors import LaunchError
from maskfleet.launch.supervise.job_files import Endpoint, Job
from maskfleet.launch.supervise.processes import JOB_VARIABLE, job_id
from maskfleet.system.network import interface_with

PORTS = 16  # each new rendezvous takes the next port: the previous one may still be in TIME_WAIT
JOIN_S = 600  # how long the remaining hosts wait for enough others
LOCK_S = 180  # a file server takes a minute or two to release the locks of a dead machine
SAVE_GRACE_S = 60  # grace period for a rank to save after SIGTERM
_ADDRESS = re.compile(r"(?:(?P<user>[^@]+)@)?(?P<host>\[[^\]]+\]|[^:\[\]]+)(?::(?P<port>\d+))?")


def environment(job: Job, run_dir: Path, index: int, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of every process of the job on host `index`."""
    env = {**base, "PYTHONUNBUFFERED": "1", **job.env, JOB_VARIABLE: job_id(run_dir)}
    env["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = "[rank${rank}]: "
    # With one shared store for all attempts, the ranks of a new attempt would find the addresses of dead ranks.
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if len(job.hosts) > 1:
        interface = interface_with(local_address(job, index))
        if interface is not None:
            env.setdefault("GLOO_SOCKET_IFNAME", interface)
            env.setdefault("NCCL_SOCKET_IFNAME", interface)
    return env


def train_command(run_dir: Path) -> list[str]:
    """The command of every rank; a lost host may hold the run's lock until its file server releases it."""
    return ["-m", "maskfleet", "train", str(run_dir), "--wait", str(LOCK_S)]


def torchrun(job: Job, run_dir: Path, logs: Path, *, index: int, endpoint: Endpoint) -> list[str]:
    """torchrun on host `index`, with its rendezvous at `endpoint`."""
    argv = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={job.hosts[index].slots}"]
    argv += [f"--max-restarts={job.max_restarts}", f"--log-dir={logs}", "--tee=3", f"--shutdown-timeout={SAVE_GRACE_S}"]
    if len(job.hosts) == 1:
        argv.append("--standalone")
    else:
        is_host = "true" if index == endpoint.host else "false"
        argv += [
            f"--nnodes={job.min_nodes}:{len(job.hosts)}",
            "--rdzv-backend=c10d",
            f"--rdzv-id={job.name}-{endpoint.generation}",
            f"--rdzv-endpoint={bracketed(endpoint.address)}:{port_of(job, endpoint.generation)}",
            f"--rdzv-conf=is_host={is_host},join_timeout={JOIN_S},last_call_timeout=10,read_timeout=30",
            f"--local-addr={local_address(job, index)}",
        ]
    return [*argv, *train_command(run_dir)]


def mpirun(job: Job, run_dir: Path, logs: Path, *, hosts: Mapping[int, str], generation: int) -> list[str]:
    """Open MPI's mpirun across `hosts` (index to address), started on the first of them."""
    hostfile = logs / "hostfile"
    hostfile.write_text("".join(f"{address} slots={job.hosts[index].slots}\n" for index, address in hosts.items()))
    slots = sum(job.hosts[index].slots for index in hosts)
    first = next(iter(hosts.values()))
    argv = ["mpirun", "--hostfile", str(hostfile), "-np", str(slots), "--bind-to", "none", "--map-by", "slot"]
    argv += ["--tag-output", "--output-filename", str(logs), "--mca", "plm_rsh_no_tree_spawn", "1"]
    argv += ["--mca", "plm_rsh_args", "-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5"]
    argv += ["--mca", "orte_launch_agent", f"env {JOB_VARIABLE}={job_id(run_dir)} orted"]
    argv += ["--mca", "btl", "tcp,self"]
    argv += ["-x", f"MASTER_ADDR={first}", "-x", f"MASTER_PORT={port_of(job, generation)}"]
    for name in ("PATH", "PYTHONUNBUFFERED", *sorted(job.env)):
        argv += ["-x", name]
    return [*argv, sys.executable, "-m", "maskfleet.launch.supervise.rank", str(run_dir)]


def port_of(job: Job, generation: int) -> int:
    """Port of the rendezvous of a generation."""
    return job.port + generation % PORTS


def address_parts(address: str) -> tuple[str | None, str, int | None]:
    """(user, host, SSH port) of `user@host:port`."""
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise LaunchError(f"{address!r} is not a host", remedy="write host, user@host or user@host:port")
    return match["user"], match["host"].strip("[]"), int(match["port"]) if match["port"] else None


def bare_address(address: str) -> str:
    """`user@host:port` without user and SSH port."""
    return address_parts(address)[1]


def bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def local_address(job: Job, index: int) -> str:
    """The address at which the other hosts reach host `index`, which is this one: the source of its route to them."""
    for other in (host for number, host in enumerate(job.hosts) if number != index):
        try:
            family, kind, _, _, target = socket.getaddrinfo(bare_address(other.address), 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(target)  # a datagram socket: chooses a route, sends nothing
                return str(probe.getsockname()[0])
        except OSError:
            continue  # this name does not resolve, or there is no route; another may
    return bare_address(job.hosts[index].address)
