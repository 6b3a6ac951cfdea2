"""Nodes of the EC2 cluster on this machine: their user data runs as root in a scratch root and a network of its own.

`boot` starts this file inside of new mount, network and process namespaces. There it serves the instance metadata and
the calls to AWS, and runs the user data of each node in an overlay of this machine's files. Real are bash, curl, the
AWS CLI, ssh-keygen, ssh and sshd. Played are mount (a folder that all nodes share), apt-get, gpg,
systemctl and nvidia-smi.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

METADATA = "169.254.169.254"
API = ("127.0.0.1", 8080)
NAMESPACES = ("unshare", "--mount", "--net", "--pid", "--fork", "--mount-proc", "--kill-child")
TOKEN = "token-of-the-lab"
PROGRAMS = {
    # The entry of /etc/fstab decides, as for the real one; the first call fails, as if EFS were not ready.
    "mount": """
[[ -e /tries ]] || { touch /tries; echo "mount.nfs4: Failed to resolve server" >&2; exit 32; }
read -r source folder type options _ < <(grep " $1 " /etc/fstab)
echo "$type $source $options" >>/mounts
mkdir -p "/shared$folder"
exec /bin/mount --bind "/shared$folder" "$folder"
""",
    # The signing key of the Lustre client is the only thing that nodes download before they are ready.
    "curl": """
