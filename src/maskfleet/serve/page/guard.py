"""Refuses requests that a page of another site makes a browser send."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from maskfleet.serve.app import Guard, Request, RequestError
from maskfleet.system.web.same_site import is_from_another_site


def own_pages_only(host: str = "localhost") -> Guard:
    """A guard for a server on `host`: a request must name this machine, and come from no page of another site.

    A site whose name is made to point at this machine (DNS rebinding) passes for the same site in the browser, but its
    name is in the Host header. The port may differ: SSH forwards any.
    """

    def guard(request: Request) -> None:
        named = request.headers.get("host", "")
        if not _is_own(named, host):
            raise RequestError(
                403,
                f"the Host header is {named[:80] or 'missing'}",
                remedy="use the address that `maskfleet serve` printed",
            )
        if is_from_another_site(request.method, request.headers.get):
            raise RequestError(403, "requests of other sites are refused", remedy="open the page itself")

    return guard


def _is_own(named: str, host: str) -> bool:
    try:
        name = urlsplit(f"//{named}").hostname or ""
        return name in ("localhost", host.lower()) or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
