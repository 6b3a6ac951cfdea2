"""`maskfleet notebook` on EKS: helm installs the chart `notebook` for one run, and a port-forward connects to it."""

from __future__ import annotations

import base64
import getpass
import hashlib
import json
import re
import secrets
import ssl
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from maskfleet.errors import LaunchError
from maskfleet.launch.backend import NotebookOptions
from maskfleet.launch.eks.handle import launch_of, release_of
from maskfleet.launch.eks.release import ReleaseRecord, record_of, refuse_strangers
from maskfleet.launch.job import JobHandle
from maskfleet.system.deploy_files import deploy_path
from maskfleet.system.kube.client import Kube
from maskfleet.system.kube.port_forward import PortForward, bound_socket
from maskfleet.system.process import Finished, Shell

USER = "fleet"
PORT = 8443
CHART = "notebook"
SUFFIX = f"-{CHART}"
LONGEST_RELEASE = 40  # the charts enforce it
SHORTEST_PASSWORD = 10
BCRYPT_COST = 12
BCRYPT_BYTES = 72  # bcrypt ignores what follows
HELM_S = 120.0
Values = dict[str, Any]

_TAGGED = re.compile(r"(?P<tagged>(?:.+/)?[^/:@]+:[^/:@]+)(?:@sha256:[0-9a-f]{64})?")


@dataclass(frozen=True, slots=True)
class RunRelease:
    """The release of a run, in a namespace of a cluster."""

    context: str | None
    namespace: str
    name: str

    @classmethod
    def of(cls, handle: JobHandle) -> RunRelease:
        """The release of the handle `eks://CONTEXT@NAMESPACE/RELEASE`."""
        launch = launch_of(handle)
        return cls(launch.context, launch.namespace, release_of(handle))

    @property
    def notebook(self) -> str:
        """The release of the run's notebook; a long name is cut, and a checksum keeps it unique."""
        longest = LONGEST_RELEASE - len(SUFFIX)
        if len(self.name) <= longest:
            return f"{self.name}{SUFFIX}"
        checksum = hashlib.sha256(self.name.encode()).hexdigest()[:8]
        return f"{self.name[: longest - 9].rstrip('-')}-{checksum}{SUFFIX}"


class NotebookRelease:
    """The notebook of one run as a helm release."""

    def __init__(self, release: RunRelease, record: ReleaseRecord | None, *, run: Shell) -> None:
        """`record` is helm's record of the notebook's own release."""
        refuse_strangers(record, None, CHART, release.notebook)
        self.release, self._run = release, run

    def values(self) -> Values | None:
        """The values of the installed notebook; None if there is none."""
        return self._values_of(self.release.notebook)

    def run_values(self) -> Values:
        """All values of the run's own release."""
        found = self._values_of(self.release.name, "--all")
        if found is None:
            raise LaunchError(
                f"there is no release {self.release.name} in the namespace {self.release.namespace}",
                remedy="check the handle; `helm list --all` shows what is there",
            )
        return found

    def install(self, values: Values) -> None:
        """Install or change it; values go through standard input, since other users can read a command line."""
        chart = str(deploy_path("helm", CHART))
        done = self._helm(
            "upgrade", "--install", self.release.notebook, chart, "--values", "-", stdin=json.dumps(values)
        )
        if done.code != 0:
            raise LaunchError(
                f"helm did not install {self.release.notebook}: {_error_output(done)}",
                remedy="it names the missing value or permission; docs/run-anywhere/eks/notebook.md lists the values",
            )

    def stop(self) -> bool:
        """Remove it; False if there was none."""
        done = self._helm("uninstall", self.release.notebook)
        if done.code != 0 and "not found" not in done.err:
            raise LaunchError(
                f"helm did not remove {self.release.notebook}: {_error_output(done)}", remedy="fix that, then try again"
            )
        return done.code == 0

    def _values_of(self, release: str, *options: str) -> Values | None:
        done = self._helm("get", "values", release, *options, "--output", "json")
        if done.code != 0:
            if "not found" in done.err:
                return None
            raise LaunchError(
                f"helm cannot read the release {release}: {_error_output(done)}",
                remedy="see whether `helm list` works: VPN, kubeconfig (`aws eks update-kubeconfig`), AWS credentials",
            )
        values = json.loads(done.out or "null") or {}
        assert isinstance(values, dict)
        return values

    def _helm(self, *command: str, stdin: str = "") -> Finished:
        cluster = ["--namespace", self.release.namespace]
        if self.release.context is not None:
            cluster += ["--kube-context", self.release.context]
        return self._run(["helm", *command, *cluster], stdin, timeout_s=HELM_S)


def serve(handle: JobHandle, options: NotebookOptions, *, run: Shell) -> None:
    """Install the notebook of a run if needed, and forward its port until Ctrl-C."""
    release = RunRelease.of(handle)
    with bound_socket(options.port) as listener, Kube(context=release.context, namespace=release.namespace) as kube:
        values = ensured(
            NotebookRelease(release, record_of(kube, release.notebook), run=run),
            image=options.image,
            instance=options.instance,
            ask=lambda: _password(options),
            renew=options.new_password or options.password_stdin,
        )

        def show() -> None:
            url = f"https://127.0.0.1:{options.port}"
            options.show(f"{url}/lab", f"{url}/tensorboard/")
            options.say(f"log in as {values.get('user', USER)}; Ctrl-C ends the forward,")
            options.say(f"`maskfleet notebook {handle} --stop` the notebook")

        fingerprint = certificate_fingerprint(kube, release.notebook, values)
        if fingerprint:
            options.say(f"the certificate is self-signed; its SHA-256 fingerprint is\n{fingerprint}")
        forward = PortForward(
            kube,
            selector=f"app.kubernetes.io/name=maskfleet-notebook,app.kubernetes.io/instance={release.notebook}",
            port=values.get("proxy", {}).get("port", PORT),
            say=options.say,
            on_ready=show,
        )
        kube.run(forward.serve(listener))


