"""The image's `train` program: one SageMaker host's part of a training job.

SageMaker starts it on every host at the same time. Each starts its own ranks, which meet at the first host; hosts share
no file system. Only rank 0 writes the run directory, which SageMaker synchronises with S3; when a job starts again, the
other hosts get the checkpoint from rank 0 over the network.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from socket import socket

from maskfleet.config.load import dump, refuse_another_run
from maskfleet.config.run import RunConfig
from maskfleet.errors import ConfigError, LaunchError, MaskfleetError
from maskfleet.launch.instances import INSTANCES
from maskfleet.launch.sagemaker.container.artifacts import copy_artifacts
from maskfleet.launch.sagemaker.container.hyperparameters import run_config
from maskfleet.launch.sagemaker.container.network import await_hosts, network_variables, own_address
from maskfleet.launch.sagemaker.container.output import RelayedLines
from maskfleet.launch.sagemaker.container.tree import Resources, Tree
from maskfleet.launch.supervise.child import POLL_S, STOPPED_CODES, RankProcesses, rank_variables
from maskfleet.log import logger
from maskfleet.system.network import listening_socket
from maskfleet.system.rank_variables import HOSTS, STORE_FILE, STORE_SOCKET, hosts_value
from maskfleet.system.signals import stop_request

PORT = 29500  # where the ranks of several hosts meet
STOP_GRACE_S = 100.0  # SageMaker kills the container 120 s after SIGTERM


def train(
    tree: Tree,
    ranks_per_host: int,
    env: Mapping[str, str] = os.environ,
    *,
    gpus: int | None = None,
    port: int = PORT,
) -> int:
    """Train as the job in `tree` says; returns the exit code, and leaves the reason of a failure in `tree`.

    `gpus` are those that torch sees: fewer than the instance type has are an error. None compares nothing.
    """
    tree.failure.unlink(missing_ok=True)
    try:
        if gpus is not None:
            _expect_all_gpus(tree.resources(), gpus)
        return _train(tree, ranks_per_host, env, port)
    except MaskfleetError as error:
        tree.write_failure(str(error))
        raise
    except Exception as error:
        tree.write_failure(f"{type(error).__name__}: {error}")
        raise


def _train(tree: Tree, ranks_per_host: int, env: Mapping[str, str], port: int) -> int:
    resources = tree.resources()
    config = run_config(tree.hyperparameters(), tree.channel("train"))
    shutil.rmtree(tree.work, ignore_errors=True)  # of an earlier start in the same container
    tree.work.mkdir(parents=True)
    run_file = tree.work / "job.yaml"
    run_file.write_text(dump(config), encoding="utf-8")
    run_dir = tree.run_dir if resources.index == 0 else tree.work / "run"
    run_dir.mkdir(parents=True, exist_ok=True)
    _expect_own_run(run_dir, config)
    output = RelayedLines()
    argv = [sys.executable, "-m", "maskfleet", "train", str(run_dir), "--config", str(run_file)]
    with stop_request() as request:
        if len(resources.hosts) > 1:
            await_hosts(resources.hosts, give_up=lambda: bool(request.number))
        if request.number:
            return 128 + request.number
        with _listening(resources, port) as listening:
            ranks = rank_environments(resources, ranks_per_host, env, port=port, store=tree.work / "store" / "ranks")
            if listening is not None:
                ranks[0][STORE_SOCKET] = str(listening.fileno())
            child = RankProcesses(argv, ranks, cwd=tree.work, output=output)
        while (code := child.exit_code()) is None:
            if request.number:
                child.stop(STOP_GRACE_S)
            time.sleep(POLL_S)
        child.clean_up()
    if code and code not in STOPPED_CODES:
        who = f"rank {child.failed_rank} on {resources.current_host}"
        late = request.number and code == 128 + signal.SIGKILL
        tree.write_failure(
            f"{who} did not save within {STOP_GRACE_S:.0f} s after SIGTERM" if late else output.failure(code, who)
        )
        logger.error("%s ended with code %d", who, code)
    _keep(run_dir, tree.model, failed=code != 0)
    return code


def _expect_own_run(run_dir: Path, config: RunConfig) -> None:
    """LaunchError if SageMaker copied the checkpoints of another run to `run_dir`."""
    try:
        refuse_another_run(run_dir, config)
    except ConfigError as error:
        raise LaunchError(
            error.what,
            remedy="start the job with another checkpoint_uri, or with the settings of that run to continue it",
        ) from error


def _expect_all_gpus(resources: Resources, gpus: int) -> None:
    """LaunchError unless torch sees all GPUs of the instance: without them the job would cost as much, on a CPU."""
    facts = INSTANCES.get(resources.instance_type or "")
    if facts is not None and gpus < facts.gpus:
        raise LaunchError(
            f"ml.{facts.name} has {facts.gpus} GPUs, but torch in this container sees {gpus} of them",
            remedy="use an image with a CUDA build of torch and NVIDIA_VISIBLE_DEVICES=all, as deploy/docker/sagemaker"
            " makes; if it is one, start the job again",
        )


def _keep(run_dir: Path, model: Path, *, failed: bool) -> None:
    """Copy the results to `model`; after a failure its reason must not be replaced by one of the copy."""
    try:
        copy_artifacts(run_dir, model)
    except (OSError, shutil.Error) as error:
        if not failed:
            raise LaunchError(
                f"training is done, but its results cannot be copied to {model}: {error}",
                remedy="give the job a larger volume and start it again with the same checkpoints: it only copies",
            ) from error
        logger.warning("the results cannot be copied to %s: %s", model, error)


def rank_environments(
    resources: Resources, ranks_per_host: int, env: Mapping[str, str], *, port: int, store: Path
) -> list[dict[str, str]]:
    """The environment of each rank of this host; those of a single host meet in the file `store`."""
    own = {**env, **network_variables(resources, env), "PYTHONUNBUFFERED": "1"}
    own[HOSTS] = hosts_value([(host, ranks_per_host) for host in resources.hosts])
    if len(resources.hosts) == 1:
        own[STORE_FILE] = str(store)
    else:
        own |= {"MASTER_ADDR": resources.hosts[0], "MASTER_PORT": str(port)}
    first, count = resources.index * ranks_per_host, len(resources.hosts) * ranks_per_host
    return [own | rank_variables(first + local, count, local, ranks_per_host) for local in range(ranks_per_host)]


def _listening(resources: Resources, port: int) -> socket | nullcontext[None]:
    """The socket on which rank 0 serves the store; None on the other hosts, and if there are none."""
    if resources.index != 0 or len(resources.hosts) == 1:
        return nullcontext()
    address = own_address(resources)
    try:
        return listening_socket(address, port)
    except OSError as error:
        raise LaunchError(
            f"{resources.current_host} cannot listen on {address}, port {port}: {error.strerror or error}",
            remedy="nothing else in the container may use that port",
        ) from error
