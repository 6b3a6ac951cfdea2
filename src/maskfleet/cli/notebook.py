"""`maskfleet notebook`: JupyterLab and TensorBoard of a run, on its cluster or on this machine."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from maskfleet.cli.console import err, out


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
    from maskfleet.config.launch import DEFAULT_TARGET
    from maskfleet.launch.backend import NotebookOptions, backend_of, parse_handle
    from maskfleet.launch.job import JobHandle

    parsed = parse_handle(handle) if "://" in handle else JobHandle(DEFAULT_TARGET, "", str(Path(handle).absolute()))
    backend = backend_of(parsed)
    if stop:
        out.print(backend.stop_notebook(parsed), markup=False)
        return
    options = NotebookOptions(
        port=port,
        image=image,
        instance=instance,
        new_password=new_password,
        password_stdin=password_stdin,
        show=lambda jupyter, tensorboard: _show(jupyter, tensorboard, browser=not no_browser),
        say=lambda text: err.print(text, markup=False),
    )
    try:
        backend.notebook(parsed, options)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _show(jupyter: str, tensorboard: str, *, browser: bool) -> None:
    out.print(f"JupyterLab   {jupyter}", markup=False)
    out.print(f"TensorBoard  {tensorboard}", markup=False)
    if browser:
        webbrowser.open(jupyter)
