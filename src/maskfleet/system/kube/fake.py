"""A small Kubernetes API on 127.0.0.1 for tests: objects, selectors, logs that stream, pods that start, exec, ports.

It answers as a kube-apiserver does as far as maskfleet asks; tests/k8s tries the same requests on a real one.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

from maskfleet.system.kube.client import Json
from maskfleet.system.kube.fake_streams import ServerWebSocket, serve_exec, serve_port_forward

VERSION = {"gitVersion": "v1.35.0", "major": "1", "minor": "35"}
API_OF_KIND = {  # of kinds that are not in the core API, /api/v1
    "DaemonSet": "/apis/apps/v1",
    "EC2NodeClass": "/apis/karpenter.k8s.aws/v1",
    "Job": "/apis/batch/v1",
    "Lease": "/apis/coordination.k8s.io/v1",
    "MPIJob": "/apis/kubeflow.org/v2beta1",
    "NodeClaim": "/apis/karpenter.sh/v1",
    "NodePool": "/apis/karpenter.sh/v1",
    "StorageClass": "/apis/storage.k8s.io/v1",
}
CLUSTER_SCOPED = ("EC2NodeClass", "Namespace", "Node", "NodeClaim", "NodePool", "StorageClass")
# Lists that exist without any object in them; another kind is unknown (404) until it has an object.
COLLECTIONS = {
    *("daemonsets", "deployments", "ec2nodeclasses", "events", "ingresses", "jobs", "leases", "mpijobs", "namespaces"),
    *("nodeclaims", "nodepools", "nodes", "persistentvolumeclaims", "persistentvolumes", "pods", "resourcequotas"),
    *("secrets", "services"),
}


class FakeKube:
    """Serves `objects`, by path, from its creation until `stop`; a context manager.

    `start` after `stop` serves the same objects on the same port, as an API server that restarted. `port` 0 is any free
    one; with `certificate` (files of a certificate and its key) it speaks TLS.
    """

    TOKEN = "secret-token"  # noqa: S105 - of a fake

    def __init__(self, folder: Path, *, port: int = 0, certificate: tuple[Path, Path] | None = None) -> None:
        self.objects: dict[str, Json] = {}
        self.deleted: list[str] = []  # paths, in the order of deletion
        self.lingering: dict[str, int] = {}  # path to how many more lists show it after its deletion
        self.dependents: dict[str, Sequence[str]] = {}  # path to what is deleted with it
        self.logs: dict[str, list[tuple[str, str]]] = {}  # pod, or `pod/previous`, to (timestamp, line)
        self.open_logs: set[str] = set()  # pods whose log may grow
        self.ports: dict[str, int] = {}  # pod to the port of this machine behind its port-forward
        self.volume: Path | None = None  # the directory that exec shows as /fsx
        self.cut_exec_after: int | None = None  # bytes of output after which exec's connection breaks, once
        self.on_new_pod: Callable[[Json], None] = start_at_once
        self.created_pods: list[Json] = []
        self.allowed: Callable[[Json], bool] = lambda attributes: True  # the answer to access reviews
        self.forbidden: set[str] = set()  # prefixes of paths that are answered with 403
        self.broken: dict[str, int] = {}  # path to the HTTP status that it is answered with
        self.refusal = 0  # HTTP status that everything is answered with, unless 0
        self.requests: list[tuple[str, str]] = []  # method and path
        self.port = port
        self.connections: set[socket.socket] = set()
        self.certificate = certificate
        self._server: ThreadingHTTPServer | None = None
        self.start()
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(json.dumps(self._kubeconfig()), encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        self.stopped = threading.Event()
        self._server = _Server(("127.0.0.1", self.port), type("Handler", (_Handler,), {"api": self}))
        self.port = self._server.server_address[1]
        self.url = f"{'https' if self.certificate else 'http'}://127.0.0.1:{self.port}"
        if self.certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*self.certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        """Stop listening and cut every connection, as an API server that dies; stopping again does nothing."""
        if self._server is None:
            return
        self.stopped.set()
        self._server.shutdown()
        self._server.server_close()
        self._server = None
        for connection in list(self.connections):
            with contextlib.suppress(OSError):  # the client was faster
                connection.shutdown(socket.SHUT_RDWR)

    def add(self, *things: Json) -> None:
        """Store objects under the paths that their kind, namespace and name give."""
        for thing in things:
            self.objects[path_of(thing)] = thing

    def add_at(self, path: str, *, lingers: int = 0, dependents: Sequence[str] = (), **content: Any) -> str:
        """Store an object of any kind; once deleted, `lingers` more lists show it, and `dependents` are deleted too."""
        namespace = re.search(r"/namespaces/([^/]+)/", path)
        metadata = {"name": path.rsplit("/", 1)[-1], **({"namespace": namespace[1]} if namespace else {})}
        self.objects[path] = {"metadata": {**metadata, **content.pop("metadata", {})}, **content}
        self.lingering[path], self.dependents[path] = lingers, dependents
        return path

    def remove(self, thing: Json) -> None:
        self.objects.pop(path_of(thing), None)

    def append_log(self, pod: str, *lines: str, second: int = 0) -> None:
        """Append to the log of `pod`, with increasing timestamps."""
        log = self.logs.setdefault(pod, [])
        for line in lines:
            log.append((f"2026-11-15T10:00:{second:02d}.{len(log):09d}Z", line))

    def items(self, collection: str, query: dict[str, str]) -> list[Json] | None:
        """The objects of a collection, of all namespaces if its path names none; None for an unknown kind."""
        found = []
        known = collection.rsplit("/", 1)[-1] in COLLECTIONS
        for path, thing in list(self.objects.items()):
            parent = path.rsplit("/", 1)[0]
            if collection in (parent, re.sub(r"/namespaces/[^/]+", "", parent)):
                known = True
                if self._is_listed(path) and _matches(thing, query):
                    found.append(thing)
        return found if known else None

    def delete(self, path: str) -> bool:
        """Delete the object at `path`; whether there was one."""
        if path not in self.objects:
            return False
        if path not in self.deleted:
            self.deleted.append(path)
            for dependent in self.dependents.get(path, ()):
                self.delete(dependent)
        if not self.lingering.get(path):
            self.objects.pop(path, None)
        return True

    def _is_listed(self, path: str) -> bool:
        if path not in self.deleted or path not in self.lingering:
            return True
        self.lingering[path] -= 1
        if self.lingering[path] < 0:
            del self.objects[path]
        return path in self.objects

    def _kubeconfig(self) -> Json:
        cluster: Json = {"server": self.url}
        if self.certificate:
            cluster["certificate-authority-data"] = base64.b64encode(self.certificate[0].read_bytes()).decode()
        context = {"cluster": "fake", "user": "me"}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": cluster}],
            "users": [{"name": "me", "user": {"token": self.TOKEN}}],
            "contexts": [{"name": name, "context": context} for name in ("fake", "arn:aws:eks:us-west-2:1:cluster/a")],
        }


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        return  # clients that disconnect are what some tests are about


class _Handler(BaseHTTPRequestHandler):
    api: FakeKube
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.api.connections.add(self.connection)

    def finish(self) -> None:
        self.api.connections.discard(self.connection)
        super().finish()

    def log_message(self, *args: Any) -> None:
        return

    def do_GET(self) -> None:
        self.api.requests.append((self.command, self.path))
        url = urlsplit(self.path)
        path, query = unquote(url.path).rstrip("/"), parse_qs(url.query)
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        if path.endswith("selfsubjectaccessreviews"):
            self._answer({**body, "status": {"allowed": self.api.allowed(body["spec"]["resourceAttributes"])}}, 201)
        elif refusal := self._refusal(path):
            self._fail(*refusal)
        elif self.command == "POST":
            self._create_pod(body)
        elif self.command == "GET":
            self._get(path, query)
        elif self.api.delete(path):
            self._answer({"kind": "Status", "status": "Success"})
        else:
            self._fail(404, f"{path} not found")

    do_POST = do_DELETE = do_GET  # noqa: N815 - names that http.server looks for

    def _get(self, path: str, query: dict[str, list[str]]) -> None:
        last = {name: values[-1] for name, values in query.items()}
        pod = path.rpartition("/")[0].rpartition("/")[2]
        if path == "/version":
            self._answer(VERSION)
        elif path.endswith("/exec") and path.removesuffix("/exec") in self.api.objects:
            serve_exec(self.api, ServerWebSocket(self), query["command"])
        elif path.endswith("/portforward") and pod in self.api.ports:
            serve_port_forward(ServerWebSocket(self), int(last["ports"]), self.api.ports[pod])
        elif path.endswith("/log"):
            self._send_log(pod, last)
        elif path in self.api.objects:
            self._answer(self.api.objects[path])
        elif (items := self.api.items(path, last)) is not None:
            self._answer({"kind": "List", "metadata": {}, "items": items})
        else:
            self._fail(404, f"{path} not found: the server could not find the requested resource")

    def _create_pod(self, pod: Json) -> None:
        assert pod["kind"] == "Pod"
        pod["metadata"].setdefault("name", pod["metadata"].get("generateName", "") + "abcde")
        self.api.created_pods.append(copy.deepcopy(pod))
        self.api.on_new_pod(pod)
        self.api.add(pod)
        self._answer(pod, 201)

    def _refusal(self, path: str) -> tuple[int, str] | None:
        """The error to answer with: one that the test asked for, or 401 without the token.

        Without TLS no token is needed: helm and kubectl do not send theirs then.
        """
        if self.api.certificate and self.headers.get("Authorization") != f"Bearer {self.api.TOKEN}":
            return 401, "Unauthorized"
        if status := self.api.refusal or self.api.broken.get(path, 0):
            return status, "it is broken"
        if path.startswith(tuple(self.api.forbidden)):
            return 403, f'{path} is forbidden: User "me" cannot do that: violates PodSecurity'
        return None

    def _send_log(self, pod: str, query: dict[str, str]) -> None:
        key = f"{pod}/previous" if query.get("previous") == "true" else pod
        if key not in self.api.logs and pod not in self.api.open_logs:
            self._fail(400, f'container "launcher" in pod "{pod}" is waiting to start')
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        since = query.get("sinceTime", "")[:19]
        sent = max(0, len(self.api.logs.get(key, [])) - int(query.get("tailLines", 10**9)))
        stopped = self.api.stopped
        while not stopped.is_set():
            is_open = pod in self.api.open_logs  # read before the lines: what is logged until it closes is sent
            lines = self.api.logs.get(key, [])
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

    def _fail(self, code: int, message: str) -> None:
        # kr8s opens a new connection after these two and does not close the one it had.
        self.close_connection = code in (401, 403)
        self._answer({"kind": "Status", "status": "Failure", "message": message, "code": code}, code)

    def _answer(self, body: Json, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)


def path_of(thing: Json) -> str:
    """Where the API keeps `thing`."""
    kind, metadata = thing["kind"], thing["metadata"]
    if kind == "APIResourceList":
        return f"/apis/{metadata['name']}"
    namespace = "" if kind in CLUSTER_SCOPED else f"/namespaces/{metadata.get('namespace', 'kubeflow')}"
    plural = f"{kind.lower()}{'es' if kind.endswith('s') else 's'}"
    return f"{API_OF_KIND.get(kind, '/api/v1')}{namespace}/{plural}/{metadata['name']}"


def start_at_once(pod: Json) -> None:
    """Make a new pod run and be ready."""
    names = [container["name"] for container in pod["spec"]["containers"]]
    states = [{"name": name, "ready": True, "restartCount": 0, "state": {"running": {}}} for name in names]
    conditions = [{"type": "Ready", "status": "True"}]
    pod["status"] = {"phase": "Running", "containerStatuses": states, "conditions": conditions}


def _matches(thing: Json, query: dict[str, str]) -> bool:
    labels = thing["metadata"].get("labels", {})
    for term in re.findall(r"[^,(]+(?:\([^)]*\))?", query.get("labelSelector", "")):
        name, _, values = term.replace(" in (", "=").rstrip(")").partition("=")
        if labels.get(name) not in values.split(","):
            return False
    for outer, inner, value in re.findall(r"(\w+)\.(\w+)=([^,]*)", query.get("fieldSelector", "")):
        if thing[outer].get(inner) != value:
            return False
    return True