def ensured(
    notebook: NotebookRelease, *, image: str | None, instance: str | None, ask: Callable[[], str], renew: bool
) -> Values:
    """Install the notebook if it is missing, or change what the options change; returns its values.

    `ask` returns the password of a new notebook, or the one that replaces the old (`renew`).
    """
    current = notebook.values()
    if current is not None and not (image or instance or renew):
        return current
    if current is None:
        wanted = values_for(notebook.run_values(), notebook.release.name, image=image, instance=instance)
    else:
        given = {"image": image, "gpu_instance_type": instance}
        wanted = current | {name: value for name, value in given.items() if value}
    if current is None or renew:
        wanted |= {"user": USER, "htpasswd": bcrypt_hash(checked_password(ask())), "existing_secret": ""}
    notebook.install(wanted)
    return wanted


def values_for(run: Values, release: str, *, image: str | None, instance: str | None) -> Values:
    """The values of the notebook, derived from those of the run's release."""
    folder = f"{run.get('log_dir') or 'logs'}/{run.get('run_id') or release}"
    values = {
        "image": image or notebook_image(str(run.get("image") or "")),
        "shared_fs": run.get("shared_fs"),
        "shared_pvc": run.get("shared_pvc"),
        "log_dir": folder,
        "gpu_instance_type": instance or "",
    }
    if run.get("data_pvc") and run.get("data_fs") not in (None, "", run.get("shared_fs")):
        values |= {"data_fs": run["data_fs"], "data_pvc": run["data_pvc"]}
    missing = [name for name in ("shared_fs", "shared_pvc") if not values[name]]
    if missing:
        raise LaunchError(
            f"the release {release} has no value {missing[0]}, so it is not a training run",
            remedy="check the handle; `maskfleet launch` prints it",
        )
    return values


def notebook_image(image: str) -> str:
    """The notebook image that belongs to a training image: the same name, its tag with `-notebook`."""
    match = _TAGGED.fullmatch(image)
    if match is None:
        raise LaunchError(
            f"the notebook image for {image or 'the run'} is not known",
            remedy="build and push it (docs/run-anywhere/images.md), and name it with --image",
        )
    return f"{match['tagged']}{SUFFIX}"


def certificate_fingerprint(kube: Kube, release: str, values: Values) -> str | None:
    """SHA-256 of the self-signed certificate in the form that browsers show; None for any other certificate."""
    tls = values.get("tls") or {}
    if tls.get("existing_secret") or tls.get("issuer"):
        return None
    secret = kube.get(kube.of_namespace("secrets", f"{release}-tls"))
    if secret is None:
        return None
    text = base64.b64decode(secret["data"]["tls.crt"]).decode()
    digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(text)).hexdigest().upper()
    return ":".join(digest[at : at + 2] for at in range(0, len(digest), 2))


def checked_password(password: str) -> str:
    """`password`; raises if it is too weak, too long or not printable."""
    problem = None
    if len(password) < SHORTEST_PASSWORD:
        problem = f"the password has fewer than {SHORTEST_PASSWORD} characters"
    elif len(password.encode()) > BCRYPT_BYTES:
        problem = f"the password has more than {BCRYPT_BYTES} bytes"
    elif not password.isprintable():
        problem = "the password has characters that cannot be typed into a browser"
    if problem:
        raise LaunchError(problem, remedy="choose another, or leave it empty to generate one")
    return password


def _password(options: NotebookOptions) -> str:
    """A password from standard input, or typed twice; for an empty one a random password is made and shown once."""
    if options.password_stdin:
        return sys.stdin.readline().rstrip("\r\n")
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise LaunchError("there is no terminal to ask for a password", remedy="pipe one in, with --password-stdin")
    typed = getpass.getpass("Password for the notebook (empty: generate one): ")
    if not typed:
        made = random_password()
        options.say(f"the password, shown only now: {made}")
        return made
    checked_password(typed)
    if getpass.getpass("The same again: ") != typed:
        raise LaunchError("the two passwords differ", remedy="try again")
    return typed


def random_password() -> str:
    """A random password of 20 characters."""
    return secrets.token_urlsafe(15)


def bcrypt_hash(password: str) -> str:
    """The bcrypt hash that is stored instead of `password`."""
    try:
        import bcrypt
    except ImportError as error:
        raise LaunchError("bcrypt is not installed here", remedy="pip install 'maskfleet[k8s]'") from error
    return bcrypt.hashpw(password.encode(), bcrypt.gensalt(BCRYPT_COST)).decode()


def _error_output(done: Finished) -> str:
    lines = [line for line in (done.err or done.out).splitlines() if line.strip()]
    return "\n".join(lines[-12:]) or f"it ended with {done.code}"
