"""Feed random input to everything that reads files and text from outside: make fuzz, or python scripts/fuzz.py --help

Each fuzzer runs in a process of its own with bounded memory, and each case with a time limit. A case must give a result
or a MaskfleetError. Anything else is a finding: an exception of another type, a crash, too much memory or time. It is
printed with its seed and saved; `--replay FILE` runs it again. The exit code is 1 if there are findings.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("coco", "rle", "image", "weights", "yaml", "handle", "http")
CASE_S = 10  # CPU time of a case; one that takes longer is a finding
HANG_S = 60  # CPU time of a case in compiled code, which the timer cannot interrupt
BLOCKED_S = 600  # time of a case that may be waiting for something
MEMORY_MIB = 1024  # address space that a fuzzer may add to that of its imports
CASES_PER_SEED = 200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="time for all fuzzers together (10)")
    parser.add_argument("--cases", type=int, help="cases of each fuzzer, instead of a time")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="first seed (the time)")
    parser.add_argument("--only", choices=NAMES, action="append", help="this fuzzer alone; repeatable")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings").resolve(), help="folder for findings")
    parser.add_argument("--out", type=Path, help="write a summary as JSON")
    parser.add_argument("--replay", type=Path, help="run one saved finding again")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replay:
        return _replay(options.replay)
    names = options.only or list(NAMES)
    seconds = options.minutes * 60 / len(names)
    if options.child:
        return _fuzz(names[0], options.seed, seconds, options.cases, options.findings)
    print(f"seed {options.seed}, {', '.join(names)}", flush=True)
    results = {name: _watched(name, options, seconds) for name in names}
    if options.out:
        _write(options.out, options, results)
    return 1 if any(result["findings"] for result in results.values()) else 0


def _watched(name: str, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Run one fuzzer in a process; a crash or hang of it is a finding, after which it continues with another seed."""
    options.findings.mkdir(parents=True, exist_ok=True)
    total: dict[str, Any] = {"cases": 0, "results": 0, "errors": 0, "seconds": 0.0, "peak_mib": 0, "findings": []}
    seed, ends = options.seed, time.monotonic() + seconds
    while True:
        minutes = max(ends - time.monotonic(), 1) / 60
        argv = [sys.executable, __file__, "--child", "--only", name, "--seed", str(seed), "--minutes", str(minutes)]
        argv += ["--findings", str(options.findings)]
        argv += ["--cases", str(options.cases)] if options.cases else []
        with tempfile.TemporaryDirectory() as folder:
            stopped = _run_child([*argv], Path(folder), options.findings / f"{name}.current")
            summary = Path(folder) / "summary.json"
            part = json.loads(summary.read_text()) if summary.exists() else {}
        for key in ("cases", "results", "errors", "seconds"):
            total[key] += part.get(key, 0)
        total["peak_mib"] = max(total["peak_mib"], part.get("peak_mib", 0))
        total["findings"] += part.get("findings", [])
        if stopped is None:
            break
        total["findings"].append(_save(options.findings, name, seed, _current(options.findings, name), stopped))
        seed += 100_000
        if time.monotonic() > ends or len(total["findings"]) > 50:
            break
    (options.findings / f"{name}.current").unlink(missing_ok=True)
    total["seconds"] = round(total["seconds"], 1)
    print(f"{name}: {_line(total)}", flush=True)
    return total


def _line(total: dict[str, Any]) -> str:
    return (
        f"{total['cases']} cases in {total['seconds']:.0f} s, {total['results']} read, {total['errors']} refused, "
        f"{len(total['findings'])} findings, peak {total['peak_mib']} MiB"
    )


def _run_child(argv: list[str], folder: Path, current: Path) -> str | None:
    """Why the process ended before its time; None if it did not."""
    current.unlink(missing_ok=True)
    process = subprocess.Popen(argv, cwd=folder, stderr=subprocess.DEVNULL)
    case, began, used = 0.0, time.monotonic(), 0.0
    while process.poll() is None:
        time.sleep(0.1)
        newest = current.stat().st_mtime if current.exists() else 0.0
        if newest != case:
            case, began, used = newest, time.monotonic(), _cpu_s(process.pid)
        elif time.monotonic() - began > BLOCKED_S or (case and _cpu_s(process.pid) - used > HANG_S):
            process.kill()
            process.wait()
            return f"a case took more than {HANG_S} s of CPU time, or {BLOCKED_S} s"
    return None if process.returncode == 0 else f"the process ended with code {process.returncode}"


