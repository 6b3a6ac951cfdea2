"""Whether the browser sent a request for a page of ours, or for a page of another site."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit


def is_from_another_site(method: str, header: Callable[[str], str | None]) -> bool:
    """Whether a page of another site sent a request; opening ours by a link from elsewhere is allowed.

    `header` returns a header by its lower-case name.
    """
    origin = header("origin")
    if origin is not None and _host_of(origin) != header("host"):
        return True
    is_link = method == "GET" and header("sec-fetch-mode") == "navigate"
    return (header("sec-fetch-site") or "none") in ("cross-site", "same-site") and not is_link


def path_of(target: str) -> str | None:
    """Path and query that a request names, also in the form with scheme and host; None if it names none."""
    if target.startswith("/"):
        return target
    try:
        parts = urlsplit(target)
    except ValueError:  # such as brackets that enclose no address
        return None
    if parts.scheme not in ("http", "https"):
        return None
    query = f"?{parts.query}" if parts.query else ""
    return f"/{parts.path.lstrip('/')}{query}"


def _host_of(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""  # no browser sends such an origin
