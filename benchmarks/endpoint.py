"""Images per second and latency of `maskfleet sagemaker serve` under load, on loopback and the CPU.

    python benchmarks/endpoint.py --out benchmarks/results/endpoint.json

The program serves a model with untrained weights. Each client is a thread that sends one JPEG image after the other
over its own connection; clients and program share the cores of the machine. A request that is refused (503) counts as
an error, not as an image. `images_per_cpu_s` is per second of the program's processor time, which a busy machine
changes less than the rest.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from machine import machine_facts

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from micro_run import MICRO

CLIENTS = (1, 8, 32)
NUM_IMAGES = 16
SAMPLE_S = 0.1
TICKS = os.sysconf("SC_CLK_TCK")
SIZES = {"micro": (64, 64), "demo": (256, 320)}  # height and width of the images of a model


@dataclass
class Load:
    """What the clients measured."""

    latencies_s: list[float] = field(default_factory=list)
    errors: int = 0
    memory_kib: list[int] = field(default_factory=list)


def main() -> None:
    """Run the benchmark and print or write its result."""
    options = _options()
    facts = machine_facts(["torch", "numpy", "opencv-python-headless"])
    results: dict[str, Any] = {}
    for name, size in SIZES.items():
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            root = Path(folder)
            _write_model(name, root / "ml" / "model")
            images = _images(size)
            with _program(root) as (process, port):
                _run(process, port, images, 1, options.warm_up_s)
                results[name] = [_case(process, port, images, clients, options.seconds) for clients in CLIENTS]
        for case in results[name]:
            case["ratio_to_one_client"] = round(case["images_per_s"] / results[name][0]["images_per_s"], 2)
        print(json.dumps({name: results[name]}), file=sys.stderr)
    result = {
        **facts,
        "seconds_per_case": options.seconds,
        "image_sizes": {name: list(size) for name, size in SIZES.items()},
        "results": results,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(f"{text}\n", encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="duration of each case")
    parser.add_argument("--warm-up-s", type=float, default=3.0)
    parser.add_argument("--folder", type=Path, help="for temporary files")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    return parser.parse_args()


def _write_model(name: str, folder: Path) -> None:
    """Untrained weights of the model, as a finished job leaves them."""
    import torch

    from maskfleet.config.base import replaced
    from maskfleet.config.recipes import recipe
    from maskfleet.model.build import build_mask_rcnn
    from maskfleet.model.weights import labels_of, save_weights

    categories = ((1, "circle"), (2, "square"), (3, "triangle"))
    changes = {**(MICRO if name == "micro" else {}), "model.num_categories": len(categories)}
    run = replaced(recipe("demo"), changes)
    torch.manual_seed(0)
    folder.mkdir(parents=True)
    model = build_mask_rcnn(run.model)
    save_weights(folder / "model.safetensors", model.state_dict(), run.model, labels_of(run, categories))


def _images(size: tuple[int, int]) -> list[bytes]:
    """JPEG images with some structure."""
    import cv2

    random = np.random.default_rng(0)
    found = []
    for _ in range(NUM_IMAGES):
        picture = cv2.GaussianBlur(random.integers(0, 255, (*size, 3), dtype=np.uint8), (0, 0), 3)
        found.append(cv2.imencode(".jpg", picture)[1].tobytes())
    return found


@contextmanager
def _program(root: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    log = root / "log"
    argv = [sys.executable, "-m", "maskfleet", "sagemaker", "serve", "--root", str(root / "ml"), "--port", "0"]
    with log.open("wb") as file, subprocess.Popen(argv, stdout=file, stderr=file) as process:
        try:
            while (found := re.search(r"answers on http://127\.0\.0\.1:(\d+)", log.read_text())) is None:
                if process.poll() is not None:
                    raise SystemExit(log.read_text())
                time.sleep(0.05)
            yield process, int(found[1])
        finally:
            process.terminate()


def _case(
    process: subprocess.Popen[bytes], port: int, images: Sequence[bytes], clients: int, seconds: float
) -> dict[str, Any]:
    print(f"{clients} clients", file=sys.stderr)
    began, cpu_began_s = time.monotonic(), _cpu_s(process)
    load = _run(process, port, images, clients, seconds)
    elapsed_s, cpu_s = time.monotonic() - began, _cpu_s(process) - cpu_began_s
    quarter = len(load.memory_kib) // 4
    return {
        "clients": clients,
        "images": len(load.latencies_s),
        "errors": load.errors,
        "images_per_s": round(len(load.latencies_s) / elapsed_s, 1),
        "images_per_cpu_s": round(len(load.latencies_s) / cpu_s, 1),
        "latency_ms": {
            "p50": round(1000 * float(np.percentile(load.latencies_s, 50)), 1),
            "p95": round(1000 * float(np.percentile(load.latencies_s, 95)), 1),
        },
        "memory_mib": {
            "first_quarter": round(max(load.memory_kib[:quarter], default=0) / 1024, 1),
            "last_quarter": round(max(load.memory_kib[-quarter:], default=0) / 1024, 1),
        },
        "load_average": round(os.getloadavg()[0], 1),
    }


def _cpu_s(process: subprocess.Popen[bytes]) -> float:
    """Processor time of the program so far; other programs of the machine hardly change it."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _run(process: subprocess.Popen[bytes], port: int, images: Sequence[bytes], clients: int, seconds: float) -> Load:
    """`clients` threads send images for some seconds."""
    load, lock, deadline = Load(), threading.Lock(), time.monotonic() + seconds

    def client(number: int) -> None:
        latencies, errors = [], 0
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        while time.monotonic() < deadline:
            began = time.monotonic()
            body = images[(number + len(latencies)) % len(images)]
            connection.request("POST", "/invocations", body, {"Content-Type": "image/jpeg"})
            answer = connection.getresponse()
            answer.read()
            if answer.status == 200:
                latencies.append(time.monotonic() - began)
            else:
                errors += 1
        connection.close()
        with lock:
            load.latencies_s += latencies
            load.errors += errors

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    status = Path(f"/proc/{process.pid}/status")
    while any(thread.is_alive() for thread in threads):
        rss = re.search(r"VmRSS:\s+(\d+)", status.read_text())
        load.memory_kib.append(int(rss[1]) if rss else 0)
        time.sleep(SAMPLE_S)
    for thread in threads:
        thread.join()
    return load


if __name__ == "__main__":
    main()
