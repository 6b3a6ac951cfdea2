"""Files per second of `maskfleet data stage` beside `aws s3 cp --recursive` and s5cmd, with an S3 server on loopback.

    python benchmarks/stage.py --server "moto_server -H 127.0.0.1 -p {port}" --aws AWS --s5cmd S5CMD

Every tool uploads and downloads the same small files, one tool after the other, then one archive; each in a session of
its own, of whose processes all processor time and memory (shared pages counted once) are sampled. The server runs in
its own process too: its share of a core says whether it, and not the tool, is the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from machine import machine_facts

BUCKET = "bench"
SAMPLE_S = 0.1
TICKS = os.sysconf("SC_CLK_TCK")
Environment = dict[str, str]


def main() -> None:
    """Run the benchmark and print or write its result."""
    options = _options()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        root = Path(folder)
        print(f"making {options.files} files of {options.kib} KiB", file=sys.stderr)
        source = _make_files(root / "source", options.files, options.kib)
        archive = _make_archive(root / "source.zip", source)
        with _server(options.server, root) as (endpoint, server):
            environment = _environment(endpoint, root)
            _make_bucket(endpoint)
            rounds = [
                {
                    name: _measure(f"{name}-{number}", commands, environment, server, root)
                    for name, commands in _tools(options, source, archive, root, endpoint, number).items()
                }
                for number in range(options.rounds)
            ]
            results = {name: {what: _best(name, what, rounds) for what in rounds[0][name]} for name in rounds[0]}
    result = {
        **machine_facts(["boto3", "botocore"]),
        "server": " ".join([Path(shlex.split(options.server)[0]).name, *shlex.split(options.server)[1:]]),
        "files": options.files,
        "kib_per_file": options.kib,
        "rounds": options.rounds,
        "results": results,
        "ratio_to_awscli": _ratios(results),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(f"{text}\n", encoding="utf-8")


def _best(name: str, what: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The fastest of several rounds: other processes of the machine only ever make one slower."""
    return max((one[name][what] for one in rounds), key=lambda found: float(found["files_per_s"]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True, help="command of the S3 server, with {port} and {folder}")
    parser.add_argument("--aws", help="path of the AWS command line")
    parser.add_argument("--s5cmd", help="path of s5cmd")
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--kib", type=int, default=8)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=1, help="measure so often, and keep the fastest of each")
    parser.add_argument("--folder", type=Path, help="folder for temporary files")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def _tools(
    options: argparse.Namespace, source: Path, archive: Path, root: Path, endpoint: str, number: int
) -> dict[str, dict[str, tuple[int, Sequence[object]]]]:
    """Commands of each tool, by what they do, with the number of files that they copy."""
    url, count, workers = f"s3://{BUCKET}/{number}", options.files, options.workers
    root = root / str(number)
    stage = [sys.executable, "-m", "maskfleet", "data", "stage", f"--workers={workers}"]
    tools: dict[str, dict[str, tuple[int, Sequence[object]]]] = {
        "maskfleet": {
            "upload": (count, [*stage, source, f"{url}/maskfleet"]),
            "download": (count, [*stage, f"{url}/maskfleet", root / "maskfleet"]),
            "upload_archive": (count, [*stage, archive, f"{url}/archive"]),
            "upload_shards": (count, [*stage, "--shards", "--shard-size=8", source, f"{url}/shards"]),
        }
    }
    if options.aws:
        copy = [options.aws, "--endpoint-url", endpoint, "s3", "cp", "--recursive", "--only-show-errors"]
        tools["awscli"] = {
            "upload": (count, [*copy, source, f"{url}/awscli"]),
            "download": (count, [*copy, f"{url}/awscli", root / "awscli"]),
        }
    if options.s5cmd:
        fast = [options.s5cmd, "--endpoint-url", endpoint, "--numworkers", workers, "--log", "error", "cp"]
        tools["s5cmd"] = {
            "upload": (count, [*fast, f"{source}/", f"{url}/s5cmd/"]),
            "download": (count, [*fast, f"{url}/s5cmd/*", f"{root}/s5cmd/"]),
        }
    return tools


def _measure(
    name: str,
    commands: dict[str, tuple[int, Sequence[object]]],
    environment: Environment,
    server: int,
    root: Path,
) -> dict[str, Any]:
    found = {}
    for what, (count, command) in commands.items():
        server_before, started_at = _cpu_s(server), time.monotonic()
        with (root / "log").open("wb") as log:
            process = subprocess.Popen(
                [str(part) for part in command], env=environment, stdout=log, stderr=log, start_new_session=True
            )
            memory_kib: list[int] = []
            cpu: dict[int, float] = {}
            sampler = threading.Thread(target=_sample, args=(process, memory_kib, cpu))
            sampler.start()
            _, status, usage = os.wait4(process.pid, 0)
            elapsed_s = time.monotonic() - started_at
            process.returncode = os.waitstatus_to_exitcode(status)
            sampler.join()
        if process.returncode:
            raise SystemExit(f"{name} {what} failed:\n{(root / 'log').read_text('utf-8', 'replace')[-2000:]}")
        # Its workers belong to a fork server, which it does not wait for.
        cpu_s = usage.ru_utime + usage.ru_stime + sum(cpu[one] for one in cpu if one != process.pid)
        half = memory_kib[len(memory_kib) // 4 :] or [0]
        found[what] = {
            "files_per_s": round(count / elapsed_s, 1),
            "seconds": round(elapsed_s, 2),
            "cpu_ms_per_file": round(1000 * cpu_s / count, 3),
            "server_cores_busy": round((_cpu_s(server) - server_before) / elapsed_s, 2),
            "memory_mib": {
                "first_quarter": round(max(memory_kib[: len(memory_kib) // 4] or [0]) / 1024, 1),
                "after": round(max(half) / 1024, 1),
            },
        }
        print(f"{name} {what}: {found[what]}", file=sys.stderr)
    return found


def _ratios(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """How many times as many files per second, and per second of processor time, as the AWS command line."""
    if "awscli" not in results:
        return {}
    ours, theirs = results["maskfleet"], results["awscli"]
    return {
        what: {
            "files_per_s": round(ours[what]["files_per_s"] / theirs[what]["files_per_s"], 2),
            "files_per_cpu_s": round(theirs[what]["cpu_ms_per_file"] / ours[what]["cpu_ms_per_file"], 2),
        }
        for what in theirs
    }


def _sample(process: subprocess.Popen[bytes], memory_kib: list[int], cpu: dict[int, float]) -> None:
    """Memory, and processor seconds by process, of a tool and all that it started, until it ends."""
    while process.returncode is None:
        total_kib = 0
        for number in _session(process.pid):
            try:
                lines = Path(f"/proc/{number}/smaps_rollup").read_text().splitlines()
                cpu[number] = _own_cpu_s(number)
            except OSError:  # it has ended
                continue
            total_kib += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        if total_kib:
            memory_kib.append(total_kib)
        time.sleep(SAMPLE_S)


def _session(leader: int) -> list[int]:
    """The processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader:
            found.append(int(path.parent.name))
    return found


def _own_cpu_s(process: int) -> float:
    """Processor seconds of a process without its children."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / TICKS


def _cpu_s(process: int) -> float:
    """Processor seconds of a process and its finished children."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / TICKS


def _make_files(folder: Path, count: int, kib: int) -> Path:
    """Files of random bytes, so that no tool gains by compressing them."""
    generator = random.Random(0)
    for number in range(count):
        path = folder / f"train2017/{number // 1000:03d}/{number:012d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(generator.randbytes(1024 * kib))
    return folder


def _make_archive(path: Path, source: Path) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for file in sorted(source.rglob("*.jpg")):
            archive.write(file, file.relative_to(source))
    return path


@contextmanager
def _server(command: str, root: Path) -> Iterator[tuple[str, int]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (root / "s3").mkdir()
    parts = shlex.split(command.format(port=port, folder=root / "s3"))
    with (root / "server.log").open("wb") as log, subprocess.Popen(parts, stdout=log, stderr=log) as process:
        try:
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()


def _environment(endpoint: str, root: Path) -> Environment:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return kept | {
        "AWS_ACCESS_KEY_ID": "benchmark",
        "AWS_SECRET_ACCESS_KEY": "benchmark",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(root / "no-config"),
    }


def _make_bucket(endpoint: str) -> None:
    import boto3

    session = boto3.session.Session("benchmark", "benchmark", region_name="us-east-1")
    session.client("s3", endpoint_url=endpoint).create_bucket(Bucket=BUCKET)


if __name__ == "__main__":
    os.sync()
    main()
