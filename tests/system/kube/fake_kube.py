"""A small Kubernetes API on loopback: objects, selectors, logs that stream, pods that start, exec with real processes.

It answers as a kube-apiserver does as far as maskfleet asks. What the real one makes of our requests is tests/k8s.
"""

from __future__ import annotations

import base64
import gzip
import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import wsproto
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Request
from wsproto.utilities import LocalProtocolError, ProtocolError

from ports import free_port

Json = dict[str, Any]


class FakeKube:
    """Holds the objects by path, and serves them until `stop`; `start` afterwards is the API restarting."""

    def __init__(self, folder: Path) -> None:
        self.objects: dict[str, Json] = {}
        self.logs: dict[str, list[tuple[str, str]]] = {}  # by pod, or `pod/previous`: (stamp, line)
        self.open_logs: set[str] = set()  # pods that may say more
        self.allowed: Callable[[Json], bool] = lambda asked: True
        self.forbidden: set[str] = set()  # prefixes of paths that are answered 403
        self.broken: dict[str, int] = {}  # path to an HTTP status
        self.requests: list[tuple[str, str]] = []
        self.made_pods: list[Json] = []
        self.root: Path | None = None  # what exec sees in place of /fsx
        self.on_new_pod: Callable[[Json], None] = running
        self.cut_exec_after: int | None = None  # bytes of output after which exec's connection breaks, once
        self.folder = folder
        self._server: ThreadingHTTPServer | None = None
        self._connections: set[socket.socket] = set()
        self.port = free_port()  # its own also while it is stopped
        self.stopped = threading.Event()
        self.start()
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(json.dumps(_kubeconfig(self.port)))

    def start(self) -> None:
        fake = self
        self.stopped = threading.Event()

        class Handler(_Handler):
            api = fake

        self._server = _Server(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        """Go away with all connections, as an API server that is restarted does."""
        assert self._server is not None
        self.stopped.set()
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._connections):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def add(self, *things: Json) -> None:
        for thing in things:
            self.objects[path_of(thing)] = thing

    def remove(self, thing: Json) -> None:
        self.objects.pop(path_of(thing), None)

    def say(self, pod: str, *lines: str, second: int = 0) -> None:
        """Append to the log of `pod`, with stamps that grow."""
        log = self.logs.setdefault(pod, [])
        for line in lines:
            log.append((f"2026-11-15T10:00:{second:02d}.{len(log):09d}Z", line))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        return  # a client that goes away is what some tests are about


