"""The training image of a job: which region its repository is in, and whether it is there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from maskfleet.launch.findings import Finding, Verdict
from maskfleet.launch.sagemaker.checks.network import PLACE, lacking, unless_denied
from maskfleet.launch.sagemaker.services import Json, Services
from maskfleet.system.aws import aws_exceptions, code_of

_ECR = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(?:\.cn)?/(?P<repository>[a-z0-9._/-]+?)"
    r"(?::(?P<tag>[A-Za-z0-9_.-]+))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_ABSENT = ("ImageNotFoundException", "RepositoryNotFoundException")
_ACCEPTED = "application/vnd.docker.distribution.manifest.v2+json"


@dataclass(frozen=True, slots=True)
class TrainingImage:
    """An image in a private repository of ECR."""

    account: str
    region: str
    repository: str
    tag: str | None
    digest: str | None

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The image that `text` names; None if it is not in ECR."""
        match = _ECR.fullmatch(text)
        return cls(**match.groupdict()) if match else None

    def arn(self, partition: str) -> str:
        return f"arn:{partition}:ecr:{self.region}:{self.account}:repository/{self.repository}"

    @property
    def identifier(self) -> Json:
        """How ECR's API names it."""
        return {"imageDigest": self.digest} if self.digest else {"imageTag": self.tag or "latest"}


def image_finding(services: Services, text: str) -> Finding:
    """Whether the image exists in the job's region, with a kind of manifest that SageMaker is known to accept."""
    name = "image"
    image = TrainingImage.parse(text)
    if image is None:
        what = f"{text} is not an image in ECR, and SageMaker takes no other"
        form = "ACCOUNT.dkr.ecr.REGION.amazonaws.com/REPOSITORY:TAG"
        return lacking(name, "not in ECR", what, f"push it to ECR and name it {form}")
    if image.region != services.region:
        what = f"the image is in {image.region}, but the job would run in {services.region}"
        return lacking(name, f"in {image.region}", what, f"push it to ECR in {services.region}, or change the region")

    def check() -> Finding:
        try:
            [details] = services.client("ecr").describe_images(
                registryId=image.account, repositoryName=image.repository, imageIds=[image.identifier]
            )["imageDetails"]
        except aws_exceptions() as error:
            if code_of(error) not in _ABSENT:
                raise
            remedy = "push it, or name one that `aws ecr describe-images` lists"
            return lacking(name, "missing", f"there is no image {text}", remedy)
        manifest = details.get("imageManifestMediaType", _ACCEPTED)
        if manifest != _ACCEPTED:
            # No refusal: if SageMaker accepts more kinds one day, it shall say so itself.
            remedy = "build and push it again as docs/run-anywhere/sagemaker-container.md shows"
            return Finding(PLACE, name, Verdict.WARN, f"SageMaker may refuse its manifest, {manifest}", remedy)
        return Finding(PLACE, name, Verdict.OK, text)

    return unless_denied(name, f"ecr:DescribeImages on {image.repository}", check)
