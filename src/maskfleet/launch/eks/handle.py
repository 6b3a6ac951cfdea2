"""What an EKS handle names: eks://CONTEXT@NAMESPACE/RELEASE, with a path after it for files."""

from __future__ import annotations

from maskfleet.config.launch import EksLaunch
from maskfleet.errors import LaunchError
from maskfleet.launch.job import JobHandle, NameRule

_FORM = "write eks://NAMESPACE/NAME, as `maskfleet launch` printed it"


def handle_path(path: str) -> str:
    """RELEASE or RELEASE/PATH; two slashes at the end, the root of the shared volume, are kept."""
    root = "//" if path.endswith("//") else ""
    return f"{path.strip('/')}{root}"


def launch_of(handle: JobHandle) -> EksLaunch:
    """The cluster and namespace that an EKS handle names."""
    release = handle.path.partition("/")[0]
    if not NameRule().pattern.fullmatch(release):  # it becomes a part of the URLs that the API server gets
        raise LaunchError(f"{handle} names no job: {release!r} cannot be the name of one", remedy=_FORM)
    context, at, namespace = handle.location.rpartition("@")
    try:
        return EksLaunch(namespace=namespace, context=context if at else None)
    except ValueError as error:
        raise LaunchError(f"{handle} names no namespace", remedy=_FORM) from error


def release_of(handle: JobHandle) -> str:
    """The release that a job's handle names."""
    if "/" in handle.path:
        raise LaunchError(
            f"{handle} names a file, not a job",
            remedy=f"leave the path out: {JobHandle(handle.on, handle.location, handle.path.split('/')[0])}",
        )
    return handle.path
