"""docker, podman or buildah, whichever works here: build, tag, inspect and push an image."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from maskfleet.errors import InfraError, MaskfleetError
from maskfleet.infra.images.explain import explained
from maskfleet.system.process import Finished, Shell, run_command, stream

NAMES = ("docker", "podman", "buildah")
# Answers only if the tool can do its work: docker's client alone, without its daemon, cannot.
_PROBES: dict[str, tuple[str, ...]] = {
    "docker": ("docker", "version", "--format", "{{.Server.Version}}"),
    "podman": ("podman", "version"),
    "buildah": ("buildah", "version"),
}
_DIGEST = re.compile(r"\bsha256:[0-9a-f]{64}\b")
_PUSHED = re.compile(r"\bdigest: (sha256:[0-9a-f]{64})\b")
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """One `build` command."""

    context: Path
    dockerfile: str  # relative to the context
    arguments: Mapping[str, str]
    epoch: int  # the time of all files in the image


class Builder:
    """One of the three tools; their commands differ little."""

    def __init__(self, name: str, *, env: Mapping[str, str], run: Shell = run_command) -> None:
        self.name = name
        self._env, self._run = env, run

    def local_name(self, tag: str) -> str:
        """The full name of our image with this tag on this machine."""
        return f"maskfleet:{tag}" if self.name == "docker" else f"localhost/maskfleet:{tag}"

    def build(self, request: BuildRequest, *, log: Path, say: Say) -> str:
        """Build an image; returns its id, 64 hexadecimal digits. The output is in `log`, and each line is shown."""
        with tempfile.TemporaryDirectory() as folder:
            id_file = Path(folder, "id")
            argv = self.build_command(request, id_file)
            # Attestations hold the time of the build, so that the digest of a pushed image would differ each time.
            env = {**self._env, "BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}
            done = self._stream(argv, cwd=request.context, env=env, log=log, say=say)
            if done.code != 0 or done.interrupted:
                if done.interrupted:
                    raise InfraError("the build was stopped", remedy="run the same command again")
                raise explained(log.read_text(errors="replace"), self.name, f"the build failed; its output is in {log}")
            return id_file.read_text().strip().removeprefix("sha256:")

    def build_command(self, request: BuildRequest, id_file: Path) -> list[str]:
        """The command that builds `request` and writes the image's id to `id_file`."""
        argv = [self.name, "build", "--iidfile", str(id_file), "--file", request.dockerfile]
        if self.name == "docker":
            # BuildKit 0.31 and newer write OCI manifests unless told otherwise, and SageMaker refuses those.
            argv += ["--output", "type=image,oci-mediatypes=false"]
        else:
            # One time for all files, and a format that does not name the container of the build: reproducible.
            argv += ["--format", "oci", "--timestamp", str(request.epoch)]
        for name, value in request.arguments.items():
            argv += ["--build-arg", f"{name}={value}"]
        return [*argv, "."]

    def tag(self, image_id: str, name: str) -> None:
        """Give an image another name."""
        self._done([self.name, "tag", image_id, name], f"cannot give the image the name {name}")

    def image_id(self, name: str) -> str | None:
        """The id of the local image `name`; None if there is none."""
        if self.name == "buildah":
            argv = ["buildah", "inspect", "--type", "image", "--format", "{{.FromImageID}}", name]
        else:
            argv = [self.name, "image", "inspect", "--format", "{{.Id}}", name]
        done = self._run(argv)
        return done.out.strip().removeprefix("sha256:") if done.code == 0 else None

    def push(self, name: str, *, auth: Path | None, log: Path, say: Say) -> str:
        """Push the local image `name`; returns the digest that the registry knows it by.

        `auth` is a folder with a config.json that holds the login; None uses the login of the user.
        """
        env = dict(self._env)
        with tempfile.TemporaryDirectory() as folder:
            digest_file = Path(folder, "digest")
            if self.name == "docker":
                argv = ["docker", "push", name]
                if auth is not None:
                    # The other settings of docker are in its usual folder: only the address of the daemon matters here.
                    env |= {"DOCKER_CONFIG": str(auth), "DOCKER_HOST": self._docker_host()}
            else:
                login = [] if auth is None else ["--authfile", str(auth / "config.json")]
                # SageMaker reads only docker's kind of manifest; the configuration keeps its bytes, and its digest.
                argv = [self.name, "push", "--format", "v2s2", *login, "--digestfile", str(digest_file), name]
            done = self._stream(argv, cwd=Path(folder), env=env, log=log, say=say)
            output = log.read_text(errors="replace")
            if done.interrupted:
                raise InfraError("the push was stopped", remedy="run it again: layers that were pushed are kept")
            if done.code != 0:
                raise explained(output, self.name, f"{name} could not be pushed; the output is in {log}")
            found = digest_file.read_text().strip() if digest_file.exists() else _pushed_digest(output)
        if not _DIGEST.fullmatch(found):
            raise InfraError(
                f"{name} was pushed, but {self.name} did not report its digest", remedy="update it, and push again"
            )
        return found

    def _docker_host(self) -> str:
        if self._env.get("DOCKER_HOST"):
            return self._env["DOCKER_HOST"]
        done = self._run(["docker", "context", "inspect", "--format", "{{.Endpoints.docker.Host}}"])
        return done.out.strip() if done.code == 0 else ""

    def _stream(self, argv: Sequence[str], *, cwd: Path, env: Mapping[str, str], log: Path, say: Say) -> Finished:
        return stream(
            argv,
            cwd=cwd,
            env=env,
            log=log,
            line=say,
            tick=lambda: None,
            asked_to_stop=lambda times: say(f"stopping {self.name}"),
        )

    def _done(self, argv: Sequence[str], otherwise: str) -> None:
        done = self._run(argv)
        if done.code != 0:
            raise explained(done.err or done.out, self.name, otherwise)


def _pushed_digest(output: str) -> str:
    found = _PUSHED.findall(output)
    return found[-1] if found else ""


def find_builder(wanted: str | None, *, env: Mapping[str, str], run: Shell = run_command) -> Builder:
    """The tool `wanted`, or else the first of the three that works here."""
    if wanted is not None and wanted not in NAMES:
        raise InfraError(f"{wanted} cannot build images", remedy=f"write --with {', '.join(NAMES)}, or leave it out")
    reasons = []
    for name in (wanted,) if wanted else NAMES:
        try:
            done = run(_PROBES[name])
        except MaskfleetError as error:
            reasons.append(error.what)
            continue
        if done.code == 0:
            return Builder(name, env=env, run=run)
        said = (done.err or done.out).strip().splitlines()
        reasons.append(f"{name} does not work: {said[-1] if said else f'it ended with {done.code}'}")
    raise InfraError(
        f"no tool here can build images: {'; '.join(reasons)}",
        remedy="install docker, podman or buildah, or start docker's daemon",
    )
