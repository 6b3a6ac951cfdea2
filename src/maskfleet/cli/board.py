"""`maskfleet board`: TensorBoard of a run."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from maskfleet.cli.console import err, out
from maskfleet.cli.options import CertOption, KeyOption, NoBrowserOption
from maskfleet.errors import ConfigError

if TYPE_CHECKING:
    from maskfleet.system.web.certificate import Certificate

PASSWORD_VARIABLE = "MASKFLEET_BOARD_PASSWORD"  # noqa: S105 - its name


def board(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a folder of runs.", show_default=False)],
    host: Annotated[str, typer.Option(help="Address to serve on; others than loopback need a password.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to serve on.")] = 6006,
    password_file: Annotated[
        Path | None,
        typer.Option(
            help=f"File with the password. Default: ${PASSWORD_VARIABLE}, or else you are asked.", show_default=False
        ),
    ] = None,
    cert: CertOption = None,
    key: KeyOption = None,
    no_browser: NoBrowserOption = False,
) -> None:
    """TensorBoard of a run until Ctrl-C: on loopback, or for others behind a password and TLS."""
    from maskfleet.launch.servers.board import BoardOptions, serve_board

    from_env = os.environ.pop(PASSWORD_VARIABLE, None)  # TensorBoard, which is started next, need not have it
    options = BoardOptions(host, port, lambda: _password(password_file, from_env), certificate_of(cert, key))
    try:
        serve_board(run.expanduser(), options, lambda url, mark: _show(url, mark, browser=not no_browser))
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def certificate_of(cert: Path | None, key: Path | None) -> Certificate | None:
    """The certificate of --cert and --key; None without them."""
    from maskfleet.system.web.certificate import Certificate

    if cert is not None and key is not None:
        return Certificate(cert, key)
    if cert is not None or key is not None:
        raise ConfigError("--cert and --key belong together", remedy="give both, or neither")
    return None


def _password(file: Path | None, from_env: str | None) -> str:
    """The password from a file, the environment or the terminal: never from the command line, which others can read."""
    if file is not None:
        try:
            return file.read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the password cannot be read from {file}: {error}", remedy="check the file") from error
    if from_env is not None:
        return from_env
    if not sys.stdin.isatty():
        raise ConfigError(
            "there is no terminal to ask for a password", remedy=f"use --password-file or set {PASSWORD_VARIABLE}"
        )
    import getpass

    typed = getpass.getpass("Password for the board: ")
    if getpass.getpass("The same again: ") != typed:
        raise ConfigError("the two passwords differ", remedy="try again")
    return typed


def _show(url: str, fingerprint: str | None, *, browser: bool) -> None:
    out.print(f"TensorBoard  {url}", markup=False)
    if url.startswith("https:"):
        err.print("any user name will do, with the password", markup=False)
    if fingerprint is not None:
        err.print(f"the certificate is self-signed; its SHA-256 fingerprint is\n{fingerprint}", markup=False)
    if browser:
        webbrowser.open(url)
