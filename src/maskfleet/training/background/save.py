"""The compiled step of a run as one file: what `maskfleet cache save` does."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from maskfleet.errors import MaskfleetError
from maskfleet.system.files import write_atomically
from maskfleet.training.background.artifacts import JOBS_NAME, Header, read_header
from maskfleet.training.background.child import CompileJob
from maskfleet.training.background.children import Children

POLL_S = 0.2


def record_jobs(run_dir: Path, jobs: Sequence[CompileJob]) -> None:
    """Keep what a run compiles, so that it can be compiled again without the run and its data."""
    write_atomically(run_dir / JOBS_NAME, json.dumps([asdict(job) for job in jobs]), private=True)


def save_compiled(run_dir: Path, file: Path) -> Header:
    """Compile what the run in `run_dir` compiles, mostly from the cache, and write it to `file`."""
    children = Children(_recorded_jobs(run_dir))
    try:
        done, failure = children.poll()
        while not done and not failure:
            time.sleep(POLL_S)
            done, failure = children.poll()
        if failure:
            raise MaskfleetError(
                f"the step cannot be compiled {failure}", remedy="run the same command where the run has trained"
            )
        _write(children, file)
    finally:
        children.stop()
    return read_header(file)


def _write(children: Children, file: Path) -> None:
    try:
        children.write(file)
    except OSError as error:
        raise MaskfleetError(
            f"cannot write {file}: {error.strerror or error}", remedy="free disk space, or give another file"
        ) from error


def _recorded_jobs(run_dir: Path) -> list[CompileJob]:
    path = run_dir / JOBS_NAME
    try:
        return [CompileJob.from_fields(fields) for fields in json.loads(path.read_text(encoding="utf-8"))]
    except FileNotFoundError:
        raise MaskfleetError(
            f"{run_dir} holds no run that compiled its step",
            remedy="give the directory of a run that trained on a GPU, without train.compile=false",
        ) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise MaskfleetError(f"cannot read {path}: {error}", remedy="train the run again to write it") from error
