"""A process in a pod, with its standard input and output, over the API's websocket."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from maskfleet.errors import ConnectionBrokenError, LaunchError
from maskfleet.system.kube.client import Kube, refusal, translated

PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
STDIN, STDOUT, STDERR, STATUS = b"\x00", 1, 2, 3
MAX_MESSAGE = 1 << 24


class PodStream:
    """Standard input and output of a process in a pod."""

    def __init__(self, websocket: Any) -> None:
        self._websocket = websocket
        self._errors = b""

    async def read(self) -> bytes:
        """Some bytes of its output; no bytes once it exited with 0. Any other exit is an error."""
        while True:
            message = await self._websocket.receive_bytes()
            channel, data = message[0], bytes(message[1:])
            if channel == STDOUT and data:
                return data
            if channel == STDERR:
                self._errors += data
            if channel == STATUS:
                status = json.loads(data)
                if status["status"] == "Success":
                    return b""
                lines = self._errors.decode("utf-8", "replace").strip().splitlines()
                raise LaunchError(
                    f"the pod could not read its files: {lines[-1] if lines else status.get('message')}",
                    remedy="its image must be one of deploy/docker/train, which has Python 3.11 or newer",
                )

    async def write(self, data: bytes) -> None:
        await self._websocket.send_bytes(STDIN + data)


@contextlib.asynccontextmanager
async def process_in(kube: Kube, pod: str, container: str, argv: Sequence[str]) -> AsyncIterator[PodStream]:
    """Start `argv` in a container."""
    import httpx_ws

    api = await kube.api()
    flags = {"stdin": "true", "stdout": "true", "stderr": "true"}
    try:
        async with (
            _ungrouped(),
            translated(),
            api.open_websocket(
                version="v1",
                namespace=kube.namespace,
                url=f"pods/{pod}/exec",
                subprotocols=PROTOCOLS,
                params={"command": list(argv), "container": container, **flags},
                max_message_size_bytes=MAX_MESSAGE,
            ) as websocket,
        ):
            yield PodStream(websocket)
    except httpx_ws.WebSocketUpgradeError as error:
        raise refusal(error.response.status_code, f"pod {pod} accepts no commands") from error
    except httpx_ws.HTTPXWSException as error:
        raise ConnectionBrokenError(
            f"the connection to pod {pod} broke", remedy="try again: the transfer resumes where it stopped"
        ) from error


@contextlib.asynccontextmanager
async def _ungrouped() -> AsyncIterator[None]:
    """Raise the original error: the websocket's task group wraps each one in a group of its own."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
