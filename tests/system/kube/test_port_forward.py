"""A port of 127.0.0.1 forwarded to a pod over a Kubernetes API that dies, restarts, refuses, and changes its pods."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from forwarded_pods import pod, set_pods

from maskfleet.errors import LaunchError
from maskfleet.system.kube import port_forward as forward_module
from maskfleet.system.kube.client import Kube
from maskfleet.system.kube.fake import FakeKube
from maskfleet.system.kube.port_forward import PortForward, bound_socket, choose_pod
from ports import free_port


@contextlib.contextmanager
def answering(greeting: bytes) -> Iterator[int]:
    """A server that answers each line with its greeting and the line."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                writer.write(greeting + line)
                await writer.drain()
        finally:  # clients may still be connected at the end of the test
            writer.close()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    starting = asyncio.run_coroutine_threadsafe(asyncio.start_server(talk, "127.0.0.1", 0, limit=1 << 24), loop)
    server = starting.result(120)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:

        async def end() -> None:
            server.close()
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), loop).result(120)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@dataclass
class Forwarding:
    """A port-forward in a thread, with its messages."""

    port: int = 0
    said: list[str] = field(default_factory=list)
    ready: threading.Event = field(default_factory=threading.Event)
    error: list[LaunchError] = field(default_factory=list)

    def ask(self, text: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall(text + b"\n")
            with connection.makefile("rb") as answer:
                try:
                    return answer.readline()
                except ConnectionResetError:  # as a connection ends that is closed before all of it was read
                    return b""

    def until_said(self, words: str) -> None:
        until(lambda: any(words in line for line in list(self.said)), self.said)


def until(true: Callable[[], bool], what: object = None) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKube]:
    monkeypatch.setattr(forward_module, "POLL_S", 0.05)
    with FakeKube(tmp_path, port=free_port()) as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        yield server


@contextlib.contextmanager
def forwarding() -> Iterator[Forwarding]:
    state = Forwarding()
    task: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    def work() -> None:
        with bound_socket(0) as listener, Kube(context=None, namespace="kubeflow") as kube:
            state.port = listener.getsockname()[1]

            async def serve() -> None:
                current = asyncio.current_task()
                assert current is not None
                task.append((asyncio.get_running_loop(), current))
                carrier = PortForward(kube, selector="a=b", port=8443, say=state.said.append, on_ready=state.ready.set)
                await carrier.serve(listener)

            try:
                kube.run(serve())
            except asyncio.CancelledError:
                return
            except LaunchError as error:
                state.error.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        until(lambda: bool(task) or bool(state.error))
        yield state
    finally:
        if task:
            with contextlib.suppress(RuntimeError):  # it has ended by itself, and its loop is closed
                task[0][0].call_soon_threadsafe(task[0][1].cancel)
        thread.join(120)
        assert not thread.is_alive()


def test_bytes_go_both_ways_on_several_connections_at_once(api: FakeKube) -> None:
    with answering(b"a:") as port, forwarding() as forward:
        set_pods(api, pod("a"), ports={"a": port})
        assert forward.ready.wait(60)
        with contextlib.ExitStack() as stack:
            open_ones = [
                stack.enter_context(socket.create_connection(("127.0.0.1", forward.port), timeout=60)) for _ in range(5)
            ]
            for number, connection in reversed(list(enumerate(open_ones))):
                connection.sendall(b"%d\n" % number)
                assert connection.makefile("rb").readline() == b"a:%d\n" % number
        big = b"x" * 3_000_000
        assert forward.ask(big) == b"a:" + big + b"\n"
        assert forward.said == ["there is no pod; waiting for one", "a is ready"] or forward.said == ["a is ready"]
        assert any("labelSelector=a" in path for _, path in api.requests)


