"""Host names that would run a command through `ProxyCommand` are refused before any SSH client starts.

The commands run with a real ~/.ssh/config, and the supervisor's command line with the real `ssh` program.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest

from maskfleet.config.launch import SshLaunch
from maskfleet.errors import LaunchError
from maskfleet.launch.address import address_parts
from maskfleet.launch.backend import backend_of, parse_handle
from maskfleet.launch.job import JobHandle
from maskfleet.launch.ssh.connect import connect
from maskfleet.launch.ssh.files import launch_of
from maskfleet.launch.ssh.hosts import cluster_of
from maskfleet.launch.supervise.connectivity import ssh_target
from tools import tool

EVIL = [
    "x`touch pwned`",
    "x`touch${IFS}pwned`",
    "$(touch pwned)",
    "x;touch pwned",
    "x|touch pwned",
    "x\ntouch pwned",
    "x&",
]
OPTIONS = ["-oProxyCommand=touch pwned", "-oProxyCommand=x", "me@-x", "-me@x", "--"]
WRONG = [
    "",
    "@x",
    "a@",
    "a@b@c",
    "a:0",
    "a:65536",
    "a:99999",
    "a:-1",
    "a:२२",
    "a:",
    "fd00::1",
    "[fd00",
    "[::::]",
    "[a]",
]
WRONG += ["a b", "a\x00b", "ä", "a/b", "a%60", "a slots=8", "a=8", "[fe80::1%`x`]", "x" * 254]


@pytest.mark.parametrize("address", [*EVIL, *OPTIONS, *WRONG])
def test_only_names_addresses_and_ports_are_hosts(address: str) -> None:
    with pytest.raises(LaunchError, match="is not the address of a host"):
        address_parts(address)


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("node-1.example.com", (None, "node-1.example.com", None)),
        ("me.you@10.0.0.7:2222", ("me.you", "10.0.0.7", 2222)),
        ("[fd00::1]", (None, "fd00::1", None)),
        ("me@[fe80::1%eth0]:65535", ("me", "fe80::1%eth0", 65535)),
    ],
)
def test_an_address_is_taken_apart(address: str, parts: tuple[str | None, str, int | None]) -> None:
    assert address_parts(address) == parts


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder and working directory whose SSH configuration hands host and user to a shell."""
    (tmp_path / ".ssh").mkdir(mode=0o700)
    config = tmp_path / ".ssh" / "config"
    config.write_text('Host *\n  ProxyCommand sh -c "echo started >> started; echo %h %r; false"\n')
    config.chmod(0o600)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ran(home: Path) -> set[str]:
    return {one.name for one in home.iterdir()} & {"started", "pwned"}


def test_the_proxy_command_does_run_for_a_host_that_is_one(home: Path) -> None:
    """Otherwise the tests below could not fail."""
    with pytest.raises(LaunchError, match="cannot be reached"):
        asyncio.run(connect("node1"))
    assert ran(home) == {"started"}


@pytest.mark.parametrize(
    "host", [EVIL[0], EVIL[1], EVIL[2], OPTIONS[0], "a,x`touch${IFS}pwned`", "a slots=8", "a=8", ""]
)
def test_no_command_takes_such_a_host_from_a_handle(host: str, home: Path) -> None:
    text = f"ssh://{quote(host, safe=',')}/fleet/runs/a"
    handle = parse_handle(text)
    with pytest.raises(LaunchError, match="which is not the address of a host"):
        backend_of(handle)
    with pytest.raises(LaunchError, match="which is not the address of a host"):
        launch_of(handle)
    assert not ran(home)


@pytest.mark.parametrize("place", ["fleet", "fleet@", "-x@us-west-2", "x`touch pwned`@us-west-2", "fleet@--profile=x"])
def test_a_handle_names_a_stack_and_its_region_and_nothing_else(place: str, home: Path) -> None:
    handle = parse_handle(f"ssh://stack={quote(place, safe='@')}/efs/runs/a")
    with pytest.raises(LaunchError, match="does not name a stack and its region"):
        backend_of(handle)
    assert not ran(home)


def test_the_handle_of_a_stack_reads_back() -> None:
    handle = JobHandle("ssh", "stack=fleet@us-west-2", "/efs/runs/a")
    assert str(handle) == "ssh://stack=fleet@us-west-2/efs/runs/a"
    launch = launch_of(parse_handle(str(handle)))
    assert (launch.stack, launch.region, launch.min_nodes) == ("fleet", "us-west-2", 1)


def test_neither_a_list_nor_a_file_nor_a_login_name_nor_a_connection_takes_them(home: Path) -> None:
    (home / "hosts").write_text("x`touch${IFS}pwned`\n")
    launches = [SshLaunch(hosts=(EVIL[1],)), SshLaunch(hosts_file="hosts"), SshLaunch(hosts=("a",), user=EVIL[0])]
    for launch in launches:
        with pytest.raises(LaunchError, match="is not the address of a host"):
            cluster_of(launch)
    for address in EVIL:
        with pytest.raises(LaunchError, match="is not the address of a host"):
            asyncio.run(connect(address))
    assert not ran(home)


@pytest.mark.parametrize("text", ["ssh://[x/runs/a", "ssh://a]/[b", "ssh://a%00b/c", "ssh://a/%00", "ssh://\udc80/a"])
def test_a_handle_that_is_no_url_is_an_error_with_a_remedy(text: str) -> None:
    with pytest.raises(LaunchError):
        backend_of(parse_handle(text))


@pytest.mark.parametrize("release", ["..%2Fsecrets", "r50%3Fforce=true", "r50%23", "R50", "-r", "r%0A"])
def test_an_eks_handle_names_a_release_and_nothing_else(release: str) -> None:
    with pytest.raises(LaunchError, match="names no job"):
        backend_of(parse_handle(f"eks://kubeflow/{release}"))


@pytest.mark.slow
def test_the_supervisor_starts_no_ssh_for_such_a_host(home: Path) -> None:
    ssh = [tool("ssh"), "-F", str(home / ".ssh" / "config"), "-oBatchMode=yes"]
    subprocess.run([*ssh, *ssh_target("node1"), "true"], capture_output=True, check=False)
    assert ran(home) == {"started"}
    (home / "started").unlink()
    for address in [*EVIL, *OPTIONS]:
        with pytest.raises(LaunchError, match="is not the address of a host"):
            subprocess.run([*ssh, *ssh_target(address), "true"], capture_output=True, check=False)
    assert not ran(home)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["ls", "fetch", "cp", "status", "logs", "explain", "cancel", "notebook"])
def test_every_command_refuses_such_a_handle(command: str, home: Path) -> None:
    handle = "ssh://x%60touch%24%7BIFS%7Dpwned%60/fleet/runs/a"
    arguments = [f"{handle}/log.txt", "."] if command == "cp" else [handle]
    argv = [sys.executable, "-m", "maskfleet", command, *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "400"})
    assert done.returncode == 2
    assert "is not the address of a host" in done.stderr
    assert "Traceback" not in done.stderr
    assert not ran(home)


def test_a_handle_printed_by_launch_reads_back() -> None:
    handle = JobHandle("ssh", "me@[fe80::1%eth0]:22,node2", "/fleet/runs/a")
    assert parse_handle(str(handle)) == handle
    assert [host.address for host in backend_of(handle).hosts] == ["me@[fe80::1%eth0]:22", "node2"]  # type: ignore[attr-defined]
