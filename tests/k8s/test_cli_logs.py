"""`maskfleet logs -f` through a real API server: launchers that are killed, and an API that goes away and comes back.

The test is the kubelet. Where the API server cannot reach it, as on another machine, the test is skipped and says so.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from kube import eventually
from kubelet import Kubelet
from test_cli_eks import IMAGE, NAME, Fleet, ended, fleet, launcher_pod, run_workers

from tools import run_tool

__all__ = ["fleet"]
INSTANCE = "app.kubernetes.io/instance"


class Wire:
    """A connection between the command and the API server that can be cut and restored on the same port."""

    def __init__(self, folder: Path) -> None:
        config = json.loads(run_tool("kubectl", "config", "view", "--minify", "--flatten", "-o", "json"))
        cluster = config["clusters"][0]["cluster"]
        server = urlsplit(cluster["server"])
        assert server.hostname
        self._target = (server.hostname, server.port or 443)
        self._port = 0
        self._open: list[socket.socket] = []
        self.restore()
        cluster["server"] = f"https://127.0.0.1:{self._port}"
        cluster.setdefault("tls-server-name", server.hostname)
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(json.dumps(config))

    def restore(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._open:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    close = cut

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near = listener.accept()[0]
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._open += [near, far]
            threading.Thread(target=self._carry, args=(near, far), daemon=True).start()

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        with near, far, suppress(OSError):
            while True:
                for end in select.select([near, far], [], [], 60)[0]:
                    data = end.recv(65536)
                    if not data:
                        return
                    (far if end is near else near).sendall(data)


class Following:
    """`maskfleet logs -f` as a process, and what it printed."""

    def __init__(self, fleet: Fleet, kubeconfig: Path, *arguments: str) -> None:
        argv = [sys.executable, "-u", "-m", "maskfleet", *(arguments or ("logs", "-f", fleet.handle))]
        env = {**fleet.environment, "KUBECONFIG": str(kubeconfig)}
        self.process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    def shows(self, text: str) -> None:
        eventually(lambda: any(text in line for line in self.lines), what=f"{text!r} in {self.lines}")

    def end(self) -> list[str]:
        """All lines, once it has ended by itself."""
        eventually(lambda: self.process.poll() is not None, what=f"the end of {self.lines}")
        self._thread.join()
        return self.lines

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._thread.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def kubelet(fleet: Fleet, tmp_path: Path) -> Iterator[Kubelet]:
    node = Kubelet(tmp_path)
    yield node
    node.leave()


def begun(fleet: Fleet, kubelet: Kubelet) -> str:
    """A job whose first launcher runs on our node."""
    assert fleet.launch().returncode == 0
    run_workers(fleet.kube)
    pod = launcher_pod(fleet.kube)
    kubelet.take(fleet.kube, pod)
    fleet.kube.set_pod_status(pod, phase="Running", conditions=[{"type": "Ready", "status": "True"}])
    kubelet.say(pod, "probe")
    expect_logs(fleet, pod)
    return pod


def expect_logs(fleet: Fleet, pod: str, container: str = "launcher") -> None:
    """A skip where the API server cannot reach our kubelet."""
    # With an end: what is between the API server and this machine may swallow the question.
    done = fleet.kube.try_kubectl("logs", pod, "-c", container, "--request-timeout=30s")
    if done.returncode != 0:
        pytest.skip(f"the API server does not reach a kubelet here: {done.stderr.strip()}")


def over(fleet: Fleet, kubelet: Kubelet, pod: str, code: int) -> None:
    fleet.kube.set_pod_status(pod, phase="Succeeded" if code == 0 else "Failed", containerStatuses=ended(code))
    kubelet.open.discard(pod)


def test_lines_are_printed_once_over_a_cut_connection_and_a_killed_launcher(
    fleet: Fleet, kubelet: Kubelet, tmp_path: Path
) -> None:
    first, wire = begun(fleet, kubelet), Wire(tmp_path)
    kubelet.say(first, *(f"[1,0]<stdout>:line {number}" for number in range(30)))
    with closing(wire), closing(Following(fleet, wire.kubeconfig)) as following:
        following.shows("[rank0]: line 29")
        wire.cut()
        following.shows("cannot be reached")
        kubelet.say(first, *(f"[1,1]<stderr>:line {number}" for number in range(30, 60)))
        wire.restore()
        following.shows("[rank1]: line 59")
        over(fleet, kubelet, first, 137)
        following.shows("ended with code 137")
        second = launcher_pod(fleet.kube)
        kubelet.take(fleet.kube, second)
        fleet.kube.set_pod_status(second, phase="Running", conditions=[{"type": "Ready", "status": "True"}])
        kubelet.say(second, "[1,0]<stdout>:again")
        following.shows("[rank0]: again")
        kubelet.say(second, "[1,0]<stdout>:step: 90  epoch: 1.0")
        assert fleet.status()["step"] == 90
        over(fleet, kubelet, second, 0)
        lines = following.end()
    printed = [line for line in lines if not line.startswith("[launch]")]
    numbered = [f"[rank{0 if number < 30 else 1}]: line {number}" for number in range(60)]
    assert printed == ["probe", *numbered, "[rank0]: again", "[rank0]: step: 90  epoch: 1.0"]
    assert following.process.returncode == 0


def test_a_followed_launch_exits_with_the_result_of_the_job_and_says_why(fleet: Fleet, kubelet: Kubelet) -> None:
    launch = fleet.arguments("--max-restarts", "0", nodes=1)
    with closing(Following(fleet, Path(os.environ["KUBECONFIG"]), *launch)) as following:
        following.shows(fleet.handle)
        following.shows("[launch]: pending: 0 of 1 workers are ready")
        run_workers(fleet.kube, 1)
        pod = launcher_pod(fleet.kube)
        kubelet.take(fleet.kube, pod)
        fleet.kube.set_pod_status(pod, phase="Running", conditions=[{"type": "Ready", "status": "True"}])
        kubelet.say(pod, "[1,2]<stderr>:Traceback (most recent call last):", "[1,2]<stderr>:  File x, line 1")
        kubelet.say(pod, "[1,2]<stderr>:torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
        if not any("[rank2]" in line for line in following.lines):
            expect_logs(fleet, pod)
        following.shows("[rank2]: torch.OutOfMemoryError")
        over(fleet, kubelet, pod, 3)
        lines = following.end()
    assert following.process.returncode == 3
    assert "First to fail was rank 2:" in lines
    assert any("lower train.images_per_gpu" in line for line in lines)


def test_a_worker_killed_for_memory_is_explained_after_the_operator_deleted_it(fleet: Fleet, kubelet: Kubelet) -> None:
    assert fleet.launch("--max-restarts", "0", nodes=1).returncode == 0
    run_workers(fleet.kube, 1)
    pod = launcher_pod(fleet.kube)
    kubelet.take(fleet.kube, pod)
    fleet.kube.pod_runs(pod)
    kubelet.say(pod, "[1,0]<stderr>:step: 10", "worker r50-cli-worker-0 was OOMKilled: its container was restarted")
    expect_logs(fleet, pod)
    over(fleet, kubelet, pod, 1)
    eventually(lambda: fleet.status()["state"] == "failed", what="the job failed")
    eventually(lambda: fleet.kube.find("pod", f"{NAME}-worker-0") is None, what="the operator deleted the worker")
    told = fleet("explain", fleet.handle).stdout
    assert "cause: host memory. A worker was killed" in told
    assert "seen in: worker r50-cli-worker-0 was OOMKilled" in told


def test_a_fabric_test_prints_its_rows_and_leaves_nothing(fleet: Fleet, kubelet: Kubelet) -> None:
    kube = fleet.kube
    asked = ["doctor", "--on", "eks", "--fabric", "--image", IMAGE, "--namespace", kube.namespace, "--nodes", "1",
             "--instance", "p5.48xlarge", "--launch-set", "shared_claim=runs", "--json"]  # fmt: skip
    with closing(Following(fleet, Path(os.environ["KUBECONFIG"]), *asked)) as following:
        jobs = eventually(lambda: kube.list("mpijobs"), what=lambda: f"the test's MPIJob: {following.lines}")
        name = jobs[0]["metadata"]["name"]
        assert name.startswith("fabric-test-")
        eventually(lambda: kube.find("pod", f"{name}-worker-0"), what="its worker")
        kube.pod_runs(f"{name}-worker-0")
        pod = launcher_pod(kube, name)
        command = kube.get("pod", pod)["spec"]["containers"][0]["command"]
        assert command[-3:] == ["python3", "-m", "maskfleet.bench.fabric"]
        kubelet.take(kube, pod)
        kube.pod_runs(pod)
        kubelet.say(pod, '[1,0]<stdout>:fabric: {"transport": "NCCL 2.28.9: P2P (NVLink or PCIe)"}')
        row = {"bytes": 2**30, "time_us": 4253.0, "bus_gb_per_s": 441.8, "ranks": 8, "hosts": 1}
        kubelet.say(pod, f"[1,0]<stdout>:fabric: {json.dumps(row)}")
        expect_logs(fleet, pod)
        over(fleet, kubelet, pod, 0)
        lines = following.end()
    assert following.process.returncode == 0, lines
    found = json.loads("\n".join(lines[lines.index("[") :]))
    assert [one["name"] for one in found] == ["transport", "all-reduce 1 GiB"]
    assert "should reach 441.8 GB/s" in found[1]["found"]
    eventually(lambda: not kube.list("mpijobs,configmaps,networkpolicies", f"{INSTANCE}={name}"), what="nothing left")


def is_to_go(fleet: Fleet, pod: str) -> bool:
    found = fleet.kube.find("pod", pod)
    return found is None or "deletionTimestamp" in found["metadata"]


def test_cancelling_a_job_ends_logs_f(fleet: Fleet, kubelet: Kubelet) -> None:
    pod = begun(fleet, kubelet)
    with closing(Following(fleet, Path(os.environ["KUBECONFIG"]))) as following:
        following.shows("probe")
        cancelled = threading.Thread(target=fleet, args=("cancel", fleet.handle))
        cancelled.start()
        eventually(lambda: is_to_go(fleet, pod), what="the pod is to go")
        # As a kubelet does: first the pod's processes end, then the pod.
        kubelet.say(pod, "saved")
        kubelet.open.discard(pod)
        following.shows("saved")
        fleet.kube.try_kubectl("delete", "pod", pod, "--force", "--grace-period=0")
        cancelled.join(120)
        lines = following.end()
    assert "saved" in lines
    assert fleet.status()["state"] == "cancelled"
