"""Builds the training image, and the notebook image on top of it."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from maskfleet import __version__
from maskfleet.errors import ConfigError
from maskfleet.infra.images.builder import Builder, BuildRequest, Say
from maskfleet.infra.images.efa import PINNED, checked_installer, installer
from maskfleet.infra.images.record import BuiltImage, ImageJournal
from maskfleet.system.deploy_files import deploy_path, notebooks_path

TRAIN, NOTEBOOK = "train", "notebook"
NOTEBOOK_SUFFIX = "-notebook"
CPU_MARK = "cpu"
EPOCH = 1767225600  # 2026-01-01: the time of all files, so that the same files give the same digest
_EPOCH_VARIABLE = "SOURCE_DATE_EPOCH"
_HASH_DIGITS = 12


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What `maskfleet image build` was asked for."""

    gpu: bool = True
    efa: bool = True
    efa_installer: Path | None = None
    base: str | None = None
    pip_args: str | None = None
    notebook: bool = False
    compiled: Mapping[str, Path] = field(default_factory=dict)  # files of compiled code, by the names for runs


def build(
    options: BuildOptions, wheel: tuple[str, bytes], builder: Builder, *, env: Mapping[str, str], say: Say
) -> list[BuiltImage]:
    """Build the images that `options` ask for, the training image first; the wheel is (file name, content)."""
    record, epoch = ImageJournal(env), _epoch(env)
    with _context(options, wheel, record, say) as (context, arguments):
        image_id = _image_id(TRAIN, context, arguments, builder, record, epoch=epoch, say=say)
        # The content decides the tag: an image that differs never gets the tag of another one.
        tag = f"{_tag_of(__version__)}-{'' if options.gpu else f'{CPU_MARK}-'}{image_id[:_HASH_DIGITS]}"
        built = [_kept(builder, record, TRAIN, image_id, tag, options.gpu)]
        if options.notebook:
            arguments = {"TRAIN_IMAGE": built[0].name, "PIP_ARGS": options.pip_args or ""}
            image_id = _image_id(NOTEBOOK, context, arguments, builder, record, epoch=epoch, say=say)
            built.append(_kept(builder, record, NOTEBOOK, image_id, f"{tag}{NOTEBOOK_SUFFIX}", options.gpu))
    return built


def _image_id(
    kind: str,
    context: Path,
    arguments: dict[str, str],
    builder: Builder,
    record: ImageJournal,
    *,
    epoch: int,
    say: Say,
) -> str:
    log = record.folder / f"build-{kind}.log"
    log.unlink(missing_ok=True)
    arguments = {**arguments, _EPOCH_VARIABLE: str(epoch)}
    return builder.build(BuildRequest(context, f"deploy/docker/{kind}/Dockerfile", arguments, epoch), log=log, say=say)


def _kept(builder: Builder, record: ImageJournal, kind: str, image_id: str, tag: str, gpu: bool) -> BuiltImage:
    name = builder.local_name(tag)
    builder.tag(image_id, name)
    image = BuiltImage(kind, name, image_id, tag, builder.name, gpu)
    record.add_built(image)
    return image


@contextmanager
def _context(
    options: BuildOptions, wheel: tuple[str, bytes], record: ImageJournal, say: Say
) -> Iterator[tuple[Path, dict[str, str]]]:
    """A build context that holds what the Dockerfiles need and nothing else, and the arguments of the first one."""
    record.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    arguments = {"GPU": "1" if options.gpu else "0"}
    if options.base:
        arguments["BASE"] = options.base
    arguments["PIP_ARGS"] = options.pip_args or ""
    # Not in /tmp, which may be in memory: the installer has 700 MB.
    with tempfile.TemporaryDirectory(dir=record.folder, prefix="context-") as folder:
        context = Path(folder)
        shutil.copytree(deploy_path("docker"), context / "deploy" / "docker")
        shutil.copytree(notebooks_path(), context / "notebooks")
        (context / "dist").mkdir()
        name, content = wheel
        (context / "dist" / name).write_bytes(content)
        if options.compiled:
            (context / "compiled").mkdir()
            for name, file in options.compiled.items():
                shutil.copyfile(file, context / "compiled" / name)
        if options.gpu and options.efa:
            source, digest = _installer(options, record, say)
            shutil.copyfile(source, context / source.name)
            arguments |= {"EFA_INSTALLER": source.name, "EFA_INSTALLER_SHA256": digest}
        yield context, arguments


def _installer(options: BuildOptions, record: ImageJournal, say: Say) -> tuple[Path, str]:
    if options.efa_installer is not None:
        return checked_installer(options.efa_installer)
    return installer(record.cache, say), PINNED.sha256


def _epoch(env: Mapping[str, str]) -> int:
    given = env.get(_EPOCH_VARIABLE, "")
    if not given:
        return EPOCH
    if not re.fullmatch(r"[1-9][0-9]{0,11}", given):
        raise ConfigError(f"{_EPOCH_VARIABLE} is {given!r}, not a time", remedy="unset it, or give seconds since 1970")
    return int(given)


def _tag_of(version: str) -> str:
    """The version as a tag may have it."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", version)
