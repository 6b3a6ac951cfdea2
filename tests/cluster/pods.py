"""Pods of the train chart in the network namespaces of the hosts, as mpi-operator and the kubelet create them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from client import until
from pod_root import BECOME, USER
from train_release import argv, environment, hostfile, main_container, one, operator_env, replica

from cluster import Cluster, run
from tools import ROOT

OWN = (sys.base_prefix, sys.prefix, str(ROOT))
# A virtual environment may share the packages of another one.
SHARED = tuple(path for path in sys.path if Path(path).name == "site-packages" and not path.startswith(OWN))
PROGRAMS = (*OWN, *SHARED)
PATH = f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"


class Pod:
    """One pod, running."""

    def __init__(self, process: subprocess.Popen[str], env: Mapping[str, str], log: Path) -> None:
        self._process, self._env, self._log = process, env, log

    @property
    def log(self) -> str:
        return self._log.read_text()

    def ended(self, timeout_s: float = 900) -> int:
        """Exit code of its main process."""
        return self._process.wait(timeout_s)

    def exec(self, command: Sequence[str], timeout_s: float = 900) -> subprocess.CompletedProcess[str]:
        """Run a command in the pod, as probes and hooks do."""
        until(self._first)
        inside = ["nsenter", "--target", self._first(), "--mount", "--uts", "--net", "--pid", "--root", "--wd=/"]
        return subprocess.run(
            [*inside, *BECOME, "--", *command],
            env=dict(self._env),
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )

    def _first(self) -> str:
        """Id of its first process once that has changed its root, else an empty string."""
        for child in Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split():
            if str(Path(f"/proc/{child}/root").readlink()) != "/":
                return child
        return ""

    def names(self) -> list[str]:
        """Names of its processes."""
        return self.exec(["ps", "-e", "-o", "comm="]).stdout.split()

    def terminate(self) -> None:
        """Send SIGTERM to its first process, as the kubelet does."""
        until(self._first)
        os.kill(int(self._first()), signal.SIGTERM)

    def kill(self) -> None:
        """Kill all its processes at once."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class Release:
    """A rendered release and the pods of its job."""

    def __init__(self, cluster: Cluster, objects: list[dict[str, Any]], volume: Path, kind: str) -> None:
        self.cluster, self.objects, self.volume = cluster, objects, volume
        self.job = one(objects, kind)
        self.name = self.job["metadata"]["name"]
        self.folder = cluster.folder / f"pods-{self.name}"
        self.folder.mkdir()
        self.keys: dict[str, str] = {}  # of the operator's SSH Secret
        self.workers: list[str] = []
        self.pods: list[Pod] = []

    def _files(self) -> dict[str, dict[str, str]]:
        ours = {
            name: text for item in self.objects if item["kind"] == "ConfigMap" for name, text in item["data"].items()
        }
        return {"/etc/maskfleet": ours}

    def _start(
        self, host: int, hostname: str, command: list[str], env: dict[str, str], keys: Mapping[str, str] | None = None
    ) -> Pod:
        place = self.folder / f"{len(self.pods)}-{hostname}"
        (place / "root").mkdir(parents=True)
        env = {"PATH": PATH, "LD_LIBRARY_PATH": "/usr/local/lib", "HOME": "/home/fleet", **env}
        pod = {
            "root": str(place / "root"),
            "programs": PROGRAMS,
            "hosts": self._hosts(hostname, host),
            "hostname": hostname,
            "files": self._files(),
            "secret_at": self.job["spec"].get("sshAuthMountPath", "/home/fleet/.ssh"),
            "secret": dict(keys or self.keys),
            "volumes": {str(self.volume): "/fsx"},
            "argv": command,
            "env": env,
        }
        (place / "pod.json").write_text(json.dumps(pod))
        apart = [
            "ip",
            "netns",
            "exec",
            self.cluster.namespace(host),
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--uts",
        ]
        script = str(Path(__file__).with_name("pod_root.py"))
        with (place / "log").open("w") as log:
            process = subprocess.Popen(
                [*apart, sys.executable, "-I", script, str(place / "pod.json")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self.pods.append(Pod(process, env, place / "log"))
        return self.pods[-1]

    def _hosts(self, hostname: str, host: int) -> str:
        lines = [f"{self.cluster.address(index + 1)} {name}" for index, name in enumerate(self.workers)]
        return "\n".join(["127.0.0.1 localhost", *lines, f"{self.cluster.address(host)} {hostname}", ""])


class ElasticJob(Release):
    """The pods of an Indexed Job, each on the host that the test chooses."""

    def __init__(self, cluster: Cluster, objects: list[dict[str, Any]], volume: Path) -> None:
        super().__init__(cluster, objects, volume, "Job")

    def worker(self, index: int, host: int) -> Pod:
        """Pod `index` on a host, with what Kubernetes adds to its environment."""
        [container] = self.job["spec"]["template"]["spec"]["containers"]
        own = {"JOB_COMPLETION_INDEX": str(index), "MASKFLEET_JOB_UID": f"uid-of-{self.name}",
               "MASKFLEET_HOST_ADDRESS": self.cluster.address(host)}  # fmt: skip
        assert {"MASKFLEET_JOB_UID", "MASKFLEET_HOST_ADDRESS"} <= {one["name"] for one in container["env"]}
        return self._start(host, f"{self.name}-{index}", argv(container), environment(container) | own)


class Job(Release):
    """The pods of an MPIJob: its workers on the first hosts, its launcher on the next one."""

    def __init__(self, cluster: Cluster, objects: list[dict[str, Any]], volume: Path) -> None:
        super().__init__(cluster, objects, volume, "MPIJob")
        self.workers = [line.split()[0] for line in hostfile(self.job).splitlines()]
        self.keys = key_pair(self.folder / "key")

    def worker(self, index: int, keys: Mapping[str, str] | None = None) -> Pod:
        container = main_container(self.objects, "Worker")
        return self._start(index + 1, f"{self.name}-worker-{index}", argv(container), environment(container), keys)

    def init_container(self) -> Pod:
        [container] = replica(self.objects, "Launcher")["template"]["spec"]["initContainers"]
        return self._start(len(self.workers) + 1, f"{self.name}-launcher", argv(container), environment(container))

    def launcher(self) -> Pod:
        """One attempt."""
        container = main_container(self.objects, "Launcher")
        env = environment(container) | operator_env(self.job)
        return self._start(len(self.workers) + 1, f"{self.name}-launcher", argv(container), env)

    def _files(self) -> dict[str, dict[str, str]]:
        return {**super()._files(), "/etc/mpi": {"hostfile": hostfile(self.job)}}


def key_pair(file: Path) -> dict[str, str]:
    """The files of the operator's SSH Secret: an ECDSA pair on the curve P-521, the private half as plain PEM."""
    run("ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-C", "", "-f", str(file))
    private, public = file.read_text(), file.with_suffix(".pub").read_text()
    return {"id_rsa": private, "id_rsa.pub": public, "authorized_keys": public}


def volume(folder: Path) -> Path:
    """A shared volume that the pods' user may write to."""
    folder.mkdir()
    os.chown(folder, USER, USER)
    return folder
