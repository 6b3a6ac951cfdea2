"""The command lines and environments with which a supervisor or mpirun starts the ranks of a job."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from socket import socket

from maskfleet.errors import MaskfleetError
from maskfleet.launch.address import bare_address
from maskfleet.launch.supervise.child import Child, Mpirun, NotStarted, RankProcesses, rank_variables
from maskfleet.launch.supervise.job_files import Endpoint, Job, JobFolder
from maskfleet.launch.supervise.membership import ranks_folder, store_folder
from maskfleet.launch.supervise.processes import JOB_VARIABLE, job_id, kill_all
from maskfleet.launch.supervise.state.kept_lines import KeptLines
from maskfleet.system.network import interface_with, source_address
from maskfleet.system.rank_variables import ATTEMPT, HOSTS, STORE_FILE, STORE_SOCKET, hosts_value

ADDRESS = "MASKFLEET_HOST_ADDRESS"  # environment: the address of this host, where whoever starts it knows that
STOPPED = "stopped"  # file in the host's folder: a rank under mpirun got a stop request, and saved
LOCK_S = 180  # a file server takes a minute or two to release the locks of a dead machine


def environment(job: Job, run_dir: Path, index: int, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of every process of the job on host `index`."""
    return {**base, "PYTHONUNBUFFERED": "1", **job.env, JOB_VARIABLE: job_id(run_dir)} | _interfaces(job, index, base)


def _interfaces(job: Job, index: int, base: Mapping[str, str]) -> dict[str, str]:
    """The variables by which gloo and NCCL use the interface that leads to the other hosts, unless they are set."""
    if len(job.hosts) == 1 or STORE_FILE in base:
        return {}  # ranks that share a host choose the loopback interface
    interface = interface_with(local_address(job, index))
    if interface is None:
        return {}
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: interface for name in names if name not in base and name not in job.env}


def start_child(
    job: Job,
    folder: JobFolder,
    index: int,
    endpoint: Endpoint,
    hosts: Mapping[int, str],
    listening: socket | None,
    output: KeptLines,
) -> Child:
    """Start the ranks of host `index`, or mpirun for those of all members; `hosts` has the addresses of those alive.

    Rank 0 inherits the `listening` socket. mpirun would close it: there rank 0 listens on its port after us. What
    cannot be started has ended already, with an error in the output.
    """
    logs = ranks_folder(folder, index, endpoint.generation)
    logs.mkdir(exist_ok=True)  # not its parents: the run may have been deleted
    os.utime(logs)  # the folder may be left from before the job was launched again
    store = store_folder(folder, index, endpoint.generation) / "ranks"
    shutil.rmtree(store.parent, ignore_errors=True)
    run_dir, cwd = folder.run_dir, Path(job.cwd).expanduser()
    try:
        if job.starter == "mpirun":
            env = environment(job, run_dir, index, os.environ)
            if os.getuid() == 0:
                env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            for stale in folder.path.glob(f"host-*/{STOPPED}"):
                stale.unlink(missing_ok=True)
            members = {host: address for host, address in hosts.items() if host in endpoint.members}
            argv = mpirun(job, run_dir, logs, hosts=members, endpoint=endpoint, store=store)
            return Mpirun(argv, cwd=cwd, env=env, output=output, job=job_id(run_dir))
        ranks = rank_environments(job, run_dir, index=index, endpoint=endpoint, base=os.environ, store=store)
        if listening is not None:
            ranks[0][STORE_SOCKET] = str(listening.fileno())
        argv = [sys.executable, *train_command(run_dir)]
        return RankProcesses(argv, ranks, cwd=cwd, output=output, job=job_id(run_dir))
    except MaskfleetError as error:  # no such folder, no mpirun, no more processes
        kill_all(job_id(run_dir))  # of several ranks, some may have started
        return NotStarted(error, output)


def train_command(run_dir: Path) -> list[str]:
    """The command of every rank; a lost host may hold the run's lock until its file server releases it."""
    return ["-m", "maskfleet", "train", str(run_dir), "--wait", str(LOCK_S)]


def rank_environments(
    job: Job, run_dir: Path, *, index: int, endpoint: Endpoint, base: Mapping[str, str], store: Path
) -> list[dict[str, str]]:
    """The environment of each rank of host `index`; ranks that share one host meet in the file `store`."""
    slots = [job.hosts[member].slots for member in endpoint.members]
    place = endpoint.members.index(index)
    first, own, world_size = sum(slots[:place]), slots[place], sum(slots)
    if len(endpoint.members) == 1:
        meeting = {STORE_FILE: str(store)}
    else:
        meeting = {"MASTER_ADDR": endpoint.address, "MASTER_PORT": str(endpoint.port)}
    env = environment(job, run_dir, index, {**base, **meeting})
    named = [(bare_address(job.hosts[member].address), job.hosts[member].slots) for member in endpoint.members]
    env |= {ATTEMPT: str(endpoint.generation), HOSTS: hosts_value(named)}
    return [env | rank_variables(first + local, world_size, local, own) for local in range(own)]


def mpirun(
    job: Job, run_dir: Path, logs: Path, *, hosts: Mapping[int, str], endpoint: Endpoint, store: Path
) -> list[str]:
    """Open MPI's mpirun across `hosts` (index to address), started on the first of them."""
    hostfile = logs / "hostfile"
    hostfile.write_text("".join(f"{address} slots={job.hosts[index].slots}\n" for index, address in hosts.items()))
    slots = sum(job.hosts[index].slots for index in hosts)
    argv = ["mpirun", "--hostfile", str(hostfile), "-np", str(slots), "--bind-to", "none", "--map-by", "slot"]
    argv += ["--tag-output", "--output-filename", str(logs), "--mca", "plm_rsh_no_tree_spawn", "1"]
    argv += ["--mca", "plm_rsh_args", "-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5"]
    marks = f"{JOB_VARIABLE}={job_id(run_dir)} {ATTEMPT}={endpoint.generation}"  # by which supervisors find the daemon
    argv += ["--mca", "orte_launch_agent", f"env {marks} orted"]
    argv += ["--mca", "btl", "tcp,self"]
    named = [(bare_address(job.hosts[index].address), job.hosts[index].slots) for index in hosts]
    given = {ATTEMPT: str(endpoint.generation), HOSTS: hosts_value(named)}
    if len(hosts) == 1:
        given |= {STORE_FILE: str(store)}
    else:
        given |= {"MASTER_ADDR": endpoint.address, "MASTER_PORT": str(endpoint.port)}
    for name, value in given.items():
        argv += ["-x", f"{name}={value}"]
    for name in ("PATH", "PYTHONUNBUFFERED", *sorted(job.env)):
        argv += ["-x", name]
    return [*argv, sys.executable, "-m", "maskfleet.launch.supervise.rank", str(run_dir)]


def local_address(job: Job, index: int) -> str:
    """The address at which the other hosts reach host `index`, which is this one: the source of its route to them."""
    if ADDRESS in os.environ:
        return os.environ[ADDRESS]
    for other in (host for number, host in enumerate(job.hosts) if number != index):
        try:
            return source_address(bare_address(other.address))
        except OSError:
            continue  # this name does not resolve, or there is no route; another may
    return bare_address(job.hosts[index].address)
