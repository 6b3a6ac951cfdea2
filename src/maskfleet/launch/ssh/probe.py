"""Reports facts about a host to the doctor.

It is sent to that host and runs there alone: standard library only, and torch for `reduce`.

python3 probe.py '{"what": "facts", …}'      prints one JSON object
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import ipaddress
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MIB = 2**20
SPEED_MIB = 32
GPU_FIELDS = "index,name,memory.used,memory.total,utilization.gpu,ecc.errors.uncorrected.volatile.total,driver_version"


def facts(asked: dict[str, Any]) -> dict[str, Any]:
    """Versions, GPUs, free space, disk speed, data and which hosts are reachable from here."""
    root = Path(os.path.expanduser(asked["root"]))  # noqa: PTH111 - a leading ~ of any kind
    root.mkdir(parents=True, exist_ok=True)
    return {
        "time": time.time(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "maskfleet": _version("maskfleet"),
        "gpus": _gpus(),
        "shm_free": shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else None,  # noqa: S108
        "disk_free": shutil.disk_usage(root).free,
        "write_mib_per_s": _write_speed(root),
        "locks": takes_locks(root),
        "address": _own_address(asked["others"]),
        "open_sockets": _open_sockets(),
        "port_free": asked["port"] is None or _is_free(int(asked["port"])),
        "unreachable": [name for name, port in asked["others"] if not _reaches(name, int(port))],
        "data": _manifest(Path(os.path.expanduser(asked["data"]))) if asked.get("data") else None,  # noqa: PTH111
    }


def token(asked: dict[str, Any]) -> dict[str, Any]:
    """Write, read or remove the doctor's token."""
    path = Path(os.path.expanduser(asked["root"])) / ".maskfleet-doctor"  # noqa: PTH111
    if asked["do"] == "write":
        path.write_text(asked["token"])
    elif asked["do"] == "remove":
        path.unlink(missing_ok=True)
    return {"token": path.read_text() if path.exists() else None}


def reduce_over(asked: dict[str, Any]) -> dict[str, Any]:
    """Run this host's ranks of an all-reduce; returns what the first rank of all measured."""
    interface = _interface(asked["address"])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(asked["world_size"])}
    if interface:
        env = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface, **env}
    argv = [sys.executable, __file__, json.dumps({"what": "rank", **asked["store"]})]
    ranks = [
        subprocess.Popen(
            argv,
            env={**env, "RANK": str(asked["first_rank"] + local), "LOCAL_RANK": str(local)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for local in range(asked["slots"])
    ]
    deadline, measured, error = time.monotonic() + asked["timeout_s"], [], ""
    try:
        for one in ranks:
            out, err = one.communicate(timeout=max(1.0, deadline - time.monotonic()))
            measured += [line for line in out.splitlines() if line.startswith("{")]
            if one.returncode != 0:
                error = error or (err.strip().splitlines() or ["no output"])[-1]
    except subprocess.TimeoutExpired:
        error = f"no answer within {asked['timeout_s']} s"
    finally:
        for one in ranks:
            one.kill()
            one.communicate()
    if error:
        return {"error": error}
    return json.loads(measured[0]) if measured else {}


def rank(asked: dict[str, Any]) -> dict[str, Any]:
    """One rank of the all-reduce: checks the sum and measures the speed."""
    import datetime

    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    number, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    listening = socket.create_server((asked["address"], asked["port"])).detach() if number == 0 else None
    store = TCPStore(
        asked["address"],
        asked["port"],
        is_master=number == 0,
        timeout=datetime.timedelta(seconds=30),
        wait_for_workers=False,
        master_listen_fd=listening,
    )
    timeout = datetime.timedelta(seconds=30)
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=number, world_size=ranks, timeout=timeout)
    ones = torch.ones((256 if on_gpu else 8) * MIB // 4, device=device)
    dist.all_reduce(ones)
    right = bool((ones == ranks).all())
    started_at = time.monotonic()
    for _ in range(3):
        dist.all_reduce(ones)
    float(ones[0])  # waits for the device
    seconds = (time.monotonic() - started_at) / 3
    moved = 2 * (ranks - 1) / ranks * ones.numel() * 4  # bytes that each rank must send
    dist.destroy_process_group()
    return {"ranks": ranks, "right": right, "gb_per_s": moved / seconds / 1e9}


def own_address(asked: dict[str, Any]) -> dict[str, Any]:
    """The address at which the other hosts reach this one, the source of its route to them, and a free port there."""
    address = _own_address(asked["others"])
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return {"address": address, "port": probe.getsockname()[1]}


def _own_address(others: list[tuple[str, int]]) -> str:
    for name, _ in others:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((name, 9))
            except OSError:
                continue  # the name of the next one may resolve
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def _open_sockets() -> list[str]:
    """Listening sockets of runs on this host that are on all interfaces, or on an address of the internet."""
    sockets = {}
    for table in ("tcp", "tcp6"):
        path = Path("/proc/net") / table
        for fields in (line.split() for line in path.read_text().splitlines()[1:] if path.exists()):
            if fields[3] == "0A":  # listening
                sockets[f"socket:[{fields[9]}]"] = fields[1].partition(":")[::2]
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if b"\0MASKFLEET_JOB=" not in b"\0" + (process / "environ").read_bytes():
                continue
            targets = [os.readlink(link) for link in (process / "fd").iterdir()]  # noqa: PTH115 - not a path
        except OSError:
            continue  # it has exited, or belongs to another user
        for text, port in (sockets[target] for target in targets if target in sockets):
            words = [int(text[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(text), 8)]
            address = ipaddress.ip_address(b"".join(words))
            if address.is_unspecified or address.is_global:
                found.add(f"{address} port {int(port, 16)}")
    return sorted(found)


def _interface(address: str) -> str | None:
    import fcntl
    import struct

    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", os.fsencode(name)[:15]))
            except OSError:
                continue  # no IPv4 address
        if socket.inet_ntoa(answer[20:24]) == address:
            return name
    return None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> list[list[str]]:
    if shutil.which("nvidia-smi") is None:
        return []
    argv = ["nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader,nounits"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode != 0:
        return []
    return [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines()]


def _write_speed(root: Path) -> float:
    path, block = root / f".maskfleet-speed-{os.getpid()}", os.urandom(MIB)
    started_at = time.monotonic()
    try:
        with path.open("wb") as file:
            for _ in range(SPEED_MIB):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)
    return SPEED_MIB / (time.monotonic() - started_at)


def takes_locks(root: Path) -> bool:
    """Whether a file in `root` can be locked, as runs and their supervisors do."""
    import fcntl

    path = root / f".maskfleet-lock-{os.getpid()}"
    try:
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def _reaches(name: str, port: int) -> bool:
    try:
        with socket.create_connection((name, port), timeout=5):
            return True
    except OSError:
        return False


def _manifest(root: Path) -> str | None:
    """A digest of file names and sizes in the data folder; None if it does not exist."""
    if not root.is_dir():
        return None
    digest = hashlib.sha256()
    for folder, names, files in os.walk(root):
        names.sort()
        for name in sorted(files):
            if not name.startswith("."):
                path = Path(folder) / name
                digest.update(f"{path.relative_to(root)} {path.stat().st_size}\n".encode())
    return digest.hexdigest()[:16]


ANSWERS = {"facts": facts, "token": token, "reduce": reduce_over, "rank": rank, "address": own_address}

if __name__ == "__main__":
    question = json.loads(sys.argv[1])
    answer = ANSWERS[question["what"]](question)
    if question["what"] != "rank" or os.environ.get("RANK") == "0":
        print(json.dumps(answer))