def _cpu_s(pid: int) -> float:
    """CPU time of a process, which does not depend on what else the machine does."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class _TimeoutError(BaseException):
    """A case took too long; no code under test catches it."""


def _fuzz(name: str, seed: int, seconds: float, cases: int | None, findings: Path) -> int:
    """Run one fuzzer in this process; its working directory is its own."""
    from fuzz_targets import fuzzers
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded

    _limit_memory()
    signal.signal(signal.SIGPROF, _on_alarm)
    folder = Path.cwd()
    fuzzer, found, counts = fuzzers(folder)[name], dict[str, str](), {"results": 0, "errors": 0}
    starts, done, first = time.monotonic(), 0, seed
    current = findings / f"{name}.current"

    def once(case: bytes) -> None:
        nonlocal done
        if time.monotonic() - starts > seconds and not cases:
            return
        done += 1
        current.write_bytes(case)
        outcome, problem = _outcome(fuzzer.run, case, folder)
        if problem is None:
            counts[outcome] += 1
        elif problem.splitlines()[-1] not in found:
            found[problem.splitlines()[-1]] = _save(findings, name, seed, case, problem)

    while done < cases if cases else time.monotonic() - starts < seconds:
        count = min(CASES_PER_SEED, cases - done) if cases else CASES_PER_SEED
        profile = settings(
            max_examples=max(count, 1),
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        seeded(seed)(profile(given(fuzzer.cases)(once)))()
        seed += 1
    summary = {
        "cases": done,
        **counts,
        "seconds": time.monotonic() - starts,
        "first_seed": first,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "findings": list(found.values()),
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return 0


def _outcome(run: Any, case: bytes, folder: Path) -> tuple[str, str | None]:
    """("results" or "errors", None), or ("", the traceback of a finding)."""
    from maskfleet.errors import MaskfleetError

    try:
        signal.setitimer(signal.ITIMER_PROF, CASE_S)
        try:
            run(case, folder)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except MaskfleetError as error:
        return ("errors", None) if error.remedy else ("", "an error without a remedy")
    except (Exception, _TimeoutError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "maskfleet" in frame.filename] or frames
        where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
        text = "".join(traceback.format_exception(error))[-6000:].rstrip()
        return "", f"{text}\n{type(error).__name__} at {where}"
    return "results", None


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (MEMORY_MIB << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _on_alarm(number: int, frame: FrameType | None) -> None:
    raise _TimeoutError(f"more than {CASE_S} s of CPU time")


def _current(findings: Path, name: str) -> bytes:
    path = findings / f"{name}.current"
    return path.read_bytes() if path.exists() else b""


def _save(findings: Path, name: str, seed: int, case: bytes, problem: str) -> str:
    """Save the case and its traceback; returns the last line of the problem."""
    last = problem.splitlines()[-1]
    stem = f"{name}-{hashlib.sha256(last.encode()).hexdigest()[:10]}"
    (findings / f"{stem}.case").write_bytes(case)
    (findings / f"{stem}.txt").write_text(f"seed {seed}\n{problem}\n")
    print(f"FINDING {name}, seed {seed}: {last}; saved as {findings / stem}.case", flush=True)
    return last


def _replay(path: Path) -> int:
    from fuzz_targets import fuzzers

    case, name = path.resolve().read_bytes(), path.name.partition("-")[0]
    with tempfile.TemporaryDirectory() as folder:
        outcome, problem = _outcome(fuzzers(Path(folder))[name].run, case, Path(folder))
    print(problem or f"no finding: {outcome}")
    return 1 if problem else 0


def _write(path: Path, options: argparse.Namespace, results: dict[str, Any]) -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from machine import machine_facts

    limits = {"case_s": CASE_S, "hang_s": HANG_S, "added_memory_mib": MEMORY_MIB}
    record = {
        "what": "random input to everything that reads files from outside",
        "seed": options.seed,
        "limits": limits,
    }
    path.write_text(json.dumps(record | machine_facts() | {"fuzzers": results}, indent=2) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    raise SystemExit(main())
