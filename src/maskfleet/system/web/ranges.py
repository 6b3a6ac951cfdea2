"""A file on a web server, read in byte ranges; a broken connection is opened again where it stopped.

Proxies are those of the environment (HTTPS_PROXY, NO_PROXY), certificates those of the system or of SSL_CERT_FILE.
"""

from __future__ import annotations

import functools
import http.client
import os
import random
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from maskfleet import __version__
from maskfleet.errors import MaskfleetError
from maskfleet.log import logger

CHUNK_BYTES = 1 << 18
ATTEMPTS = 8  # in a row without a new byte
FIND_ATTEMPTS = 4  # before the first byte: a host that does not answer now is probably not reachable from here
BACK_OFF_S = 0.5  # before the second attempt; doubled before each further one
MAX_PAUSE_S = 60.0
TIMEOUT_S = 60.0  # to connect, and between two packets
_AGAIN = {408, 425, 429, 500, 502, 503, 504}
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_TUNNEL = re.compile(r"Tunnel connection failed: (\d+)")


class WebError(MaskfleetError):
    """A web server does not deliver a file; the same request again would not help."""


class _TryAgainError(Exception):
    """A request that may succeed later, after `pause_s` if the server named a time."""

    def __init__(self, why: str, pause_s: float = 0.0) -> None:
        super().__init__(why)
        self.pause_s = pause_s


@dataclass(frozen=True, slots=True)
class WebFile:
    """A file on a server as it was when it was found: all ranges must come from this version of it."""

    url: str
    size: int
    etag: str

    def read(self, start: int, end: int) -> Iterator[bytes]:
        """The bytes from `start` up to, not including, `end`."""
        done, failures = start, 0
        while done < end:
            try:
                for chunk in _body(self, done, end):
                    done, failures = done + len(chunk), 0
                    yield chunk
            except _TryAgainError as error:
                failures += 1
                _pause(error, failures, ATTEMPTS, self.url)


def find_file(urls: Sequence[str]) -> WebFile:
    """The file at the first of `urls` where it can be read; the error of the first one if there is none."""
    first: WebError | None = None
    for url in urls:
        try:
            return _found(url)
        except WebError as error:
            first = first or error
    assert first is not None, "no address was given"
    raise first


def read_whole(url: str, *, limit_bytes: int) -> bytes:
    """A small file, also from a server that sends no parts; WebError if it has more than `limit_bytes`."""
    _expect_address(url)
    failures = 0
    while True:
        try:
            with closing(_opened(url, 0, limit_bytes + 1)) as answer:
                _expect_plain(answer, url)
                content: bytes = answer.read(limit_bytes + 1)
            if len(content) >= min(int(answer.headers.get("Content-Length") or 0), limit_bytes + 1):
                break
            raise _TryAgainError(f"the connection ended at byte {len(content):,}")
        except (OSError, http.client.HTTPException, _TryAgainError) as error:
            again = error if isinstance(error, _TryAgainError) else _TryAgainError(_words(error))
            failures += 1
            _pause(again, failures, FIND_ATTEMPTS, url)
    if len(content) > limit_bytes:
        raise WebError(
            f"{shown(url)} has more than {limit_bytes:,} bytes", remedy="download it first, and give the file"
        )
    return content


def shown(url: str) -> str:
    """An address for messages, without a password and without a query, which may hold a signature."""
    try:
        parts = urlsplit(url)
    except ValueError:  # its parts, and so a password in it, cannot be told apart
        return "the address that was given"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _found(url: str) -> WebFile:
    _expect_address(url)
    failures = 0
    while True:
        try:
            with closing(_opened(url, 0, 1)) as answer:
                start, total = _span(answer, url)
                answer.read()
            assert start == 0, "checked by _span"
            return WebFile(url, total, answer.headers.get("ETag", ""))
        except _TryAgainError as error:
            failures += 1
            _pause(error, failures, FIND_ATTEMPTS, url)


