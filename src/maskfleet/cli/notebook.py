"""`maskfleet notebook`: JupyterLab and TensorBoard of a run, on its cluster or on this machine."""

from __future__ import annotations

import getpass
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from maskfleet.cli.console import err, out

if TYPE_CHECKING:
    from maskfleet.launch.job import JobHandle


def notebook(
    handle: Annotated[
        str, typer.Argument(help="What `maskfleet launch` printed, or a run's folder.", show_default=False)
    ],
    port: Annotated[int, typer.Option(min=1, max=65534, help="Port of this machine, on 127.0.0.1.")] = 8443,
    image: Annotated[
        str | None, typer.Option(help="eks: notebook image. Default: the run's, its tag with -notebook.")
    ] = None,
    instance: Annotated[str | None, typer.Option(help="eks: GPU instance type. Default: none, on the CPU.")] = None,
    password_stdin: Annotated[
        bool, typer.Option("--password-stdin", help="eks: read a new password from standard input.")
    ] = False,
    new_password: Annotated[bool, typer.Option("--new-password", help="eks: ask for another password.")] = False,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the addresses.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="eks: remove the notebook; the run's files stay.")] = False,
) -> None:
    """JupyterLab and TensorBoard of a run, on 127.0.0.1 until Ctrl-C."""
    from maskfleet.errors import LaunchError
    from maskfleet.launch.job import JobHandle

    parsed = JobHandle.parse(handle) if "://" in handle else JobHandle("local", "", str(Path(handle).absolute()))
    try:
        match parsed.on:
            case "local" if stop:
                raise LaunchError("a notebook on this machine ends by itself", remedy="press Ctrl-C where it runs")
            case "local":
                _on_this_machine(Path(parsed.path), port=port, browser=not no_browser)
            case "eks" if stop:
                _stop(parsed)
            case "eks":
                ask = _piped if password_stdin else _asked
                wants = {"image": image, "instance": instance, "ask": ask, "renew": new_password or password_stdin}
                _on_eks(parsed, port=port, browser=not no_browser, wants=wants)
            case _:
                raise LaunchError(
                    f"there are no notebooks for runs on {parsed.on}",
                    remedy="copy the run's folder here, then `maskfleet notebook FOLDER`",
                )
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _on_eks(handle: JobHandle, *, port: int, browser: bool, wants: dict[str, Any]) -> None:
    from maskfleet.launch.eks.notebook import PORT, Cluster, NotebookRelease, certificate_fingerprint, ensured
    from maskfleet.system.kube.client import Kube
    from maskfleet.system.kube.port_forward import PortForward, bound_socket
    from maskfleet.system.process import run_command

    cluster = Cluster.of(handle)
    with bound_socket(port) as listener, Kube(context=cluster.context, namespace=cluster.namespace) as kube:
        values = ensured(NotebookRelease(cluster, run=run_command), **wants)

        def show() -> None:
            _show(f"https://127.0.0.1:{port}/lab", f"https://127.0.0.1:{port}/tensorboard/", browser=browser)
            err.print(f"log in as {values.get('user', 'fleet')}; Ctrl-C ends the forward,", markup=False)
            err.print(f"`maskfleet notebook {handle} --stop` the notebook", markup=False)

        fingerprint = certificate_fingerprint(kube, cluster.notebook, values)
        if fingerprint:
            err.print(f"the certificate is self-signed; its SHA-256 fingerprint is\n{fingerprint}", markup=False)
        forward = PortForward(
            kube,
            selector=f"app.kubernetes.io/name=maskfleet-notebook,app.kubernetes.io/instance={cluster.notebook}",
            port=values.get("proxy", {}).get("port", PORT),
            say=lambda words: err.print(words, markup=False),
            on_ready=show,
        )
        kube.run(forward.serve(listener))


def _stop(handle: JobHandle) -> None:
    from maskfleet.launch.eks.notebook import Cluster, NotebookRelease
    from maskfleet.system.process import run_command

    cluster = Cluster.of(handle)
    was_there = NotebookRelease(cluster, run=run_command).stop()
    out.print(f"{cluster.notebook} is removed" if was_there else f"there is no {cluster.notebook}", markup=False)


def _on_this_machine(run_dir: Path, *, port: int, browser: bool) -> None:
    from maskfleet.launch.local.notebook import serve

    serve(run_dir, port=port, on_ready=lambda it: _show(it.jupyter_url, it.tensorboard_url, browser=browser))


def _show(jupyter: str, tensorboard: str, *, browser: bool) -> None:
    out.print(f"JupyterLab   {jupyter}", markup=False)
    out.print(f"TensorBoard  {tensorboard}", markup=False)
    if browser:
        webbrowser.open(jupyter)


def _piped() -> str:
    return sys.stdin.readline().rstrip("\r\n")


def _asked() -> str:
    """A password typed twice; an empty one is made here and shown once."""
    from maskfleet.errors import LaunchError
    from maskfleet.launch.eks.notebook import checked_password, random_password

    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise LaunchError("there is no terminal to ask for a password", remedy="pipe one in, with --password-stdin")
    typed = getpass.getpass("Password for the notebook (empty: make one): ")
    if not typed:
        made = random_password()
        err.print(f"the password, shown only now: {made}", markup=False)
        return made
    checked_password(typed)
    if getpass.getpass("The same again: ") != typed:
        raise LaunchError("the two passwords differ", remedy="try again")
    return typed
