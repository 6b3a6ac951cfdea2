"""Nodes of the EC2 cluster set themselves up: their user data in a scratch root with a network of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import node_lab
import pytest
from cfn_template import PSEUDO, Stack, read_template
from node_lab import Node, boot

from maskfleet.system.deploy_files import deploy_path
from tools import tool

pytestmark = pytest.mark.slow

TEMPLATE = read_template(deploy_path("cloudformation") / "ec2-cluster.yaml")
HEAD, WORKER = "10.42.0.11", "10.42.0.12"
GIVEN = {"S3Bucket": "my-bucket", "KeyName": "me", "EfsId": "fs-0123456789abcdef0", "LustreStorageGiB": 1200}
NFS = "nfsvers=4.1,rsize=1048576,wsize=1048576,hard,timeo=600,retrans=2,noresvport,_netdev"
EFS = "fs-0123456789abcdef0.efs.us-west-2.amazonaws.com:/"


def user_data(role: str, **parameters: Any) -> str:
    stack = Stack(TEMPLATE, **{**GIVEN, **parameters})
    assert stack.refusals() == []
    text = stack.properties(f"{role}Template")["LaunchTemplateData"]["UserData"]
    assert isinstance(text, str)
    return text


def lab(folder: Path, *nodes: Node, refused: Mapping[str, list[str]] | None = None) -> dict[str, Any]:
    reason = node_lab.why_not()
    if reason is not None:
        pytest.skip(f"nodes in namespaces: {reason}")
    (folder / "roots").mkdir()
    return boot(folder, list(nodes), tool("aws"), refused or {})


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A head node and a worker that have booted, and what each says about the other."""
    look = "ssh -o BatchMode=yes -o StrictHostKeyChecking=yes {} 'echo from $SSH_CONNECTION'"
    again = "touch -d '5 minutes ago' /efs/.maskfleet/fleet/hosts/10.42.0.99; cluster-hosts"
    write = f"echo '{WORKER} slots=4' >/efs/.maskfleet/fleet/hosts/{WORKER}"
    return lab(
        tmp_path_factory.mktemp("cluster"),
        Node(HEAD, user_data("Head"), [look.format(WORKER), write, again]),
        Node(WORKER, user_data("Worker"), [look.format(HEAD), "touch /efs/maskfleet/mine /fsx/mine"]),
    )


def test_nodes_report_after_everything_is_done(cluster: dict[str, Any]) -> None:
    for node in cluster["nodes"].values():
        assert node["code"] == 0, node["output"]
    calls = [{key: value for key, value in call.items() if key != "Version"} for call in cluster["calls"]]
    expected = []
    for address, role, group in ((HEAD, "head", "HeadGroup"), (WORKER, "worker", "WorkerGroup")):
        name = f"i-{address}"
        stack = PSEUDO["AWS::StackId"]
        signal = {"StackName": stack, "LogicalResourceId": group, "UniqueId": name, "Status": "SUCCESS"}
        hook = {"LifecycleHookName": "ready", "AutoScalingGroupName": f"fleet-{role}", "InstanceId": name}
        expected += [
            {"Action": "SignalResource", **signal},
            {"Action": "CompleteLifecycleAction", **hook, "LifecycleActionResult": "CONTINUE"},
        ]
    assert calls == expected


def test_file_systems_are_mounted_now_and_after_a_reboot(cluster: dict[str, Any]) -> None:
    for node in cluster["nodes"].values():
        files = node["files"]
        lustre = "<Lustre.DNSName>@tcp:/<Lustre.LustreMountName>"
        assert files["mounts"].splitlines() == [f"nfs4 {EFS} {NFS}", f"lustre {lustre} relatime,flock,_netdev"]
        assert files["etc/fstab"].splitlines()[1:] == [
            f"{EFS} /efs nfs4 {NFS} 0 0",
            f"{lustre} /fsx lustre relatime,flock,_netdev 0 0",
        ]
        assert "gave up" not in node["output"]
        assert "Failed to resolve server" in node["output"]  # it was tried again
        packages = files["packages"]
        assert "install -y --no-install-recommends nfs-common" in packages
        assert "install -y --no-install-recommends lustre-client-modules-" in packages


def test_nodes_log_in_to_each_other_and_know_each_other(cluster: dict[str, Any]) -> None:
    head, worker = cluster["nodes"][HEAD]["said"], cluster["nodes"][WORKER]["said"]
    for code, text in (head[0], worker[0]):
        assert code == 0, text
        assert text.startswith("from 10.42.0.")
    assert "10.42.0.12 22" in head[0][1]
    assert "10.42.0.11 22" in worker[0][1]
    assert worker[1] == [0, ""]  # the login user writes to both file systems
    code, listed = head[2]
    assert code == 0
    assert listed == f"{WORKER} slots=4\n"  # not the host that reported 5 minutes ago


def test_only_the_login_user_reads_the_key(cluster: dict[str, Any]) -> None:
    listed = {line.split()[0]: line.split()[1:] for line in cluster["nodes"][WORKER]["efs"]}
    assert listed["/efs/.maskfleet/fleet"] == ["drwx------", "ubuntu"]
    assert listed["/efs/.maskfleet/fleet/key"] == ["-rw-------", "ubuntu"]
    assert listed["/efs/maskfleet"] == ["drwxrwxr-x", "ubuntu"]
    assert not any("new." in name for name in listed)


def test_the_health_report_is_started(cluster: dict[str, Any]) -> None:
    files = cluster["nodes"][WORKER]["files"]
    assert files["units"].splitlines() == ["daemon-reload", "enable --now maskfleet-health.timer"]
    assert f"HOST_FILE=/efs/.maskfleet/fleet/hosts/{WORKER}\n" in files["etc/maskfleet/node.env"]
    assert "GPUS=4\n" in files["etc/maskfleet/node.env"]


def test_a_node_that_fails_is_given_up_and_only_the_head_node_fails_the_stack(tmp_path: Path) -> None:
    nobody = {"LoginUser": "nobody-here", "LustreStorageGiB": 0}
    found = lab(tmp_path, Node(HEAD, user_data("Head", **nobody)), Node(WORKER, user_data("Worker", **nobody)))
    assert all(node["code"] != 0 for node in found["nodes"].values())
    calls = [(call["Action"], call.get("Status") or call["LifecycleActionResult"]) for call in found["calls"]]
    assert calls == [
        ("SignalResource", "FAILURE"),
        ("CompleteLifecycleAction", "ABANDON"),
        ("CompleteLifecycleAction", "ABANDON"),
    ]
    for node in found["nodes"].values():
        assert "setting up this node failed" in node["output"]


@pytest.mark.parametrize(("code", "tries"), [("Throttling", 3), ("ValidationError", 1)])
def test_a_report_is_repeated_unless_nobody_waits_for_it(tmp_path: Path, code: str, tries: int) -> None:
    # An instance whose lifecycle hook hears nothing is terminated, although it is ready.
    actions = ["SignalResource", "CompleteLifecycleAction"]
    refused = {action: [code, code] for action in actions}
    found = lab(tmp_path, Node(HEAD, user_data("Head", LustreStorageGiB=0)), refused=refused)
    [node] = found["nodes"].values()
    assert node["code"] == 0, node["output"]
    assert [call["Action"] for call in found["calls"]] == [action for action in actions for _ in range(tries)]
    assert f"({code})" in node["output"]
