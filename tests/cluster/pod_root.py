"""Become a process in a restricted pod: its own read-only root, user 1000, no capabilities, no new privileges.

Run as root in fresh mount and process namespaces: `pod_root.py FILE`, where FILE is the JSON that pods.py wrote.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

USER = 1000
IMAGE_FOLDERS = ("bin", "lib", "lib32", "lib64", "libx32", "sbin", "usr", "var")
BECOME = ["/usr/bin/setpriv", f"--reuid={USER}", f"--regid={USER}", f"--groups={USER}", "--no-new-privs"]
BECOME += ["--bounding-set=-all", "--inh-caps=-all"]


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def bind(source: Path, target: Path, *, read_only: bool) -> None:
    target.mkdir(parents=True, exist_ok=True)
    mount("--rbind", str(source), str(target))
    if read_only:
        mount("-o", "remount,bind,ro", str(target))


def tmpfs(target: Path, mode: str) -> None:
    target.mkdir(parents=True, exist_ok=True)
    mount("-t", "tmpfs", "-o", f"mode={mode},gid={USER}", "tmpfs", str(target))


def image(root: Path, pod: dict[str, Any]) -> None:
    """What the image would hold: this machine's programs and Python, and the user fleet."""
    for name in IMAGE_FOLDERS:
        here = Path("/", name)
        if here.is_symlink():
            (root / name).symlink_to(here.readlink())
        elif here.is_dir():
            bind(here, root / name, read_only=True)
    for path in pod["programs"]:
        bind(Path(path), root / path.lstrip("/"), read_only=True)
    shutil.copytree("/etc", root / "etc", symlinks=True)
    (root / "etc" / "passwd").write_text(f"root:x:0:0::/root:/bin/sh\nfleet:x:{USER}:{USER}::/home/fleet:/bin/sh\n")
    (root / "etc" / "group").write_text(f"root:x:0:\nfleet:x:{USER}:\n")
    (root / "etc" / "hosts").write_text(pod["hosts"])


def secret(folder: Path, files: dict[str, str]) -> None:
    """A Secret's volume as the kubelet lays it out: mode 1777, files behind links, owned by root, read-only."""
    tmpfs(folder, "1777")
    (folder / "..now").mkdir(mode=0o755)
    (folder / "..data").symlink_to("..now")
    for name, text in files.items():
        (folder / "..now" / name).write_text(text)
        (folder / "..now" / name).chmod(0o644)
        (folder / name).symlink_to(f"..data/{name}")
    mount("-o", "remount,ro", str(folder))


def main() -> None:
    pod = json.loads(Path(sys.argv[1]).read_text())
    mount("--make-rprivate", "/")
    root = Path(pod["root"])
    tmpfs(root, "0755")
    # Before the image: the checkout and its Python may lie below these folders and are bound on top of them.
    tmpfs(root / "tmp", "2777")
    tmpfs(root / "home" / "fleet", "2777")
    image(root, pod)
    bind(Path("/dev"), root / "dev", read_only=False)
    bind(Path("/sys"), root / "sys", read_only=False)
    (root / "proc").mkdir()
    mount("-t", "proc", "proc", str(root / "proc"))
    tmpfs(root / "dev" / "shm", "1777")
    for folder, files in pod["files"].items():
        target = root / folder.lstrip("/")
        target.mkdir(parents=True)
        for name, text in files.items():
            (target / name).write_text(text)
            (target / name).chmod(0o444)
    secret(root / pod["secret_at"].lstrip("/"), pod["secret"])
    for source, target in pod["volumes"].items():
        bind(Path(source), root / target.lstrip("/"), read_only=False)
    mount("-o", "remount,ro", str(root))
    subprocess.run(["hostname", pod["hostname"]], check=True)
    os.chroot(root)
    os.chdir("/")
    os.umask(0o022)
    os.execve(BECOME[0], [*BECOME, "--", *pod["argv"]], pod["env"])


if __name__ == "__main__":
    main()
