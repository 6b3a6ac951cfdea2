"""Requests and responses, and the app that finds the handler of a path. Independent of the server, and of the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from maskfleet.errors import MaskfleetError
from maskfleet.log import logger

JSON = "application/json"
MAX_BODY_BYTES = 20 * 10**6


class RequestError(MaskfleetError):
    """A request that cannot be answered as it is, with its HTTP status."""

    def __init__(self, status: int, what: str, *, remedy: str) -> None:
        super().__init__(what, remedy=remedy)
        self.status = status


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request."""

    method: str
    path: str  # without the query
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)  # by lower-case name
    body: bytes = b""

    @property
    def content_type(self) -> str:
        """The media type of the body, in lower case and without parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()


@dataclass(frozen=True, slots=True)
class Response:
    """One HTTP response."""

    status: int
    body: bytes
    content_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[[Request], Response]
Guard = Callable[[Request], None]


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`content` as a JSON response."""
    return Response(status, json.dumps(content).encode(), headers=headers or {})


def error_response(error: RequestError) -> Response:
    """What went wrong and what to do, as JSON; a client that should come back is told when."""
    headers = {"Retry-After": "1"} if error.status == 503 else {}
    return json_response({"error": error.what, "remedy": error.remedy}, error.status, headers)


class App:
    """Answers requests by the handler of their method and path; `guard` may refuse any by a RequestError."""

    def __init__(
        self, routes: Mapping[tuple[str, str], Handler], *, max_bytes: int = MAX_BODY_BYTES, guard: Guard | None = None
    ) -> None:
        self.routes = dict(routes)
        self.max_bytes = max_bytes
        self._guard = guard

    def answer(self, request: Request) -> Response:
        """The response to `request`; never raises."""
        try:
            if self._guard is not None:
                self._guard(request)
            return self._handler(request)(request)
        except RequestError as error:
            return error_response(error)
        except Exception:  # a fault of ours must not end the server
            logger.exception("%s %s failed", request.method, request.path)
            return error_response(RequestError(500, "the server failed", remedy="its log says why; try another image"))

    def _handler(self, request: Request) -> Handler:
        method = "GET" if request.method == "HEAD" else request.method
        found = self.routes.get((method, request.path))
        if found is not None:
            return found
        methods = sorted(known for known, path in self.routes if path == request.path)
        if methods:
            raise RequestError(
                405, f"{request.method} is not possible for {request.path}", remedy=f"use {' or '.join(methods)}"
            )
        paths = ", ".join(sorted({path for _, path in self.routes}))
        raise RequestError(404, f"there is no {request.path}", remedy=f"the paths are {paths}")
