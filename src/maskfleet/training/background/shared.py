"""Compiled code for runs on other machines: files in folders, named after what they hold.

A launched job keeps such a folder on its shared file system; an image may bring one along. What is compiled depends on
the sizes of batches and objects too, so that a name stands for a step and not for a recipe.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from maskfleet import __version__
from maskfleet.errors import ConfigError
from maskfleet.log import logger
from maskfleet.system.rank_variables import COMPILED_CODE
from maskfleet.training.background.artifacts import FILE_NAME, load_if_there, read_header
from maskfleet.training.background.child import CompileJob
from maskfleet.training.background.compiled_before import all_compiled_before, digest_of
from maskfleet.training.background.target import Target

IMAGE_FOLDER = Path("/opt/maskfleet/compiled")  # of our images; maskfleet image build --compiled
_NAME_DIGITS = 20


def shared_name(jobs: Sequence[CompileJob], target: Target) -> str:
    """The name of the file with the compiled code of all `jobs` for `target`."""
    return f"{digest_of(jobs, target)[:_NAME_DIGITS]}.cache"


def named_for_runs(files: Iterable[Path]) -> dict[str, Path]:
    """Files of `maskfleet cache save` by their shared names; ConfigError if this version could not load one."""
    named = {}
    for file in files:
        header = read_header(file)
        if header.target.maskfleet != __version__:
            raise ConfigError(
                f"{file} was compiled by maskfleet {header.target.maskfleet}, and this is {__version__}",
                remedy="save it again with this version: maskfleet cache save RUN_DIR FILE",
            )
        named[shared_name(header.jobs, header.target)] = file
    return named


def load_compiled(jobs: Sequence[CompileJob], run_dir: Path, env: Mapping[str, str] = os.environ) -> None:
    """Load the compiled code of `jobs` from the run, its shared folder or the image, unless the cache has it."""
    if all_compiled_before(jobs, env):
        return
    device = torch.device(jobs[0].device)
    name = shared_name(jobs, Target.of(device))
    for folder in (*_shared_folder(env), IMAGE_FOLDER):
        if load_if_there(folder / name, device):
            return
    load_if_there(run_dir / FILE_NAME, device)  # the run may have had other canvases; some are better than none


def files_to_write(jobs: Sequence[CompileJob], run_dir: Path, env: Mapping[str, str] = os.environ) -> list[Path]:
    """Where a run leaves what it compiled: in its directory, and in the shared folder, which is made if need be."""
    name = shared_name(jobs, Target.of(torch.device(jobs[0].device)))
    files = [run_dir / FILE_NAME]
    for folder in _shared_folder(env):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            logger.warning("compiled code is not shared: %s: %s", folder, error.strerror)
        else:
            files.append(folder / name)
    return files


def _shared_folder(env: Mapping[str, str]) -> list[Path]:
    return [Path(env[COMPILED_CODE]).expanduser()] if env.get(COMPILED_CODE) else []
