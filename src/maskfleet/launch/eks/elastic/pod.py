"""The program of each pod of an elastic job: prepares the job's folder if no pod has, then supervises its own ranks.

python3 -m maskfleet.launch.eks.elastic.pod RUN_DIR --name NAME --workers 3 --min-nodes 2 ... --config FILE

The supervisors of all pods meet in the run directory (launch/supervise); they need neither SSH nor the names of pods.
The number of the pod is JOB_COMPLETION_INDEX, which Kubernetes sets. Exit codes, which the Job reads
(deploy/helm/train/templates/indexedjob.yaml):

0    the run is done
10   the run has failed or cannot begin: the whole Job fails
143  the pod was asked to leave, as on a Spot node that is reclaimed: another one takes its place
else the pod itself failed: another one takes its place, a limited number of times
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from maskfleet.config.load import RUN_FILE, dump, resolve
from maskfleet.errors import ConfigError, LaunchError, MaskfleetError
from maskfleet.launch.job import JobState
from maskfleet.launch.supervise.job_files import Host, Job, JobFolder, Scheduler
from maskfleet.launch.supervise.prepare import JOB_FILE, write_job_files
from maskfleet.launch.supervise.status import wait_until_closed
from maskfleet.launch.supervise.supervisor import supervise
from maskfleet.system.lock import NoLocksError, locked

INDEX = "JOB_COMPLETION_INDEX"
UID = "MASKFLEET_JOB_UID"
RUN_FAILED = 10
ASKED_TO_LEAVE = 128 + signal.SIGTERM
LOCK_S = 240.0  # a file server takes a minute or two to release the locks of a pod whose node died
LEADER_FIRST_S = 5.0  # the Job ends with enough exits, and deletes pods that still run; the leader's has the log


def main(arguments: Sequence[str]) -> int:
    """Run the pod of an elastic job; returns its exit code."""
    # The first process of a container ignores signals that it does not handle.
    exit_on_request(ASKED_TO_LEAVE)
    asked = _parsed(arguments)
    index = int(os.environ[INDEX])
    try:
        prepare(asked.run_dir, _job(asked, os.environ[UID]), _run_yaml(asked))
        code = supervise(asked.run_dir, index, lock_s=LOCK_S, echo=sys.stdout.buffer)
    except PermissionError as error:
        print(f"user {os.getuid()} cannot write to {error.filename}: {error.strerror}", file=sys.stderr)
        print("  → let user or group 1000 write there (docs/run-anywhere/eks/train-chart.md)", file=sys.stderr)
        return RUN_FAILED
    except MaskfleetError as error:
        print(error, file=sys.stderr)
        return RUN_FAILED if isinstance(error, (ConfigError, NoLocksError)) else 1
    return closed(asked.run_dir, index, code)


def prepare(run_dir: Path, job: Job, run_yaml: str) -> None:
    """Write the files of a job unless another of its pods has; an earlier job's outcome and heartbeats are removed."""
    assert job.scheduler is not None
    folder = JobFolder(run_dir)
    folder.path.mkdir(parents=True, exist_ok=True)
    with locked(folder.path / "prepare.lock", f"preparing {run_dir}", wait_s=LOCK_S):
        known = folder.known_job()
        if known is not None and known.scheduler is not None and known.scheduler.uid == job.scheduler.uid:
            return
        if folder.exists() and wait_until_closed(run_dir).state is JobState.RUNNING:
            raise LaunchError(
                f"another job still runs in {run_dir}", remedy="cancel it, or choose another --name for this one"
            )
        unfinished = replace(job, scheduler=replace(job.scheduler, uid=""))  # in case that this pod is killed here
        write_job_files(run_dir, {RUN_FILE: run_yaml, JOB_FILE: unfinished.to_json()})
        folder.write_job(job)


def closed(run_dir: Path, index: int, code: int) -> int:
    """The exit code of the pod whose supervisor returned `code`, once all others have written their last lines."""
    folder = JobFolder(run_dir)
    outcome, endpoint = folder.outcome(), folder.endpoint()
    if outcome is None:
        return code
    code = 0 if outcome.state == "done" else RUN_FAILED
    exit_on_request(code)
    wait_until_closed(run_dir)
    if endpoint is None or endpoint.host != index:
        time.sleep(LEADER_FIRST_S)
    return code


def exit_on_request(code: int) -> None:
    """From now on, exit with `code` when Kubernetes asks the pod to end."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(code)

    signal.signal(signal.SIGTERM, leave)


def _job(asked: argparse.Namespace, uid: str) -> Job:
    return Job(
        asked.name,
        "supervisor",
        tuple(Host(f"{asked.name}-{number}", asked.slots) for number in range(asked.workers)),
        asked.min_nodes,
        asked.max_restarts,
        port=0,
        cwd=str(asked.run_dir),
        scheduler=Scheduler(uid, asked.wait_s),
    )


def _run_yaml(asked: argparse.Namespace) -> str:
    return dump(resolve(recipe_name=asked.recipe, file=asked.config, sets=asked.sets).config)


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="maskfleet.launch.eks.elastic.pod")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--name", required=True)
    for option in ("--workers", "--slots", "--min-nodes", "--max-restarts", "--wait-s"):
        parser.add_argument(option, type=int, required=True)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--recipe")
    parser.add_argument("--set", dest="sets", action="append", default=[])
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
