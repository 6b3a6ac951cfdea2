"""What the output of docker, podman and buildah means when they fail."""

from __future__ import annotations

import re

from maskfleet.errors import InfraError

_SHOWN_LINES = 12
_PRUNE = {
    "docker": "docker system prune",
    "podman": "podman system prune",
    "buildah": "buildah rm --all; buildah rmi --prune",
}
_NETWORK = "check the network and its proxy (HTTP_PROXY, HTTPS_PROXY), then run the same command again"
# The first that matches counts. {prune} is the tool's command that frees space.
_CAUSES: tuple[tuple[str, str, str], ...] = (
    (
        r"no space left on device|disk quota exceeded",
        "the disk is full",
        "free space, for example with `{prune}`: an image for GPUs needs about 30 GB while it is built",
    ),
    (
        r"computed checksum did NOT match",
        "the EFA installer is not the file that its checksum describes",
        "delete the copy that --efa-installer names, and leave the option out to download it again",
    ),
    (
        r"has no aws-ofi-nccl for this base image",
        "the EFA installer has no aws-ofi-nccl for this base image, so NCCL would use TCP",
        "build on Ubuntu 22.04 or 24.04 (--base), or without EFA (--no-efa)",
    ),
    (
        r"cannot overwrite|tag is immutable|ImageTagAlreadyExists|tag .* already exists",
        "another image has this tag, and the repository does not let tags change",
        "push with another --tag",
    ),
    (
        r"authorization token has expired|ExpiredToken",
        "the login at the registry has expired",
        "log in again (`aws sso login`; for other registries with the tool's own login), then push again",
    ),
    (
        r"no basic auth credentials|authentication required|unauthorized|denied|403 Forbidden|access forbidden",
        "the registry refused the login",
        "ECR needs the permissions in docs/run-anywhere/images.md; log in to other registries with the tool first",
    ),
    (
        r"toomanyrequests|pull rate limit",
        "the registry of the base image limits how often it may be pulled",
        "log in there, or take the base image from another registry with --base",
    ),
    (
        r"manifest unknown|manifest for .* not found|repository does not exist|short-name",
        "the base image was not found",
        "write its full name with --base, such as docker.io/library/ubuntu:24.04",
    ),
    (
        r"Temporary failure resolving|Could not (?:resolve|connect)|Failed to fetch|Connection timed out"
        r"|no such host|i/o timeout|connection refused|TLS handshake",
        "a server could not be reached",
        _NETWORK,
    ),
    (
        r"No matching distribution found|ResolutionImpossible|Could not find a version",
        "pip found no version of a package that fits",
        "check --pip-args and the package index that pip uses in the build",
    ),
)


def explained(output: str, tool: str, otherwise: str) -> InfraError:
    """The error for a tool that failed: its cause if it is known, and the last lines that it printed."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    tail = "\n".join(lines[-_SHOWN_LINES:])
    for pattern, cause, remedy in _CAUSES:
        if re.search(pattern, output, re.IGNORECASE):
            return InfraError(f"{cause} ({otherwise}):\n{tail}", remedy=remedy.format(prune=_PRUNE[tool]))
    return InfraError(f"{otherwise}:\n{tail}", remedy="fix what it names, then run the same command again")
