"""Kill a small training run at random moments until it is finished, and compare it bit by bit with one left alone.

    python scripts/soak.py --kills 100 --ranks 1,2,3 --seed 0

A run of a few dozen steps on the CPU, with a checkpoint every few steps, gets SIGKILL, SIGTERM or SIGINT: one rank, the
supervisor, or whole process groups. Now and then its newest checkpoint is damaged. The same command starts it again
until it is finished. At each kill and at the end, every line of metrics.jsonl, apart from times, must equal that of an
undisturbed run; at the end the weights must, too, and nothing may be left behind. One rank is started by `maskfleet
train` and by `maskfleet launch` in turn, several ranks by `maskfleet launch`. Writes JSON with the commit and the
machine. Linux only.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "tests/training", "benchmarks")]

from processes import children_of, is_running, losses, rank_of, same_weights  # noqa: E402

from machine import machine_facts  # noqa: E402
from maskfleet.config.base import replaced  # noqa: E402
from maskfleet.config.load import dump  # noqa: E402
from maskfleet.config.recipes import recipe  # noqa: E402
from maskfleet.data.synthetic.dataset import make_shapes  # noqa: E402
from maskfleet.launch.job import JobState  # noqa: E402
from maskfleet.launch.supervise.job_files import JobFolder  # noqa: E402
from maskfleet.launch.supervise.processes import job_id, kill_all, processes_of  # noqa: E402
from maskfleet.launch.supervise.status import status_of  # noqa: E402
from maskfleet.model.weights.checkpoint import CheckpointFolder  # noqa: E402
from maskfleet.training.output.metrics import read_metrics  # noqa: E402
from micro_run import MICRO  # noqa: E402

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
STALLED_S = 1800  # without a new step, an exit or a restart the run hangs
IN_START_SHARE = 0.25  # of the kills hit a run that is starting
START_S = 8.0
DAMAGE_SHARE = 0.3  # of the kills come with damage to the newest checkpoint
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class SoakError(Exception):
    """The run did not end as if nothing had happened."""


@dataclass(frozen=True, slots=True)
class Kill:
    """What was killed, when and how."""

    ranks: int
    started_by: str
    target: str
    signal: str
    after_step: int
    damage: str | None = None  # done to the newest checkpoint before the next start


class Runner(Protocol):
    """A run directory and the one command that starts or resumes it."""

    name: str
    run_dir: Path

    def start(self) -> None:
        """Give the command; it may be refused while an earlier process is ending."""

    def is_running(self) -> bool: ...

    def is_done(self) -> bool: ...

    def targets(self) -> dict[str, Callable[[signal.Signals], None]]:
        """What can be killed now, by name."""

    def processes(self) -> list[int]:
        """All processes of the run."""

    def end(self) -> None:
        """Kill everything."""


@dataclass
class Direct:
    """`maskfleet train RUN_DIR`."""

    run_dir: Path
    config: Path
    name: str = "train"
    process: subprocess.Popen[bytes] | None = None
    known: set[int] = field(default_factory=set)  # processes that it had started when something was killed

    def start(self) -> None:
        command = [sys.executable, "-m", "maskfleet", "train", str(self.run_dir), "--config", str(self.config)]
        command += ["--wait", "60"]
        with self.run_dir.with_suffix(".log").open("ab") as log:
            self.process = subprocess.Popen(command, env=ENV, stdout=log, stderr=log, start_new_session=True)

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def is_done(self) -> bool:
        return self.process is not None and self.process.poll() == 0

    def targets(self) -> dict[str, Callable[[signal.Signals], None]]:
        process = self.process
        assert process is not None
        self.known |= {*self.processes()}
        return {"rank": process.send_signal, "group": lambda number: kill_groups([process.pid], number)}

    def processes(self) -> list[int]:
        alive = [self.process.pid, *children_of(self.process.pid)] if self.process and self.is_running() else []
        return [pid for pid in {*alive, *self.known} if is_running(pid)]

    def end(self) -> None:
        if self.process is not None:
            kill_groups([self.process.pid], signal.SIGKILL)
            self.process.wait()


@dataclass
class Launched:
    """`maskfleet launch --on local`, which a supervisor keeps alive."""

    run_dir: Path  # …/runs/NAME
    config: Path
    ranks: int
    name: str = "launch"

    def start(self) -> None:
        command = [sys.executable, "-m", "maskfleet", "launch", "--on", "local", "--detach", "--max-restarts", "1000"]
        command += ["--config", str(self.config), "--name", self.run_dir.name, "--ranks", str(self.ranks)]
        with self.run_dir.with_suffix(".log").open("ab") as log:
            subprocess.run(command, cwd=self.run_dir.parent.parent, env=ENV, stdout=log, stderr=log, check=False)

    def is_running(self) -> bool:
        return self._supervisor() is not None

    def is_done(self) -> bool:
        return status_of(self.run_dir).state is JobState.DONE

    def targets(self) -> dict[str, Callable[[signal.Signals], None]]:
        pids = processes_of(job_id(self.run_dir))
        found: dict[str, Callable[[signal.Signals], None]] = {}
        for pid in pids:
            if (rank := rank_of(pid)) is not None and b"train" in command_line(pid):  # a rank, not its loader
                found[f"rank {rank}"] = lambda number, pid=pid: send(pid, number)  # type: ignore[misc]
        supervisor = self._supervisor()
        if supervisor is not None:
            found["supervisor"] = lambda number: send(supervisor, number)
            found["group"] = lambda number: kill_groups([*pids, supervisor], number)
        return found

    def processes(self) -> list[int]:
        supervisor = self._supervisor()
        return [*processes_of(job_id(self.run_dir)), *([supervisor] if supervisor is not None else [])]

    def end(self) -> None:
        supervisor = self._supervisor()
        if supervisor is not None:
            send(supervisor, signal.SIGKILL)
        kill_all(job_id(self.run_dir))

    def _supervisor(self) -> int | None:
        heartbeat = JobFolder(self.run_dir).heartbeat(0)
        if heartbeat is None or b"maskfleet.launch.supervise.supervisor" not in command_line(heartbeat.pid):
            return None
        return heartbeat.pid if str(self.run_dir).encode() in command_line(heartbeat.pid) else None


class Soak:
    """Kills runs of one configuration; `kills` has what was done."""

    def __init__(self, folder: Path, config: Path, *, ranks: int, steps: int, chance: random.Random) -> None:
        self.folder, self.config, self.ranks, self.chance = folder, config, ranks, chance
        self.max_new_steps = max(2, steps // 8)
        self.kills: list[Kill] = []
        self.laps = 0
        (folder / "runs").mkdir(parents=True, exist_ok=True)
        self.undisturbed = self._runner("undisturbed")

    def run(self, kills: int) -> None:
        """Finish runs until `kills` kills have hit one."""
        until(self.undisturbed, lambda: False)
        while len(self.kills) < kills:
            runner = self._runner(f"lap{self.laps}")
            try:
                while len(self.kills) < kills and not until(runner, self._moment(runner)):
                    self._strike(runner)
                until(runner, lambda: False)
                self._compare(runner)
            finally:
                runner.end()
            shutil.rmtree(runner.run_dir)
            self.laps += 1
            print(f"{self.ranks} ranks: {len(self.kills)} of {kills} kills, {self.laps} runs equal", flush=True)

    def _runner(self, name: str) -> Runner:
        run_dir = self.folder / "runs" / f"{name}-{self.ranks}"
        if self.ranks == 1 and self.laps % 2 == 0:
            return Direct(run_dir, self.config)
        return Launched(run_dir, self.config, self.ranks)

    def _moment(self, runner: Runner) -> Callable[[], bool]:
        """A test for the random moment of the next kill."""
        if self.chance.random() < IN_START_SHARE:
            at = time.monotonic() + self.chance.uniform(0, START_S)
            return lambda: time.monotonic() >= at
        lines = len(read_metrics(runner.run_dir)) + self.chance.randint(1, self.max_new_steps)
        later_s = self.chance.uniform(0, 0.5)

        def reached() -> bool:
            if len(read_metrics(runner.run_dir)) < lines:
                return False
            time.sleep(later_s)
            return True

        return reached

    def _strike(self, runner: Runner) -> None:
        targets = runner.targets()
        if not targets:
            return
        target, number = self.chance.choice(sorted(targets)), self.chance.choice(SIGNALS)
        step = max((int(record["step"]) for record in read_metrics(runner.run_dir)), default=0)
        all_end = target == "group" or runner.name == "train"
        # Whoever survives restarts at once, so the damage must come first.
        damage = None if all_end else self._damage(runner.run_dir)
        targets[target](number)
        if all_end:
            wait_for(lambda: not runner.processes(), f"the end of all processes after {number.name} to the {target}")
            damage = self._damage(runner.run_dir)
        self._compare_metrics(runner)
        self.kills.append(Kill(self.ranks, runner.name, target.split()[0], number.name, step, damage))

    def _damage(self, run_dir: Path) -> str | None:
        """Damage the newest of several checkpoints, sometimes."""
        saved = CheckpointFolder(run_dir / "checkpoints")
        steps = saved.intact_steps()
        if len(steps) < 2 or self.chance.random() >= DAMAGE_SHARE:
            return None
        path, kind = saved.path(steps[-1]), self.chance.choice(["truncated", "bit flip", "manifest emptied"])
        if kind == "truncated":
            os.truncate(path, self.chance.randrange(path.stat().st_size))
        elif kind == "bit flip":
            content = bytearray(path.read_bytes())
            content[self.chance.randrange(len(content))] ^= 1 << self.chance.randrange(8)
            path.write_bytes(content)
        else:
            path.with_suffix(".json").write_text("")
        return kind

    def _compare(self, runner: Runner) -> None:
        self._compare_metrics(runner, to_the_end=True)
        if not same_weights(runner.run_dir, self.undisturbed.run_dir):
            raise SoakError(f"the weights of {runner.run_dir} differ from those of {self.undisturbed.run_dir}")
        left = [path for path in (runner.run_dir / "checkpoints").iterdir() if not path.name.startswith("step-")]
        if left:
            raise SoakError(f"files are left: {left}")
        wait_for(lambda: not runner.processes(), "the end of all processes of a finished run")

    def _compare_metrics(self, runner: Runner, *, to_the_end: bool = False) -> None:
        """Also in the middle of a run: a resumed run replaces the lines after its checkpoint."""
        logged, expected = losses(runner.run_dir), losses(self.undisturbed.run_dir)
        if logged != (expected if to_the_end else expected[: len(logged)]):
            raise SoakError(f"the metrics of {runner.run_dir} differ from those of {self.undisturbed.run_dir}")


def until(runner: Runner, reached: Callable[[], bool]) -> bool:
    """Start the run whenever it has stopped, until `reached` or its end; returns whether it has ended."""
    progress, changed_at = (0, False), time.monotonic()
    while not runner.is_done():
        if not (running := runner.is_running()) and not runner.is_done():
            runner.start()
        if reached():
            return runner.is_done()
        seen = (len(read_metrics(runner.run_dir)), running)
        if seen != progress:
            progress, changed_at = seen, time.monotonic()
        if time.monotonic() - changed_at > STALLED_S:
            raise SoakError(f"{runner.run_dir} hangs; see {runner.run_dir.with_suffix('.log')}")
        time.sleep(0.02 if running else 0.5)
    return True


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + STALLED_S
    while not condition():
        if time.monotonic() > deadline:
            raise SoakError(f"waited {STALLED_S} s for {what}")
        time.sleep(0.02)


def send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it has exited by itself


def kill_groups(pids: Iterable[int], number: signal.Signals) -> None:
    """Send `number` to the process groups of `pids`, each once."""
    groups = set()
    for pid in pids:
        try:
            groups.add(os.getpgid(pid))
        except ProcessLookupError:
            continue
    for group in groups - {os.getpgrp()}:
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            continue


def command_line(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def write_config(folder: Path, steps: int) -> Path:
    """A run of `steps` steps with everything that a checkpoint has to restore."""
    data = folder / "shapes"
    make_shapes(data, num_train=12, num_val=5, height=(64, 64), width=(64, 64), num_categories=2, max_objects=3, seed=3)
    changes: dict[str, Any] = {
        "data.root": str(data),
        "data.num_workers": 1,
        "train.images_per_gpu": 1,
        "train.steps_per_epoch": 4,
        "train.epoch_schedule": ((steps // 8, 0.1), (steps / 4, None)),
        "train.ema_decay": 0.9,
        "checkpoint.every_minutes": 0.02,
        "eval.every_epochs": 3,
    }
    path = folder / "run.yaml"
    path.write_text(dump(replaced(recipe("demo"), {**MICRO, **changes})))
    return path


def counted(kills: list[Kill], attribute: str) -> dict[str, int]:
    return dict(sorted(collections.Counter(str(getattr(kill, attribute)) for kill in kills).items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="kills in all, shared by the numbers of ranks")
    parser.add_argument("--ranks", default="1,2,3", help="numbers of ranks, separated by commas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60, help="length of the run")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "soak.json")
    arguments = parser.parse_args()
    all_ranks = [int(text) for text in arguments.ranks.split(",")]
    started_at, facts, results, kills = time.monotonic(), machine_facts(), [], list[Kill]()
    folder = Path(tempfile.mkdtemp(prefix="maskfleet-soak-"))
    config = write_config(folder, arguments.steps)
    for index, ranks in enumerate(all_ranks):
        chance = random.Random(f"{arguments.seed}/{ranks}")  # noqa: S311 - chooses moments, not secrets
        soak = Soak(folder, config, ranks=ranks, steps=arguments.steps, chance=chance)
        share = arguments.kills * (index + 1) // len(all_ranks) - arguments.kills * index // len(all_ranks)
        try:
            soak.run(share)
        except SoakError as error:
            print(f"FAILED with {ranks} ranks after {len(soak.kills)} kills: {error}", file=sys.stderr)
            print(*[f"  {asdict(kill)}" for kill in soak.kills[-10:]], f"kept: {folder}", sep="\n", file=sys.stderr)
            return 1
        finally:
            soak.undisturbed.end()
        targets = counted(soak.kills, "target")
        results.append({"ranks": ranks, "kills": len(soak.kills), **targets, "runs": soak.laps, "bit_equal": True})
        kills += soak.kills
    shutil.rmtree(folder)
    report = {
        **facts,
        "seed": arguments.seed,
        "steps_per_run": arguments.steps,
        "minutes": round((time.monotonic() - started_at) / 60, 1),
        "results": results,
        "kills_by": {name: counted(kills, name) for name in ("started_by", "target", "signal", "damage")},
    }
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report["results"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
