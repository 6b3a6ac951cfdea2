"""Marks in the compiler's cache: for which jobs it holds the compiled step, so that a run knows before it asks."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from maskfleet.inference.device import CACHE_VARIABLE
from maskfleet.log import logger
from maskfleet.system.files import cache_folder, write_atomically
from maskfleet.training.background.child import CompileJob
from maskfleet.training.background.target import Target

_FOLDER = "maskfleet-jobs"  # in the cache: whoever deletes the compiled code deletes the marks too


def mark_compiled(
    jobs: Iterable[CompileJob], env: Mapping[str, str] = os.environ, *, target: Target | None = None
) -> None:
    """Record that the cache holds the compiled code of `jobs`; a cache that cannot be written is logged.

    Without `target`, it is for the device of each job.
    """
    try:
        for job in jobs:
            path = _mark(job, env, target)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(asdict(job)), private=True)
    except OSError as error:
        logger.warning("cannot write to the cache of compiled code: %s", error)


def all_compiled_before(jobs: Iterable[CompileJob], env: Mapping[str, str] = os.environ) -> bool:
    """Whether all `jobs` were compiled into this cache, for this GPU and by these versions.

    A wrong answer costs time only: what is missing from the cache is compiled again.
    """
    return all(_mark(job, env).is_file() for job in jobs)


def digest_of(jobs: Sequence[CompileJob], target: Target) -> str:
    """A name for the compiled code of `jobs`, in this order, for `target`."""
    content = {"jobs": [asdict(job) for job in jobs], "target": asdict(target)}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _mark(job: CompileJob, env: Mapping[str, str], target: Target | None = None) -> Path:
    name = digest_of([job], target or Target.of(torch.device(job.device)))
    return Path(env.get(CACHE_VARIABLE) or cache_folder("compiled", env), _FOLDER, name)
