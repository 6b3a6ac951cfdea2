"""The Kubernetes API over kr8s: plain JSON in and out, errors that say what to do."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import shutil
import ssl
import tempfile
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from maskfleet.errors import LaunchError

if TYPE_CHECKING:
    import httpx

CONNECT_S = 15.0
READ_S = 30.0
REQUEST_S = 60.0  # a whole request, with the program that fetches credentials and kr8s's own retries
SILENCE_S = 60.0  # a log stream without a byte for this long is reopened: its connection may be dead
PAGE = 500
REMEDIES = {  # by HTTP status
    401: "log in again: refresh your AWS credentials, then `aws eks update-kubeconfig`",
    403: "ask the cluster's administrators for this permission (docs/run-anywhere/eks/index.md lists all)",
    404: "check the handle, its namespace and its context",
    409: "somebody else is changing the same object; look at it and try again",
}
T = TypeVar("T")
Json = dict[str, Any]


class ApiError(LaunchError):
    """The API refused the request or did not answer; `status` is the HTTP status, 0 if there was no answer."""

    def __init__(self, what: str, *, status: int, remedy: str) -> None:
        super().__init__(what, remedy=remedy)
        self.status = status


class Kube:
    """A connection to one cluster; a context manager.

    The cluster is that of `context` in the kubeconfig that kubectl would read, or the one in `kubeconfig`, a parsed
    kubeconfig: then neither KUBECONFIG nor the service account of a pod is consulted.
    """

    def __init__(self, *, namespace: str, context: str | None = None, kubeconfig: Json | None = None) -> None:
        self.context, self.namespace = context, namespace
        self._kubeconfig = kubeconfig
        self._runner = asyncio.Runner()
        self._api: Any = None
        self._keys = _KeyFolder()

    def __enter__(self) -> Self:
        self._keys.open()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if self._api is not None and self._api._session is not None:
                self._runner.run(self._api._session.aclose())
            self._runner.close()
        finally:
            self._keys.close()

    def version(self) -> str:
        """The version of the API server, such as v1.35.0."""
        return str(self.run(self.ask("GET", "/version/"))["gitVersion"])

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
        token = ""
        while True:
            query = {**params, "limit": PAGE, **({"continue": token} if token else {})}
            page = self.run(self.ask("GET", path, params=query))
            found += page.get("items") or []
            token = page.get("metadata", {}).get("continue", "")
            if not token:
                return found

    def create(self, path: str, body: Json) -> Json:
        return self.run(self.ask("POST", path, content=json.dumps(body)))

    def delete(self, path: str, *, grace_s: int | None = None) -> None:
        """Delete the object at `path`, which may finish after this returns; an object that is gone is no error."""
        params = {} if grace_s is None else {"gracePeriodSeconds": grace_s}
        try:
            self.run(self.ask("DELETE", path, params=params))
        except ApiError as error:
            if error.status != 404:
                raise

    def lines(self, path: str, **params: str | int) -> Iterator[str]:
        """Lines of a log as they arrive, until it ends or is silent for SILENCE_S; ApiError if the stream breaks."""
        stream = self._lines(path, params)
        try:
            while (line := self.run(_next_of(stream))) is not None:
                yield line
        finally:
            self.run(stream.aclose())

    def of_namespace(self, kind: str, *rest: str, group: str = "") -> str:
        """Path of objects of `kind`, such as `pods`, in the namespace; `group` includes its version."""
        root = f"/apis/{group}" if group else "/api/v1"
        return "/".join([root, "namespaces", self.namespace, kind, *rest])

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    async def api(self) -> Any:
        """The kr8s connection, opened on first use."""
        if self._api is None:
            self._api = await self._connect()
        return self._api

    async def ask(self, method: str, path: str, **options: Any) -> Json:
        """The answer to one request."""
        import httpx

        api = await self.api()
        base, _, name = path.rpartition("/")
        timeout = httpx.Timeout(CONNECT_S, read=READ_S)
        async with (
            translated(REQUEST_S),
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
            try:
                async for line in answer.aiter_lines():
                    yield line
            except httpx.ReadTimeout:
                return  # the ranks may have nothing to log; the caller asks again if it wants more

    async def _connect(self) -> Any:
        try:
            import kr8s.asyncio
            from yaml import YAMLError  # type: ignore[import-untyped]  # kr8s brings it
        except ImportError as error:
            raise ApiError("kr8s is not installed here", status=0, remedy="pip install 'maskfleet[k8s]'") from error
        # All arguments, and not by kr8s.asyncio.api, which may return the connection of an event loop that is closed.
        options: dict[str, Any] = dict.fromkeys(("url", "kubeconfig", "serviceaccount"))
        options |= {"context": self.context, "namespace": self.namespace, "bypass_factory": True}
        if self._kubeconfig is not None:
            # As a dict, because kr8s splits paths at colons, and as a copy, because it stores tokens in it.
            options |= {"kubeconfig": copy.deepcopy(self._kubeconfig), "serviceaccount": ""}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # kr8s warns about newer Kubernetes versions; these requests work on them
            try:
                async with translated(REQUEST_S):
                    return await kr8s.asyncio.Api(**options)
            except (ValueError, KeyError, IndexError, TypeError, AttributeError, YAMLError) as error:
                # kr8s raises ValueError with a message; the others come from a file of an unexpected structure.
                words = str(error) if type(error) is ValueError else "it has no current context, or is damaged"
                raise ApiError(
                    f"the kubeconfig does not name a cluster: {words}",
                    status=0,
                    remedy="run `aws eks update-kubeconfig --name CLUSTER`, or name a context with --context; the file"
                    " is what KUBECONFIG says, or ~/.kube/config",
                ) from error


class _KeyFolder:
    """A temporary directory for the keys and certificates that kr8s writes; removed with the connection."""

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


@contextlib.asynccontextmanager
async def translated(limit_s: float | None = None) -> AsyncIterator[None]:
    """Turn what kr8s and its libraries raise, and taking longer than `limit_s`, into errors that users can act on."""
    import anyio
    import httpx
    import kr8s

    try:
        # Not asyncio.timeout, which leaves kr8s waiting for a program that hangs. No scope without a limit: a log
        # stream enters and exits this in different tasks.
        with anyio.fail_after(limit_s) if limit_s else contextlib.nullcontext():
            yield
    except kr8s.ServerError as error:
        status = error.response.status_code if error.response is not None else 500
        raise refusal(status, _message(error.response) or str(error)) from error
    except (kr8s.APITimeoutError, httpx.HTTPError, OSError, ssl.SSLError) as error:
        kind = (
            f"no answer within {limit_s:.0f} s" if isinstance(error, TimeoutError) and limit_s else type(error).__name__
        )
        raise ApiError(
            f"the cluster's API cannot be reached: {str(error.__cause__ or error) or str(error) or kind}",
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
    """The error for an answer with the HTTP status `status`."""
    remedy = REMEDIES.get(status, "try again; if the error stays, look at the cluster's events")
    return ApiError(words if status in (404, 500) else f"the cluster refused: {words}", status=status, remedy=remedy)


def _message(answer: httpx.Response | None) -> str:
    """The API's own words in an answer with an error; kr8s drops them for server errors."""
    import httpx

    try:
        body = answer.json() if answer is not None else None
    except (ValueError, httpx.StreamError):  # a proxy's page, or a stream that was not read
        return ""
    return str(body.get("message") or "") if isinstance(body, dict) else ""


async def _next_of(lines: AsyncIterator[str]) -> str | None:
    return await anext(lines, None)
