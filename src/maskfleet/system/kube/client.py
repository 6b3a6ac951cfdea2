"""The Kubernetes API as far as jobs need it, over kr8s: plain JSON in and out, errors that say what to do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import ssl
import tempfile
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar

from maskfleet.errors import LaunchError

CONNECT_S = 15.0
READ_S = 30.0
SILENCE_S = 60.0  # a stream without a byte for so long is asked for again: its connection may be dead
PAGE = 500
T = TypeVar("T")
Json = dict[str, Any]


class ApiError(LaunchError):
    """The API refused, or did not answer; `status` is HTTP's, 0 where there was no answer."""

    def __init__(self, what: str, *, status: int, remedy: str) -> None:
        super().__init__(what, remedy=remedy)
        self.status = status


class Kube:
    """A connection to one cluster, by the kubeconfig that kubectl reads; a context manager."""

    def __init__(self, *, context: str | None, namespace: str) -> None:
        self.context, self.namespace = context, namespace
        self._runner = asyncio.Runner()
        self._api: Any = None
        self._keys = _KeyFolder()

    def __enter__(self) -> Self:
        self._keys.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if self._api is not None and self._api._session is not None:
                self._runner.run(self._api._session.aclose())
            self._runner.close()
        finally:
            self._keys.close()

    def get(self, path: str, **params: str | int) -> Json | None:
        """The object at `path`; None if there is none."""
        try:
            return self.run(self.ask("GET", path, params=params))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def items(self, path: str, **params: str | int) -> list[Json]:
        """All objects of a list, however many pages it has."""
        found: list[Json] = []
        more = ""
        while True:
            query = {**params, "limit": PAGE, **({"continue": more} if more else {})}
            page = self.run(self.ask("GET", path, params=query))
            found += page.get("items", [])
            more = page.get("metadata", {}).get("continue", "")
            if not more:
                return found

    def create(self, path: str, body: Json) -> Json:
        return self.run(self.ask("POST", path, content=json.dumps(body)))

    def delete(self, path: str, *, grace_s: int | None = None) -> None:
        """Delete what is there; nothing there is fine."""
        params = {} if grace_s is None else {"gracePeriodSeconds": grace_s}
        try:
            self.run(self.ask("DELETE", path, params=params))
        except ApiError as error:
            if error.status != 404:
                raise

    def lines(self, path: str, **params: str | int) -> Iterator[str]:
        """Lines of a log as they come, until the stream ends or is silent for long; where it breaks, an ApiError."""
        stream = self._lines(path, params)
        try:
            while True:
                line = self.run(_next_of(stream))
                if line is None:
                    return
                yield line
        finally:
            self.run(stream.aclose())

    def of_namespace(self, kind: str, *rest: str, group: str = "") -> str:
        """Path of things of `kind` in the namespace, such as `pods`; `group` has its version."""
        root = f"/apis/{group}" if group else "/api/v1"
        return "/".join([root, "namespaces", self.namespace, kind, *rest])

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    async def api(self) -> Any:
        """The kr8s connection, made at the first need."""
        if self._api is None:
            self._api = await _connected(self.context, self.namespace)
        return self._api

    async def ask(self, method: str, path: str, **options: Any) -> Json:
        """The answer to one request."""
        import httpx

        api = await self.api()
        base, _, name = path.rpartition("/")
        timeout = httpx.Timeout(CONNECT_S, read=READ_S)
        async with (
            translated(),
            api.call_api(method, version="", base=base, url=name, timeout=timeout, **options) as answer,
        ):
            data = answer.json()
        assert isinstance(data, dict)
        return data

    async def _lines(self, path: str, params: dict[str, str | int]) -> AsyncGenerator[str, None]:
        import httpx

        api = await self.api()
        base, _, name = path.rpartition("/")
        timeout = httpx.Timeout(CONNECT_S, read=SILENCE_S)
        async with (
            translated(),
            api.call_api("GET", version="", base=base, url=name, params=params, stream=True, timeout=timeout) as answer,
        ):
            lines = answer.aiter_lines()
            while True:
                try:
                    line = await anext(lines, None)
                except httpx.ReadTimeout:
                    return  # the ranks may have nothing to say; whoever wants more asks again
                if line is None:
                    return
                yield line


