"""Pushes the images that were built last."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from maskfleet.errors import InfraError
from maskfleet.infra.images.build import NOTEBOOK, NOTEBOOK_SUFFIX, TRAIN
from maskfleet.infra.images.builder import Builder, Say
from maskfleet.infra.images.ecr import EcrRepository, ecr_address
from maskfleet.infra.images.record import BuiltImage, ImageJournal, PushedImage
from maskfleet.system.files import write_private_json


@dataclass(frozen=True, slots=True)
class PushOptions:
    """What `maskfleet image push` was asked for."""

    to: str | None = None  # a repository in ECR or elsewhere; None is ours in ECR
    region: str | None = None
    tag: str | None = None  # instead of the one that names the content
    kms_key: str | None = None
    notebook: bool = False


def push(options: PushOptions, builder: Builder, *, env: Mapping[str, str], say: Say) -> list[PushedImage]:
    """Push the training image, and the notebook image if asked; a push that was done before succeeds at once."""
    record = ImageJournal(env)
    images = [_built(record, TRAIN, builder)]
    if options.notebook:
        images.append(_built(record, NOTEBOOK, builder))
        if images[1].tag != f"{images[0].tag}{NOTEBOOK_SUFFIX}":
            raise InfraError(
                f"the notebook image {images[1].name} is not built on {images[0].name}",
                remedy="maskfleet image build --notebook",
            )
    pushed = [_pushed(image, options, builder, record, say) for image in images]
    for one in pushed:
        record.add_pushed(one)
    return pushed


def _built(record: ImageJournal, kind: str, builder: Builder) -> BuiltImage:
    """The image of this kind that was built last, which must still exist unchanged."""
    image = record.built(kind)
    command = "maskfleet image build --notebook" if kind == NOTEBOOK else "maskfleet image build"
    if image is None:
        raise InfraError(f"no {kind} image was built on this machine", remedy=command)
    if image.tool != builder.name:
        raise InfraError(
            f"{image.name} was built with {image.tool}, not with {builder.name}", remedy=f"push --with {image.tool}"
        )
    if builder.image_id(image.name) != image.image_id:
        raise InfraError(f"{image.name} is no longer on this machine", remedy=command)
    return image


def _pushed(image: BuiltImage, options: PushOptions, builder: Builder, record: ImageJournal, say: Say) -> PushedImage:
    suffix = NOTEBOOK_SUFFIX if image.kind == NOTEBOOK else ""
    tag = f"{options.tag}{suffix}" if options.tag else image.tag
    address = ecr_address(options.to, options.region)
    log = record.folder / f"push-{image.kind}.log"
    log.unlink(missing_ok=True)
    if address is None:
        repository = str(options.to)
        builder.tag(image.image_id, f"{repository}:{tag}")
        digest = builder.push(f"{repository}:{tag}", auth=None, log=log, say=say)
    else:
        registry = EcrRepository(address)
        found = registry.uri()
        if found is None:
            found = registry.create(kms_key=options.kms_key)
            say(f"created the repository {found}")
        repository = found
        there = _already_there(registry, repository, tag, image)
        if there is not None:
            say(f"{repository}:{tag} is there already, with the same content")
            digest = there
        else:
            builder.tag(image.image_id, f"{repository}:{tag}")
            with _login_file(repository, registry.login(), record.folder) as auth:
                digest = builder.push(f"{repository}:{tag}", auth=auth, log=log, say=say)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return PushedImage(image.kind, repository, tag, digest, image.gpu, now)


def _already_there(registry: EcrRepository, repository: str, tag: str, image: BuiltImage) -> str | None:
    """The digest of the tag if it has this content; raises if it has another one, since tags never change."""
    found = registry.pushed(tag)
    if found is None:
        return None
    digest, configuration = found
    # The id of an image is the digest of its configuration or, in docker's newer store, of its manifest.
    if f"sha256:{image.image_id}" in (digest, configuration):
        return digest
    raise InfraError(
        f"{repository}:{tag} is there already with other content: {digest}",
        remedy="push with another --tag, or without --tag: then the tag names the content",
    )


@contextmanager
def _login_file(repository: str, login: str, folder: Path) -> Iterator[Path]:
    """A folder with a config.json that only its owner can read, removed afterwards: no command line has the login."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="login-") as private:
        host = repository.partition("/")[0]
        write_private_json(Path(private, "config.json"), {"auths": {host: {"auth": login}}})
        yield Path(private)
