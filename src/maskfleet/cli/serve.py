"""`maskfleet serve`: a page on which people try a model, and the same over HTTP."""

from __future__ import annotations

import os
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from maskfleet.cli.board import certificate_of
from maskfleet.cli.console import err, out
from maskfleet.cli.options import (
    BestOption,
    CertOption,
    DeviceOption,
    KeyOption,
    LastOption,
    NoBrowserOption,
    StepOption,
    chosen_checkpoint,
)
from maskfleet.errors import MaskfleetError
from maskfleet.log import logger

if TYPE_CHECKING:
    from maskfleet.inference.detector import Detector
    from maskfleet.serve.page.validation import ValidationImages

TOKEN_VARIABLE = "MASKFLEET_SERVE_TOKEN"  # noqa: S105 - its name


def serve(
    weights: Annotated[Path, typer.Argument(help="Run directory or weights file.", show_default=False)],
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            "-d",
            help="Folder with a validation set to choose images from. Default: the run's own.",
            show_default=False,
        ),
    ] = None,
    score: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Score that the page begins with. Default: the run's own.", show_default=False),
    ] = None,
    best: BestOption = False,
    last: LastOption = False,
    step: StepOption = None,
    device: DeviceOption = None,
    host: Annotated[str, typer.Option(help="Address to serve on; others than loopback need a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to serve on; 0 takes a free one.")] = 8000,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help=f"File with the token, made if missing. Default: ${TOKEN_VARIABLE}, or a file in the cache folder.",
            show_default=False,
        ),
    ] = None,
    cert: CertOption = None,
    key: KeyOption = None,
    no_browser: NoBrowserOption = False,
) -> None:
    """Try a model in the browser until Ctrl-C: drop an image, choose one of the validation set, or use the camera.

    On loopback, or for others behind a token and TLS. Programs use the same by HTTP: /openapi.json describes it.
    """
    from maskfleet.system.web.front import free_port, is_local

    checkpoint, certificate = chosen_checkpoint(best=best, last=last, step=step), certificate_of(cert, key)
    token = "" if is_local(host) else _token(token_file)
    free_port(host, port)  # before the model is loaded, which takes longer
    from maskfleet.inference.load import load
    from maskfleet.serve.page.start import Address, serve_page

    detector = load(weights, device, checkpoint=checkpoint)
    serve_page(
        detector,
        _validation(detector, data, is_run=weights.expanduser().is_dir()),
        Address(host, port, token, certificate),
        score=score,
        on_ready=lambda url, mark: _show(detector, url, mark, browser=not no_browser),
    )
    err.print("stopped", markup=False)


def _token(file: Path | None) -> str:
    """The token from a file or the environment: never from the command line, which others can read."""
    from maskfleet.serve.page.start import checked_token, token_in
    from maskfleet.system.files import cache_folder

    from_env = os.environ.pop(TOKEN_VARIABLE, None)  # processes that are started later need not have it
    if file is None and from_env is not None:
        return checked_token(from_env)
    path = (file or cache_folder("serve") / "token").expanduser()
    token = token_in(path)
    err.print(f"the token is in {path}", markup=False)
    return token


def _validation(detector: Detector, data: str | None, *, is_run: bool) -> ValidationImages | None:
    """The images to choose from; without --data, a page without them is better than none."""
    from maskfleet.serve.page.validation import open_validation

    if data is None and not is_run:
        return None
    try:
        return open_validation(detector.run, data)
    except MaskfleetError as error:
        if data is not None:
            raise
        logger.warning("the page has no validation images: %s", error.what)
        return None


def _show(detector: Detector, url: str, fingerprint: str | None, *, browser: bool) -> None:
    out.print(f"{detector.source}  {url}", markup=False, soft_wrap=True)
    if url.startswith("https:"):
        err.print("the browser asks for a user name (any) and a password: that is the token", markup=False)
    if fingerprint is not None:
        err.print(f"the certificate is self-signed; its SHA-256 fingerprint is\n{fingerprint}", markup=False)
    if browser:
        webbrowser.open(url)