class _KeyFolder:
    """Where kr8s leaves the keys and certificates of a kubeconfig: they go away with the connection."""

    _opened: ClassVar[list[str]] = []
    _before: ClassVar[str | None] = None

    def open(self) -> None:
        if not self._opened:
            _KeyFolder._before = tempfile.tempdir
        self.path = tempfile.mkdtemp(prefix="maskfleet-kube-", dir=self._before)
        self._opened.append(self.path)
        tempfile.tempdir = self.path

    def close(self) -> None:
        self._opened.remove(self.path)
        tempfile.tempdir = self._opened[-1] if self._opened else self._before
        shutil.rmtree(self.path, ignore_errors=True)


async def _connected(context: str | None, namespace: str) -> Any:
    try:
        import kr8s.asyncio
        from yaml import YAMLError  # type: ignore[import-untyped]  # kr8s brings it
    except ImportError as error:
        raise LaunchError("kr8s is not installed here", remedy="pip install 'maskfleet[k8s]'") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what kr8s thinks of a newer Kubernetes does not concern what is asked here
        try:
            async with translated():
                return await kr8s.asyncio.api(context=context, namespace=namespace)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, YAMLError) as error:
            # kr8s says in words what it misses; all else is what Python makes of a file of another shape.
            words = str(error) if type(error) is ValueError else "it has no current context, or is damaged"
            raise ApiError(
                f"the kubeconfig does not name a cluster: {words}",
                status=0,
                remedy="run `aws eks update-kubeconfig --name CLUSTER`, or name a context with --context; the file is"
                " what KUBECONFIG says, or ~/.kube/config",
            ) from error


@contextlib.asynccontextmanager
async def translated() -> AsyncIterator[None]:
    """Turns what kr8s and its libraries raise into errors that people can act on."""
    import httpx
    import kr8s

    try:
        yield
    except kr8s.ServerError as error:
        status = error.response.status_code if error.response is not None else 500
        raise refusal(status, str(error)) from error
    except (kr8s.APITimeoutError, httpx.HTTPError, OSError, ssl.SSLError) as error:
        words = str(error.__cause__ or error) or type(error).__name__
        raise ApiError(
            f"the cluster's API cannot be reached: {words}",
            status=0,
            remedy="see whether `kubectl get ns` works: VPN, kubeconfig (`aws eks update-kubeconfig`), AWS credentials",
        ) from error
    except RuntimeError as error:
        if not str(error).startswith("Process exited"):
            raise
        raise ApiError(
            f"the program that the kubeconfig names gives no credentials: {str(error).strip().splitlines()[-1]}",
            status=401,
            remedy="log in to AWS, and see whether `aws sts get-caller-identity` answers",
        ) from error


def refusal(status: int, words: str) -> ApiError:
    """The error of an answer with HTTP's `status`."""
    match status:
        case 404:
            return ApiError(words, status=404, remedy="check the handle, its namespace and its context")
        case 401:
            remedy = "log in again: refresh your AWS credentials, then `aws eks update-kubeconfig`"
        case 403:
            remedy = "ask who runs the cluster for this right (docs/run-anywhere/eks/index.md lists what is needed)"
        case 409:
            remedy = "somebody else changes the same thing; look at it and try again"
        case _:
            remedy = "try again; if it stays, look at the cluster's events"
    return ApiError(f"the cluster refused: {words}" if status != 500 else words, status=status, remedy=remedy)


async def _next_of(lines: AsyncIterator[str]) -> str | None:
    return await anext(lines, None)