def _expect_address(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_complete = parts.scheme in ("https", "http") and bool(parts.hostname) and parts.port != 0
        is_usable = is_complete and "@" not in parts.netloc
    except ValueError:
        is_usable = False
    if not is_usable:
        raise WebError(
            f"{shown(url)} is not an address to download from",
            remedy="write https://host/path, without a user name or password",
        )


def _body(file: WebFile, start: int, end: int) -> Iterator[bytes]:
    """Chunks of one request; _TryAgainError where the connection ends before `end`."""
    with closing(_opened(file.url, start, end)) as answer:
        if _span(answer, file.url, start) != (start, file.size) or answer.headers.get("ETag", "") != file.etag:
            raise WebError(
                f"{shown(file.url)} changed while it was read",
                remedy="run the same command again; if it happens again, use another mirror",
            )
        left = end - start
        while left:
            try:
                chunk = answer.read(min(CHUNK_BYTES, left))
            except (OSError, http.client.HTTPException) as error:
                raise _TryAgainError(f"the connection broke ({_words(error)})") from error
            if not chunk:
                raise _TryAgainError(f"the connection ended at byte {end - left:,}")
            left -= len(chunk)
            yield chunk


def _opened(url: str, start: int, end: int) -> Any:
    headers = {
        "Range": f"bytes={start}-{end - 1}",
        "Accept-Encoding": "identity",
        "User-Agent": f"maskfleet/{__version__}",
    }
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - http and https only, see _opener
    try:
        return _opener().open(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        with closing(error):
            raise _status_error(url, error.code, error.headers.get("Retry-After", "")) from error
    except urllib.error.URLError as error:
        raise _connection_error(url, error.reason) from error
    except (OSError, http.client.HTTPException) as error:
        raise _connection_error(url, error) from error


def _span(answer: Any, url: str, start: int = 0) -> tuple[int, int]:
    """(first byte, bytes of the whole file) of an answer to a range request."""
    _expect_plain(answer, url)
    found = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    if answer.status != http.client.PARTIAL_CONTENT or found is None or int(found[1]) != start:
        raise WebError(
            f"{shown(url)} is on a server that does not send parts of a file (Range requests)",
            remedy="use another mirror",
        )
    return int(found[1]), int(found[3])


def _expect_plain(answer: Any, url: str) -> None:
    kind = answer.headers.get("Content-Type", "")
    if kind.startswith("text/html"):
        raise WebError(
            f"{shown(url)} answered with a web page instead of the file, as proxies and login pages do",
            remedy="open the address in a browser on this machine; set HTTPS_PROXY or NO_PROXY, or use --mirror",
        )
    if answer.headers.get("Content-Encoding", "identity") != "identity":
        raise WebError(f"{shown(url)} was sent compressed, which was not asked for", remedy="use another mirror")


def _status_error(url: str, status: int, retry_after: str) -> Exception:
    if status in _AGAIN:
        return _TryAgainError(f"the server answers {status}", float(retry_after) if retry_after.isdecimal() else 0.0)
    if status == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
        return WebError(
            f"{shown(url)} is shorter than it was", remedy="run the same command again, or use another mirror"
        )
    if status in (401, 403, 407):
        return WebError(
            f"{shown(url)} may not be read ({status})",
            remedy="check the address and the proxy (HTTPS_PROXY), or use another mirror",
        )
    if status in (404, 410):
        return WebError(f"{shown(url)} does not exist ({status})", remedy="check the address, or use another mirror")
    return WebError(f"{shown(url)} cannot be read: the server answers {status}", remedy="use another mirror")


def _connection_error(url: str, reason: object) -> Exception:
    if isinstance(reason, ssl.SSLCertVerificationError):
        return WebError(
            f"the certificate of {urlsplit(url).hostname} is not trusted: {reason.verify_message}",
            remedy="if your network has its own certificate authority, name its file in SSL_CERT_FILE",
        )
    refused = _TUNNEL.search(str(reason))
    if refused is not None and int(refused[1]) not in _AGAIN:
        return WebError(
            f"the proxy refuses to connect to {urlsplit(url).hostname} ({refused[1]})",
            remedy="check HTTPS_PROXY and its user name and password, or name the host in NO_PROXY",
        )
    return _TryAgainError(f"no connection ({_words(reason)})")


def _pause(error: _TryAgainError, failures: int, attempts: int, url: str) -> None:
    """Wait before the next attempt; WebError after the last one."""
    if failures >= attempts:
        raise WebError(
            f"{shown(url)} cannot be read: {error}, also after {attempts} attempts",
            remedy="check the network and the address, then run the same command again",
        ) from error
    backed_off_s = BACK_OFF_S * 2 ** (failures - 1) * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
    pause_s = min(max(error.pause_s, backed_off_s), MAX_PAUSE_S)
    logger.debug("%s: %s; trying again in %.1f s", shown(url), error, pause_s)
    time.sleep(pause_s)


class _SafeRedirect(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but never from HTTPS to HTTP."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if req.full_url.startswith("https:") and not newurl.startswith("https:"):
            fp.close()
            raise WebError(
                f"{shown(req.full_url)} redirects to {shown(newurl)}, which is not encrypted",
                remedy="use another mirror",
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener() -> urllib.request.OpenerDirector:
    """HTTP and HTTPS only: the default opener also reads file: and ftp: addresses, where a redirect may point."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.UnknownHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        _SafeRedirect(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPSHandler(context=_context(os.environ.get("SSL_CERT_FILE"))),
    ):
        opener.add_handler(handler)
    return opener


@functools.cache
def _context(cert_file: str | None) -> ssl.SSLContext:
    """Loading the certificates takes longer than a request; `cert_file` is what they were loaded from."""
    return ssl.create_default_context(cafile=cert_file or None)


def _words(reason: object) -> str:
    return (str(reason) or type(reason).__name__).splitlines()[0]