def test_a_new_pod_replaces_one_that_is_gone(api: FakeKube) -> None:
    with answering(b"a:") as first, answering(b"b:") as second, forwarding() as forward:
        set_pods(api, pod("a"), ports={"a": first})
        assert forward.ready.wait(60)
        assert forward.ask(b"1") == b"a:1\n"
        set_pods(api, ports={})
        forward.until_said("there is no pod")
        set_pods(api, pod("b"), ports={"b": second})
        forward.until_said("b is ready")
        assert forward.ask(b"2") == b"b:2\n"


def test_a_connection_waits_for_the_pod(api: FakeKube) -> None:
    with answering(b"a:") as port, forwarding() as forward:
        forward.until_said("there is no pod")
        with socket.create_connection(("127.0.0.1", forward.port), timeout=60) as early:
            early.sendall(b"early\n")
            set_pods(api, pod("a"), ports={"a": port})
            assert early.makefile("rb").readline() == b"a:early\n"


def test_the_api_may_restart(api: FakeKube) -> None:
    with answering(b"a:") as port, forwarding() as forward:
        set_pods(api, pod("a"), ports={"a": port})
        assert forward.ready.wait(60)
        with socket.create_connection(("127.0.0.1", forward.port), timeout=60) as cut:
            cut.sendall(b"1\n")
            lines = cut.makefile("rb")
            assert lines.readline() == b"a:1\n"
            api.stop()
            assert lines.read() == b""  # its connection ends instead of hanging
        forward.until_said("cannot be reached")
        api.start()
        until(lambda: forward.said[-1] == "a is ready", forward.said)
        assert forward.ask(b"2") == b"a:2\n"
        assert forward.said.count("a is ready") == 2


def test_a_pod_deleted_between_two_polls_fails_only_one_connection(api: FakeKube) -> None:
    with answering(b"a:") as port, forwarding() as forward:
        set_pods(api, pod("a"), ports={})
        assert forward.ready.wait(60)
        assert forward.ask(b"1") == b""
        forward.until_said("a connection to a failed")
        api.ports = {"a": port}
        assert forward.ask(b"2") == b"a:2\n"


def test_an_error_that_retrying_does_not_fix_stops_forwarding(api: FakeKube) -> None:
    api.refusal = 403
    with forwarding() as forward:
        until(lambda: bool(forward.error))
    assert "refused" in forward.error[0].what


def test_a_port_in_use_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port}") as refused, bound_socket(port):
            pass
    assert "--port" in refused.value.remedy


UNSCHEDULED = {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}]}
PULLING = {
    "containerStatuses": [{"name": "jupyter", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no x"}}}]
}
CRASHED = {
    "containerStatuses": [
        {"name": "jupyter", "state": {"running": {}}},
        {
            "name": "proxy",
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": {"exitCode": 2, "reason": "Error"}},
        },
    ]
}


@pytest.mark.parametrize(
    ("pods", "words"),
    [
        ([], "there is no pod"),
        ([{"metadata": {"name": "n"}, "status": UNSCHEDULED}], "n is waiting for a node: 0/3 nodes are available"),
        ([{"metadata": {"name": "n"}, "status": PULLING}], "n: jupyter cannot start: ImagePullBackOff: no x"),
        ([{"metadata": {"name": "n"}, "status": CRASHED}], "n: proxy exited with 2 (Error); see `kubectl logs n"),
        ([{"metadata": {"name": "n"}, "status": {}}], "n is starting"),
        ([{**pod("n"), "metadata": {"name": "n", "deletionTimestamp": "now"}}], "there is no pod"),
    ],
)
def test_the_reason_for_waiting_is_shown(pods: list[dict[str, Any]], words: str) -> None:
    choice = choose_pod(pods)
    assert choice.pod is None
    assert choice.message.startswith(words)


def test_a_ready_pod_is_preferred_to_one_that_is_terminating() -> None:
    ending = {**pod("old"), "metadata": {"name": "old", "deletionTimestamp": "now"}}
    assert choose_pod([ending, pod("slow", ready=False), pod("new")]).pod == "new"
