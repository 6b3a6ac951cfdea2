"""Starts the page of a model: on loopback as it is, from elsewhere behind TLS and a token."""

from __future__ import annotations

import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from maskfleet.data.pipeline.build import eval_batch_size
from maskfleet.errors import ConfigError
from maskfleet.inference.detector import Detector
from maskfleet.serve.app import MAX_BODY_BYTES, App
from maskfleet.serve.batching import DetectionQueue
from maskfleet.serve.detection import DetectionService
from maskfleet.serve.page.guard import own_pages_only
from maskfleet.serve.page.site import Site
from maskfleet.serve.page.validation import ValidationImages
from maskfleet.serve.server import AppServer, serve_until_stopped
from maskfleet.system.files import cache_folder, write_atomically
from maskfleet.system.network import LOOPBACK
from maskfleet.system.web.certificate import Certificate, self_signed
from maskfleet.system.web.front import is_local, protected, url_of
from maskfleet.system.web.proxy import PasswordGate

SHORTEST_TOKEN = 16


@dataclass(frozen=True, slots=True)
class Address:
    """Where to serve, and for an address that others reach, how it is protected."""

    host: str
    port: int
    token: str = field(default="", repr=False)  # needed if the host is not this machine alone
    certificate: Certificate | None = None  # None: self-signed, made once


def serve_page(
    detector: Detector,
    images: ValidationImages | None,
    address: Address,
    *,
    score: float | None = None,
    on_ready: Callable[[str, str | None], None],
) -> None:
    """Serve until Ctrl-C; `on_ready` gets the address and the fingerprint of a self-signed certificate."""
    batch_size = eval_batch_size("auto", detector.device)
    detector.detect(np.zeros((480, 640, 3), np.uint8))  # the first detection takes seconds longer than all others
    queue = DetectionQueue(detector, batch_size=batch_size)
    lowest = score if score is not None else detector.run.eval.show_score_threshold
    service = DetectionService(queue, source=detector.source, default_score=lowest, at_once=max(4, 2 * batch_size))
    site = Site(detector, service, images, default_score=lowest)
    try:
        if is_local(address.host):
            app = App(site.routes, guard=own_pages_only(address.host))
            server = AppServer(app, address.host, address.port)
            url = url_of("http", address.host, server.server_port)
            serve_until_stopped(server, ready=lambda: on_ready(url, None))
        else:
            app = App(site.routes, guard=own_pages_only())  # the proxy names loopback
            _serve_protected(AppServer(app, LOOPBACK, 0), address, on_ready)
    finally:
        queue.close()


def _serve_protected(server: AppServer, address: Address, on_ready: Callable[[str, str | None], None]) -> None:
    assert address.token
    own = address.certificate
    certificate = own or self_signed(cache_folder("serve"), address.host)
    with protected(
        (address.host, address.port),
        upstream_port=server.server_port,
        gate=PasswordGate(address.token),
        certificate=certificate,
        max_body=MAX_BODY_BYTES,
    ) as port:
        fingerprint = None if own else certificate.fingerprint()
        serve_until_stopped(server, ready=lambda: on_ready(url_of("https", address.host, port), fingerprint))


def token_in(file: Path) -> str:
    """The token in `file`, which only its owner may read; a new one is written if there is no such file."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(file, f"{secrets.token_urlsafe(24)}\n", private=True)
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
        token = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token cannot be read from {file}: {error}", remedy="give another file") from error
    if mode & 0o077:
        raise ConfigError(f"others can read the token in {file}", remedy=f"run chmod 600 {file}")
    return checked_token(token)


def checked_token(token: str) -> str:
    """`token`; raises if it is too short to keep others out."""
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"the token has fewer than {SHORTEST_TOKEN} characters, or others than those of ASCII",
            remedy="choose a longer one, or none: then one is made",
        )
    return token
