"""Repositories and images in Amazon ECR."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC
from typing import Any

from maskfleet.errors import InfraError
from maskfleet.system.aws import aws_client, aws_error, aws_exceptions, aws_session, code_of

REPOSITORY = "maskfleet"
_URI = re.compile(
    r"(?P<account>[0-9]{12})\.dkr[.-]ecr(?:-fips)?\.(?P<region>[a-z0-9-]+)"
    r"\.(?:amazonaws\.com(?:\.cn)?|on\.aws)/(?P<name>[a-z0-9][a-z0-9._/-]*)"
)
_MANIFESTS = [
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.oci.image.index.v1+json",
]
_UNTAGGED_DAYS = 14
# Tagged images stay: a run that resumes months later needs the image that it began with.
_LIFECYCLE = {
    "rules": [
        {
            "rulePriority": 1,
            "description": "layers of pushes that were repeated",
            "selection": {
                "tagStatus": "untagged",
                "countType": "sinceImagePushed",
                "countUnit": "days",
                "countNumber": _UNTAGGED_DAYS,
            },
            "action": {"type": "expire"},
        }
    ]
}


@dataclass(frozen=True, slots=True)
class EcrAddress:
    """A repository by name; account and region are None for those of the credentials in use."""

    name: str
    account: str | None = None
    region: str | None = None


@dataclass(frozen=True, slots=True)
class EcrImage:
    """One image of a repository."""

    digest: str
    tags: tuple[str, ...]
    pushed_at: str  # UTC, ISO 8601
    size_bytes: int


def ecr_address(text: str | None, region: str | None) -> EcrAddress | None:
    """The repository that `text` names: a name, or the URI of one in ECR; None if it is in another registry."""
    if text is None:
        return EcrAddress(REPOSITORY, region=region)
    if match := _URI.fullmatch(text):
        return EcrAddress(match["name"], match["account"], match["region"])
    host, slash, _ = text.partition("/")
    if slash and ("." in host or ":" in host or host == "localhost"):
        return None
    if not re.fullmatch(r"[a-z0-9]+(?:[._/-][a-z0-9]+)*", text):
        raise InfraError(f"{text!r} is not the name of a repository", remedy="use lower-case letters, digits, - and /")
    return EcrAddress(text, region=region)


class EcrRepository:
    """A repository that the credentials in use may reach."""

    def __init__(self, address: EcrAddress) -> None:
        session = aws_session("Images in Amazon ECR", region=address.region)
        self.name = address.name
        try:
            self._own_account = str(aws_client(session, "sts").get_caller_identity()["Account"])
            self._client = aws_client(session, "ecr")
        except aws_exceptions() as error:
            raise _error(error, "find out the AWS account", "sts:GetCallerIdentity") from error
        self.account = address.account or self._own_account
        self.region = str(session.region_name)

    def uri(self) -> str | None:
        """The address for docker; None if the repository does not exist."""
        answer = self._call(
            f"find the repository {self.name}",
            "ecr:DescribeRepositories",
            lambda: self._client.describe_repositories(registryId=self.account, repositoryNames=[self.name]),
            absent="RepositoryNotFoundException",
        )
        return None if answer is None else str(answer["repositories"][0]["repositoryUri"])

    def create(self, *, kms_key: str | None = None) -> str:
        """Create it: encrypted, with tags that never change and a scan of what is pushed; returns its address."""
        if self.account != self._own_account:
            raise InfraError(
                f"there is no repository {self.name} in the AWS account {self.account}, and the credentials in use are "
                f"those of {self._own_account}",
                remedy=f"ask the owner of {self.account} to create it and to allow your account to push",
            )
        encryption = {"encryptionType": "KMS", "kmsKey": kms_key} if kms_key else {"encryptionType": "AES256"}
        answer = self._call(
            f"create the repository {self.name}",
            "ecr:CreateRepository",
            lambda: self._client.create_repository(
                repositoryName=self.name,
                imageTagMutability="IMMUTABLE",
                imageScanningConfiguration={"scanOnPush": True},
                encryptionConfiguration=encryption,
            ),
            absent="RepositoryAlreadyExistsException",  # somebody else created it just now
        )
        if answer is None:
            return self.uri() or self.create(kms_key=kms_key)
        self._call(
            f"set the lifecycle of {self.name}",
            "ecr:PutLifecyclePolicy",
            lambda: self._client.put_lifecycle_policy(
                repositoryName=self.name, lifecyclePolicyText=json.dumps(_LIFECYCLE)
            ),
        )
        return str(answer["repository"]["repositoryUri"])

    def login(self) -> str:
        """The login for docker's config.json, valid for 12 hours: base64 of `AWS:password`."""
        answer = self._call("log in to ECR", "ecr:GetAuthorizationToken", self._client.get_authorization_token)
        token = str(answer["authorizationData"][0]["authorizationToken"])
        try:
            is_login = base64.b64decode(token, validate=True).startswith(b"AWS:")
        except binascii.Error:
            is_login = False
        if not is_login:
            raise InfraError("ECR gave a login that is not one", remedy="check AWS_ENDPOINT_URL, then push again")
        return token

    def pushed(self, tag: str) -> tuple[str, str] | None:
        """(digest, digest of its configuration) of the image with this tag; None if there is none."""
        answer = self._call(
            f"look for {self.name}:{tag}",
            "ecr:BatchGetImage",
            lambda: self._client.batch_get_image(
                registryId=self.account,
                repositoryName=self.name,
                imageIds=[{"imageTag": tag}],
                acceptedMediaTypes=_MANIFESTS,
            ),
        )
        if not answer.get("images"):
            return None
        [image, *_] = answer["images"]
        manifest = json.loads(image["imageManifest"])
        return str(image["imageId"]["imageDigest"]), str(manifest.get("config", {}).get("digest", ""))

    def images(self) -> list[EcrImage] | None:
        """All images, newest first; None if the repository does not exist."""

        def read() -> list[EcrImage]:
            pages = self._client.get_paginator("describe_images").paginate(
                registryId=self.account, repositoryName=self.name
            )
            return [_image(one) for page in pages for one in page["imageDetails"]]

        found: list[EcrImage] | None = self._call(
            f"list the images in {self.name}", "ecr:DescribeImages", read, absent="RepositoryNotFoundException"
        )
        return None if found is None else sorted(found, key=lambda one: one.pushed_at, reverse=True)

    def _call(self, action: str, permission: str, send: Callable[[], Any], *, absent: str | None = None) -> Any:
        try:
            return send()
        except aws_exceptions() as error:
            if absent is not None and code_of(error) == absent:
                return None
            raise _error(error, action, permission) from error


def _image(details: dict[str, Any]) -> EcrImage:
    return EcrImage(
        str(details["imageDigest"]),
        tuple(sorted(details.get("imageTags", ()))),
        details["imagePushedAt"].astimezone(UTC).isoformat(timespec="seconds"),
        int(details.get("imageSizeInBytes", 0)),
    )


def _error(error: Exception, action: str, permission: str) -> InfraError:
    found = aws_error(error, action, service="Amazon ECR", permissions=permission, kind=InfraError)
    assert isinstance(found, InfraError)
    return found
