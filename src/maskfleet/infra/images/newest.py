"""Which image `maskfleet launch` takes if none is named: the newest one that was pushed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from maskfleet.errors import LaunchError, MaskfleetError
from maskfleet.infra.images.build import CPU_MARK, NOTEBOOK_SUFFIX, TRAIN
from maskfleet.infra.images.ecr import REPOSITORY, EcrAddress, EcrImage, EcrRepository, ecr_address
from maskfleet.infra.images.record import ImageJournal, PushedImage


def newest_image(*, region: str | None = None, cpu: bool = False, env: Mapping[str, str] = os.environ) -> PushedImage:
    """The newest training image: by this machine's record of pushes, or else by ECR.

    An image without GPU support is taken only for a run on CPUs (`cpu`).
    """
    region = region or env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION")
    found = [one for one in ImageJournal(env).pushed() if one.kind == TRAIN and (one.gpu or cpu)]
    found = [one for one in found if region is None or _region_of(one) in (None, region)]
    registries = sorted({one.repository.partition("/")[0] for one in found})
    if len(registries) > 1:
        raise LaunchError(
            f"no image is named, and this machine pushed to several registries: {', '.join(registries)}",
            remedy="name the image with --image; `maskfleet image list` shows what is in ECR",
        )
    if found:
        return found[-1]
    return _newest_in_ecr(region, cpu)


def _region_of(image: PushedImage) -> str | None:
    """The region of an image in ECR; None for other registries."""
    address = ecr_address(image.repository, None)
    return address.region if address else None


def _newest_in_ecr(region: str | None, cpu: bool) -> PushedImage:
    what = "no training image is named, and none was pushed from this machine"
    try:
        repository = EcrRepository(EcrAddress(REPOSITORY, region=region))
        images, uri = repository.images(), repository.uri()
    except MaskfleetError as error:
        raise LaunchError(
            f"{what}; ECR cannot be asked: {error.what}", remedy="maskfleet image push, or name one with --image"
        ) from error
    found = newest_of(images or [], cpu=cpu)
    if found is None or uri is None:
        raise LaunchError(
            f"{what}, nor is one in {REPOSITORY} of the AWS account {repository.account} in {repository.region}",
            remedy="maskfleet image build and maskfleet image push, or name one with --image",
        )
    image, tag = found
    return PushedImage(TRAIN, uri, tag, image.digest, not _is_cpu(tag), image.pushed_at)


def newest_of(images: Sequence[EcrImage], *, cpu: bool) -> tuple[EcrImage, str] | None:
    """The first training image in a list that has the newest first, and its tag."""
    for image in images:
        for tag in image.tags:
            if not tag.endswith(NOTEBOOK_SUFFIX) and (cpu or not _is_cpu(tag)):
                return image, tag
    return None


def _is_cpu(tag: str) -> bool:
    return f"-{CPU_MARK}-" in tag
