"""Three hosts on this machine: network namespaces on a bridge, each with its own processes, sshd and home folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sysconfig
import time
from pathlib import Path

TOOLS = {"ip": "iproute2", "/usr/sbin/sshd": "openssh-server", "ssh-keygen": "openssh-client", "mpirun": "openmpi-bin"}


def why_not() -> str | None:
    """Why this machine cannot run the hosts; None if it can."""
    if os.getuid() != 0:
        return "needs root"
    missing = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if missing:
        return f"needs the Debian packages {', '.join(missing)}"
    probe = f"mfprobe{os.getpid()}"
    if run("ip", "netns", "add", probe, check=False).returncode != 0:
        return "cannot create network namespaces here"
    run("ip", "netns", "delete", probe)
    return None


def run(*argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, check=check, timeout=240)


class Cluster:
    """Hosts node1, node2, … reachable by name from the client's home folder; `shared` is on all of them.

    `name` and `network` keep clusters apart that run at the same time.
    """

    def __init__(self, folder: Path, count: int = 3, *, name: str = "mf", network: str = "10.77.0") -> None:
        self.folder, self.count = folder, count
        self.name, self.network = name, network
        self.shared = folder / "shared"
        self.client_home = folder / "client"
        self.packages = folder / "packages"
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def names(self) -> list[str]:
        return [f"node{number}" for number in range(1, self.count + 1)]

    def address(self, number: int) -> str:
        return f"{self.network}.{10 + number}"

    def namespace(self, number: int) -> str:
        return f"{self.name}{number}"

    def up(self) -> None:
        self.down()
        self.shared.mkdir(parents=True)
        Path("/run/sshd").mkdir(exist_ok=True)
        run("ip", "link", "add", f"{self.name}br0", "type", "bridge")
        run("ip", "addr", "add", f"{self.network}.1/24", "dev", f"{self.name}br0")
        run("ip", "link", "set", f"{self.name}br0", "up")
        self._client()
        self._packages()
        for number in range(1, self.count + 1):
            self._network(number)
            self._home(number)
            self.start_host(number)

    def down(self) -> None:
        for number in list(self._processes):
            self.kill_host(number)
        for number in range(1, self.count + 1):
            for pid in run(
                "ip", "netns", "pids", self.namespace(number), check=False
            ).stdout.split():  # left over from tests that were killed
                with contextlib.suppress(ProcessLookupError):  # it exited with the one before it
                    os.kill(int(pid), signal.SIGKILL)
            run("ip", "link", "delete", f"{self.name}v{number}", check=False)  # the kernel removes namespaces later
            run("ip", "netns", "delete", self.namespace(number), check=False)
            shutil.rmtree(f"/etc/netns/{self.namespace(number)}", ignore_errors=True)
        run("ip", "link", "delete", f"{self.name}br0", check=False)

    def start_host(self, number: int) -> None:
        """Boot: set the link up and start sshd, in the host's own process namespace."""
        self.plug(number)
        home = self.home_of(number)
        apart = [
            "ip",
            "netns",
            "exec",
            self.namespace(number),
            "unshare",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "--uts",
        ]
        with (home / "sshd.log").open("ab") as log:
            self._processes[number] = subprocess.Popen(
                [*apart, "sh", "-c", f"hostname node{number} && exec /usr/sbin/sshd -D -e -f {home}/sshd_config"],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + 240
        while run("bash", "-c", f"</dev/tcp/{self.address(number)}/22", check=False).returncode != 0:
            assert time.monotonic() < deadline, (home / "sshd.log").read_text()
            time.sleep(0.1)

    def cut_host(self, number: int) -> None:
        """Power failure: link down and every process killed at once, so that no connection is closed."""
        self.unplug(number)
        self.kill_host(number)

    def unplug(self, number: int) -> None:
        run("ip", "link", "set", f"{self.name}v{number}", "down")

    def plug(self, number: int) -> None:
        run("ip", "link", "set", f"{self.name}v{number}", "up")

    def kill_host(self, number: int) -> None:
        process = self._processes.pop(number)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def inside(self, number: int, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run a command on a host, without SSH."""
        pid = next(int(one) for one in _children(self._processes[number].pid))
        return run("nsenter", "--target", str(pid), "--all", *argv, check=False)

    def processes(self, number: int) -> list[str]:
        """Command lines of all processes of a host but its sshd."""
        listed = self.inside(number, "ps", "-e", "-o", "args=").stdout.splitlines()
        return [line for line in listed if "sshd" not in line and not line.startswith("ps ")]

    def until_idle(self) -> None:
        """Wait until no host runs anything; only a supervisor that is about to exit may take a moment."""
        deadline = time.monotonic() + 60
        while found := [line for number in range(1, self.count + 1) for line in self.processes(number)]:
            assert all("maskfleet.launch.supervise.supervisor" in line or "<defunct>" in line for line in found), found
            assert time.monotonic() < deadline, found
            time.sleep(0.2)

    def fill_disk(self, number: int, path: Path) -> None:
        """A full file system at `path`, on that host only."""
        self.inside(number, "mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(path))
        self.inside(number, "dd", "if=/dev/zero", f"of={path}/fill", "bs=1k", "count=64")

    def free_disk(self, number: int, path: Path) -> None:
        self.inside(number, "umount", str(path))

    def home_of(self, number: int) -> Path:
        return self.folder / f"home{number}"

    def _network(self, number: int) -> None:
        name, link = self.namespace(number), f"{self.name}v{number}"
        run("ip", "netns", "add", name)
        run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "link", "set", link, "master", f"{self.name}br0")
        run("ip", "-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            run("ip", "-n", name, "link", "set", device, "up")
        # `ip netns exec` mounts these files over those in /etc, for that host alone.
        own = Path(f"/etc/netns/{name}")
        own.mkdir(parents=True, exist_ok=True)
        hosts = "".join(f"{self.address(n)} node{n}\n" for n in range(1, self.count + 1))
        (own / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        users = Path("/etc/passwd").read_text().splitlines()
        root = f"root:x:0:0:root:{self.home_of(number)}:/bin/bash"
        (own / "passwd").write_text("\n".join([root, *(u for u in users if not u.startswith("root:"))]) + "\n")

    def _home(self, number: int) -> None:
        home = self.home_of(number)
        (home / ".ssh").mkdir(parents=True)
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / "host_key"))
        for file in ("id_ed25519", "id_ed25519.pub"):
            shutil.copy(self.client_home / ".ssh" / file, home / ".ssh" / file)
        shutil.copy(self.client_home / ".ssh" / "id_ed25519.pub", home / ".ssh" / "authorized_keys")
        (home / ".ssh" / "config").write_text("Host *\n  StrictHostKeyChecking accept-new\n  LogLevel ERROR\n")
        (home / ".ssh" / "environment").write_text(f"OMP_NUM_THREADS=1\nPYTHONPATH={self.packages}\n")
        (home / "sshd_config").write_text(
            f"ListenAddress {self.address(number)}\nHostKey {home}/host_key\nPidFile none\nUsePAM no\nStrictModes no\n"
            f"AuthorizedKeysFile {home}/.ssh/authorized_keys\nPermitRootLogin prohibit-password\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitUserEnvironment yes\n"
            "MaxStartups 100\nSubsystem sftp internal-sftp\n"
        )

    def _packages(self) -> None:
        """Packages of the hosts' own Python: all of this environment, such as torch, except maskfleet."""
        self.packages.mkdir()
        for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
            if "maskfleet" not in path.name and path.suffix != ".pth":
                (self.packages / path.name).symlink_to(path)

    def _client(self) -> None:
        ssh = self.client_home / ".ssh"
        ssh.mkdir(parents=True)
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(ssh / "id_ed25519"))
        aliases = "".join(
            f"Host node{n}\n  HostName {self.address(n)}\n  User root\n" for n in range(1, self.count + 1)
        )
        (ssh / "config").write_text(aliases)


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