if [[ $* == *fsx-lustre* ]]; then echo "key of the Lustre client"; else exec /usr/bin/curl "$@"; fi
""",
    "gpg": "cat >/lustre-key",
    "apt-get": 'echo "$*" >>/packages',
    "systemctl": 'echo "$*" >>/units',
    "nvidia-smi": 'for number in 0 1 2 3; do echo "GPU $number: NVIDIA L4 (UUID: GPU-$number)"; done',
}


@dataclass
class Node:
    """A node to boot, and the commands that its login user runs on it after all nodes have booted."""

    address: str
    user_data: str
    commands: list[str] = field(default_factory=list)


def why_not() -> str | None:
    """Why this machine cannot run the nodes; None if it can."""
    if os.getuid() != 0:
        return "needs root"
    missing = [name for name in ("unshare", "ip", "curl", "ssh-keygen", "/usr/sbin/sshd") if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    layers = "lowerdir=/,upperdir=/mnt/1,workdir=/mnt/2"
    probe = f"mount -t tmpfs tmpfs /mnt && mkdir /mnt/1 /mnt/2 && mount -t overlay -o {layers} overlay /mnt"
    done = subprocess.run([*NAMESPACES, "bash", "-c", probe], capture_output=True, text=True, check=False, timeout=240)
    return f"cannot create a scratch root: {done.stderr.strip()}" if done.returncode else None


def boot(folder: Path, nodes: list[Node], aws: str, refused: Mapping[str, list[str]]) -> dict[str, Any]:
    """Boot the nodes one after the other. Returns the calls to AWS, and by address what is left on each node.

    The first calls of an action in `refused` get these error codes.
    """
    plan = {"folder": str(folder), "aws": aws, "refused": refused, "nodes": [asdict(node) for node in nodes]}
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    command = [*NAMESPACES, sys.executable, __file__, str(folder / "plan.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


class Lab:
    """Inside of the namespaces."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self.folder, self.aws = Path(plan["folder"]), Path(plan["aws"])
        self.nodes = [Node(**one) for one in plan["nodes"]]
        self.refused: dict[str, list[str]] = plan["refused"]
        self.calls: list[dict[str, str]] = []
        self.booting: Node | None = None

    def run(self) -> dict[str, Any]:
        quiet("ip", "link", "set", "lo", "up")
        for address in (METADATA, *(node.address for node in self.nodes)):
            quiet("ip", "addr", "add", f"{address}/32", "dev", "lo")
        quiet("mount", "-t", "tmpfs", "tmpfs", str(self.folder / "roots"))
        for place, handler in (((METADATA, 80), self.metadata()), (API, self.api())):
            threading.Thread(target=ThreadingHTTPServer(place, handler).serve_forever, daemon=True).start()
        found: dict[str, Any] = {node.address: self.boot(node) for node in self.nodes}
        for node in self.nodes:
            for command in node.commands:
                done = self.on(node, ["su", "-", "ubuntu", "-c", command])
                found[node.address].setdefault("said", []).append([done.returncode, done.stdout + done.stderr])
        return {"calls": self.calls, "nodes": found}

    def boot(self, node: Node) -> dict[str, Any]:
        root = self.scratch_root(node)
        self.booting = node
        done = self.on(node, ["/bin/bash", "/user-data"], PATH=f"{self.aws.parent}:{os.defpath}:/usr/sbin:/sbin")
        self.booting = None
        sshd = ["chroot", str(root), "/usr/sbin/sshd", "-o", f"ListenAddress={node.address}", "-o", "PidFile=none"]
        quiet(*sshd)
        files = (
            "etc/fstab",
            "mounts",
            "packages",
            "units",
            "etc/maskfleet/node.env",
            "etc/ssh/ssh_config.d/maskfleet.conf",
        )
        left = {name: (root / name).read_text(encoding="utf-8") for name in files if (root / name).exists()}
        listed = self.on(node, ["find", "/efs", "-xdev", "-printf", "%p %M %u\n"]).stdout.splitlines()
        return {"code": done.returncode, "output": done.stdout + done.stderr, "files": left, "efs": sorted(listed)}

    def scratch_root(self, node: Node) -> Path:
        """This machine's files with a copy-on-write layer, as a freshly started Ubuntu: user, host keys, programs."""
        place = self.folder / "roots" / node.address
        root = place / "root"
        for name in ("upper", "work", "root"):
            (place / name).mkdir(parents=True)
        layers = f"lowerdir=/,upperdir={place / 'upper'},workdir={place / 'work'}"
        quiet("mount", "-t", "overlay", "overlay", "-o", layers, str(root))
        for name in ("dev", "proc", str(self.aws.parent.parent).lstrip("/")):
            quiet("mount", "--rbind", f"/{name}", str(root / name))
        (root / "shared").mkdir()
        shared = self.folder / "shared"
        shared.mkdir(exist_ok=True)
        quiet("mount", "--bind", str(shared), str(root / "shared"))
        shutil.rmtree(root / "etc/ssh", ignore_errors=True)
        (root / "etc/ssh/ssh_config.d").mkdir(parents=True)
        (root / "etc/ssh/ssh_config").write_text("Include /etc/ssh/ssh_config.d/*.conf\n", encoding="utf-8")
        (root / "etc/ssh/sshd_config").write_text("HostKey /etc/ssh/ssh_host_ed25519_key\n", encoding="utf-8")
        (root / "etc/fstab").write_text("LABEL=root / ext4 defaults 0 1\n", encoding="utf-8")
        (root / "run/sshd").mkdir(parents=True, exist_ok=True)
        quiet("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(root / "etc/ssh/ssh_host_ed25519_key"))
        quiet(
            "chroot",
            str(root),
            "useradd",
            "--create-home",
            "--password",
            "*",
            "--uid",
            "4242",
            "--shell",
            "/bin/bash",
            "ubuntu",
        )
        for name, text in PROGRAMS.items():
            file = root / "usr/local/bin" / name
            file.write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
            file.chmod(0o755)
        (root / "user-data").write_text(node.user_data, encoding="utf-8")
        return root

    def on(self, node: Node, command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
        env = {
            "PATH": f"{os.defpath}:/usr/sbin:/sbin",
            "HOME": "/root",
            "RETRY_S": "0",
            "AWS_MAX_ATTEMPTS": "1",  # the CLI's own retries take seconds
            "AWS_ENDPOINT_URL": f"http://{API[0]}:{API[1]}",
            **environment,
        }
        env["PATH"] = f"/usr/local/bin:{env['PATH']}"
        root = str(self.folder / "roots" / node.address / "root")
        argv = ["chroot", root, *command]
        return subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=120)

    def metadata(self) -> type[BaseHTTPRequestHandler]:
        """Version 2 of the instance metadata service: nothing without a token."""
        lab = self

        class Handler(Quiet):
            def do_PUT(self) -> None:
                wanted = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
                self.answer(200 if wanted else 403, TOKEN)

            def do_GET(self) -> None:
                if self.headers["X-aws-ec2-metadata-token"] != TOKEN:
                    self.answer(401)
                    return
                assert lab.booting is not None
                name = f"ip-{lab.booting.address.replace('.', '-')}.us-west-2.compute.internal"
                role = "/latest/meta-data/iam/security-credentials/"
                key = {
                    "AccessKeyId": "id",
                    "SecretAccessKey": "secret",
                    "Token": "t",
                    "Expiration": "2099-01-01T00:00:00Z",
                }
                texts = {
                    "/latest/meta-data/instance-id": f"i-{lab.booting.address}",
                    "/latest/meta-data/local-ipv4": lab.booting.address,
                    "/latest/meta-data/local-hostname": name,
                    role: "node",
                    f"{role}node": json.dumps({"Code": "Success", **key}),
                }
                self.answer(200 if self.path in texts else 404, texts.get(self.path, ""))

        return Handler

    def api(self) -> type[BaseHTTPRequestHandler]:
        """AWS's query protocol: every call is recorded, and succeeds if it is signed and not to be refused."""
        lab = self

        class Handler(Quiet):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                call = dict(parse_qsl(body))
                if "AWS4-HMAC-SHA256" not in self.headers.get("Authorization", ""):
                    self.answer(403)
                    return
                lab.calls.append(call)
                name = call["Action"]
                if lab.refused.get(name):
                    code = f"<Type>Sender</Type><Code>{lab.refused[name].pop(0)}</Code><Message>no</Message>"
                    self.answer(400, f"<ErrorResponse><Error>{code}</Error><RequestId>1</RequestId></ErrorResponse>")
                    return
                self.answer(200, f"<{name}Response><{name}Result/></{name}Response>")

        return Handler


class Quiet(BaseHTTPRequestHandler):
    """A handler that logs nothing."""

    def answer(self, code: int, text: str = "") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Tests read standard error."""


def quiet(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True, timeout=240)


if __name__ == "__main__":
    read = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    result = Lab(read).run()
    Path(read["folder"], "result.json").write_text(json.dumps(result), encoding="utf-8")