class _Handler(BaseHTTPRequestHandler):
    api: FakeKube
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.api._connections.add(self.connection)

    def finish(self) -> None:
        self.api._connections.discard(self.connection)
        super().finish()

    def log_message(self, *args: Any) -> None:
        return

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path, query = unquote(url.path).rstrip("/"), {name: value[-1] for name, value in parse_qs(url.query).items()}
        self.api.requests.append(("GET", self.path))
        if path in self.api.broken:
            self._status(self.api.broken[path], "it is broken")
        elif any(path.startswith(prefix) for prefix in self.api.forbidden):
            self._status(403, f'{path} is forbidden: User "me" cannot do that')
        elif path == "/version":
            self._json({"gitVersion": "v1.35.0", "major": "1", "minor": "35"})
        elif path.endswith("/exec"):
            self._exec(path, parse_qs(url.query))
        elif path.endswith("/log"):
            self._log(path.split("/")[-2], query)
        elif path in self.api.objects:
            self._json(self.api.objects[path])
        elif path.rsplit("/", 1)[-1] in COLLECTIONS:
            self._json({"kind": "List", "metadata": {}, "items": self._items(path, query)})
        else:
            self._status(404, f"{path} not found")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.api.requests.append(("POST", self.path))
        if self.path.endswith("selfsubjectaccessreviews"):
            body["status"] = {"allowed": self.api.allowed(body["spec"]["resourceAttributes"])}
            self._json(body, 201)
        elif any(self.path.startswith(prefix) for prefix in self.api.forbidden):
            self._status(403, "pods is forbidden: violates PodSecurity")
        else:
            assert body["kind"] == "Pod"
            body["metadata"].setdefault("name", body["metadata"].get("generateName", "") + "abcde")
            self.api.made_pods.append(json.loads(json.dumps(body)))
            self.api.on_new_pod(body)
            self.api.add(body)
            self._json(body, 201)

    def do_DELETE(self) -> None:
        self.api.requests.append(("DELETE", self.path))
        path = urlsplit(self.path).path
        if self.api.objects.pop(path, None) is None:
            self._status(404, f"{path} not found")
        else:
            self._json({"kind": "Status", "status": "Success"})

    def _items(self, path: str, query: dict[str, str]) -> list[Json]:
        kind = path.rsplit("/", 1)[-1]
        everywhere = "/namespaces/" not in path
        found = [
            one
            for place, one in self.api.objects.items()
            if place.rsplit("/", 1)[0] == path or (everywhere and place.split("/")[-2] == kind)
        ]
        for term in filter(None, query.get("labelSelector", "").split(",")):
            name, _, value = term.partition("=")
            found = [one for one in found if one["metadata"].get("labels", {}).get(name) == value]
        for term in filter(None, query.get("fieldSelector", "").split(",")):
            name, _, value = term.partition("=")
            outer, _, inner = name.partition(".")
            found = [one for one in found if one[outer].get(inner) == value]
        return found

    def _log(self, pod: str, query: dict[str, str]) -> None:
        key = f"{pod}/previous" if query.get("previous") == "true" else pod
        if key not in self.api.logs and pod not in self.api.open_logs:
            self._status(400, f'container "launcher" in pod "{pod}" is waiting to start')
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        since = query.get("sinceTime", "")[:19]
        sent = max(0, len(self.api.logs.get(key, [])) - int(query.get("tailLines", 10**9)))
        stopped = self.api.stopped
        while not stopped.is_set():
            lines = self.api.logs.get(key, [])
            is_open = pod in self.api.open_logs  # before reading: what is said until it closes is sent
            for stamp, text in lines[sent:]:
                if stamp[:19] >= since:
                    self._chunk(f"{stamp} {text}\n" if query.get("timestamps") == "true" else f"{text}\n")
            sent = len(lines)
            if query.get("follow") != "true" or not is_open:
                self.wfile.write(b"0\r\n\r\n")
                return
            time.sleep(0.02)
        self.close_connection = True

    def _chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _json(self, body: Json, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _status(self, code: int, message: str) -> None:
        self._json({"kind": "Status", "status": "Failure", "message": message, "code": code}, code)

    def _exec(self, path: str, query: dict[str, list[str]]) -> None:
        """Run the command for real, with /fsx replaced, and speak the channels of `v4.channel.k8s.io`."""
        if path.removesuffix("/exec") not in self.api.objects:
            self._status(404, "pod not found")
            return
        websocket = wsproto.WSConnection(wsproto.ConnectionType.SERVER)
        head = f"GET {self.path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        websocket.receive_data(head.encode() + b"\r\n")
        request = next(websocket.events())
        assert isinstance(request, Request)
        assert request.subprotocols == ["v5.channel.k8s.io", "v4.channel.k8s.io"]
        self.wfile.write(websocket.send(AcceptConnection(subprotocol="v5.channel.k8s.io")))
        argv = list(query["command"])
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        threading.Thread(target=self._pump_in, args=(websocket, process), daemon=True).start()
        self._pump_out(websocket, process)
        self.close_connection = True

    def _pump_in(self, websocket: Any, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        message = b""
        root = f'"root": {json.dumps(str(self.api.root))}'.encode()
        try:
            while process.poll() is None:
                data = self.connection.recv(65536)
                if not data:
                    process.kill()
                    return
                websocket.receive_data(data)
                for event in websocket.events():
                    if isinstance(event, BytesMessage):
                        message += event.data
                        if not event.message_finished:
                            continue
                        assert message[0] == 0  # standard input
                        process.stdin.write(message[1:].replace(b'"root": "/fsx"', root))
                        process.stdin.flush()
                        message = b""
                    elif isinstance(event, CloseConnection):
                        process.kill()
        except (OSError, ValueError, ProtocolError):  # the client, or the process, is gone
            process.kill()

    def _pump_out(self, websocket: Any, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        passed = 0
        with process:
            try:
                while data := process.stdout.read1(30_000):
                    self.wfile.write(websocket.send(BytesMessage(b"\x01" + data)))
                    passed += len(data)
                    limit = self.api.cut_exec_after
                    if limit is not None and passed > limit:
                        self.api.cut_exec_after = None
                        self.connection.shutdown(socket.SHUT_RDWR)
                        raise BrokenPipeError
                self._tell_end(websocket, process.wait(), process.stderr.read())
            except (OSError, LocalProtocolError):  # the client went away
                process.kill()

    def _tell_end(self, websocket: Any, code: int, errors: bytes) -> None:
        if errors:
            self.wfile.write(websocket.send(BytesMessage(b"\x02" + errors)))
        status: Json = {"status": "Success"}
        if code != 0:
            causes = [{"reason": "ExitCode", "message": str(code)}]
            status = {"status": "Failure", "message": "command terminated", "details": {"causes": causes}}
        self.wfile.write(websocket.send(BytesMessage(b"\x03" + json.dumps(status).encode())))
        self.wfile.write(websocket.send(CloseConnection(code=1000)))


COLLECTIONS = {"pods", "jobs", "mpijobs", "events", "secrets", "persistentvolumeclaims", "leases", "nodes", "nodepools",
               "daemonsets", "namespaces", "resourcequotas"}  # fmt: skip
PLURALS = {"Pod": "/api/v1", "Event": "/api/v1", "Secret": "/api/v1", "PersistentVolumeClaim": "/api/v1",
           "ResourceQuota": "/api/v1", "Job": "/apis/batch/v1", "MPIJob": "/apis/kubeflow.org/v2beta1",
           "DaemonSet": "/apis/apps/v1", "Lease": "/apis/coordination.k8s.io/v1"}  # fmt: skip


def path_of(thing: Json) -> str:
    """Where the API keeps `thing`."""
    kind, meta = thing["kind"], thing["metadata"]
    if kind == "Namespace":
        return f"/api/v1/namespaces/{meta['name']}"
    if kind == "StorageClass":
        return f"/apis/storage.k8s.io/v1/storageclasses/{meta['name']}"
    if kind == "APIResourceList":
        return f"/apis/{meta['name']}"
    if kind == "Node":
        return f"/api/v1/nodes/{meta['name']}"
    if kind == "NodePool":
        return f"/apis/karpenter.sh/v1/nodepools/{meta['name']}"
    return f"{PLURALS[kind]}/namespaces/{meta.get('namespace', 'kubeflow')}/{kind.lower()}s/{meta['name']}"


def running(pod: Json) -> None:
    """A pod that starts at once."""
    names = [one["name"] for one in pod["spec"]["containers"]]
    states = [{"name": name, "ready": True, "restartCount": 0, "state": {"running": {}}} for name in names]
    pod["status"] = {"phase": "Running", "containerStatuses": states,
                     "conditions": [{"type": "Ready", "status": "True"}]}  # fmt: skip


def helm_record(
    release: str, values: Json, *, status: str = "deployed", version: int = 1, chart: str = "train"
) -> Json:
    """The Secret in which helm notes a release."""
    data = {"name": release, "info": {"status": status, "description": "Install complete"}, "version": version,
            "chart": {"metadata": {"name": chart}, "values": {"log_dir": "logs", "shared_fs": "fsx",
                                                              "shared_pvc": "pv-fsx", "run_id": None}},
            "config": values}  # fmt: skip
    packed = base64.b64encode(base64.b64encode(gzip.compress(json.dumps(data).encode()))).decode()
    labels = {"owner": "helm", "name": release, "status": status, "version": str(version)}
    name = f"sh.helm.release.v1.{release}.v{version}"
    return {"kind": "Secret", "metadata": {"name": name, "namespace": "kubeflow", "labels": labels},
            "type": "helm.sh/release.v1", "data": {"release": packed}}  # fmt: skip


def _kubeconfig(port: int) -> Json:
    return {
        "apiVersion": "v1", "kind": "Config", "current-context": "fake",
        "clusters": [{"name": "fake", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "me", "user": {"token": "secret-token"}}],
        "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "me"}},
                     {"name": "arn:aws:eks:us-west-2:1:cluster/a", "context": {"cluster": "fake", "user": "me"}}],
    }  # fmt: skip
