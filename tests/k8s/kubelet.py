"""A node whose kubelet is this process. It serves logs and nothing else; the API server treats it as any other."""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kube import Kube, random_name

from tools import run_tool, tool


class Kubelet:
    """Serves `logs[pod]`, a list of (stamp, line); pods in `open` may log more."""

    def __init__(self, folder: Path) -> None:
        self.logs: dict[str, list[tuple[str, str]]] = {}
        self.open: set[str] = set()
        self.is_dead = False
        self.asked: list[str] = []
        self.name = random_name("maskfleet-test-node")
        self._taken: list[tuple[Kube, str]] = []
        kubelet = self

        class Handler(_Handler):
            owner = kubelet

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*_certificate(folder))
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        self._register()

    def _register(self) -> None:
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": self.name, "labels": {"maskfleet-test": ""}}}
        status = {"addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
                  "daemonEndpoints": {"kubeletEndpoint": {"Port": self._server.server_address[1]}}}  # fmt: skip
        _kubectl("create", "-f", "-", sent=node)
        patch = json.dumps({"status": status})
        run_tool("kubectl", "patch", "node", self.name, "--subresource=status", "--type=merge", "-p", patch)

    def take(self, kube: Kube, pod: str) -> None:
        """Bind `pod` to this node."""
        target = {"apiVersion": "v1", "kind": "Node", "name": self.name}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}, "target": target}
        path = f"/api/v1/namespaces/{kube.namespace}/pods/{pod}/binding"
        _kubectl("create", "--raw", path, "-f", "-", sent=binding)
        self._taken.append((kube, pod))
        self.open.add(pod)

    def say(self, pod: str, *lines: str) -> None:
        log = self.logs.setdefault(pod, [])
        for line in lines:
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
            log.append((f"{stamp}.{len(log):09d}Z", line))

    def die(self) -> None:
        """Answer nobody any more; node and pods stay in the API, as when a machine fails."""
        self.is_dead = True
        self._server.shutdown()
        self._server.server_close()

    def leave(self) -> None:
        self.die()
        # Only its node stops a pod; without this, deleting the namespace would wait minutes for the control plane.
        for kube, pod in self._taken:
            kube.kubectl("delete", "pod", pod, "--force", "--grace-period=0", "--ignore-not-found", "--wait=false")
        run_tool("kubectl", "delete", "node", self.name, "--wait=false")


class _Handler(BaseHTTPRequestHandler):
    owner: Kubelet
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        return

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        self.owner.asked.append(self.path)
        if self.owner.is_dead:  # the API server uses its connections again
            self.close_connection = True
            return
        _, what, _, pod, container = url.path.split("/")
        assert what == "containerLogs"
        assert container in ("launcher", "worker")
        query = {name: value[-1] for name, value in parse_qs(url.query).items()}
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with suppress(OSError):  # the API server closed the connection with its client
            self._stream(pod, query)

    def _stream(self, pod: str, query: dict[str, str]) -> None:
        sent, since = 0, query.get("sinceTime", "")[:19]
        while True:
            is_open, lines = pod in self.owner.open, self.owner.logs.get(pod, [])
            for stamp, text in lines[sent:]:
                if stamp[:19] >= since:
                    data = (f"{stamp} {text}\n" if query.get("timestamps") == "true" else f"{text}\n").encode()
                    self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()
            sent = len(lines)
            if query.get("follow") != "true" or not is_open:
                self.wfile.write(b"0\r\n\r\n")
                return
            time.sleep(0.05)


def _kubectl(*arguments: str, sent: dict[str, Any]) -> None:
    command = [tool("kubectl"), *arguments]
    done = subprocess.run(command, input=json.dumps(sent), text=True, capture_output=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def _certificate(folder: Path) -> tuple[Path, Path]:
    certificate, key = folder / "kubelet.crt", folder / "kubelet.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=kubelet",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key
