"""Pods of the train chart: the restricted profile and checkov."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from train_release import main_container, one, operator_pod, render

from tools import run_tool, try_tool

VARIANTS: tuple[Mapping[str, Any], ...] = (
    {},
    {"run_yaml": "recipe: demo\n", "data_fs": "efs", "data_pvc": "pv-efs", "service_account": "trainer"},
    {"gpu_instance_type": "", "gpus_per_node": 0, "cpus_per_node": 1, "memory_gib_per_node": 2, "queue": "q"},
)
# Volume types that the restricted profile allows.
VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
SKIPPED = {
    "CKV_K8S_40": "the user of the image is 1000; files on the shared volumes belong to it",
    "CKV_K8S_9": "nobody sends traffic to the launcher; workers have a readiness probe",
}


def breaches(pod: Mapping[str, Any]) -> list[str]:
    """Rules of the restricted Pod Security profile (Kubernetes 1.35) that `pod` breaks."""
    spec = pod["spec"]
    context = spec.get("securityContext", {})
    found = [name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    found += [f"volume {v['name']}" for v in spec.get("volumes", []) if not VOLUMES & (v.keys() - {"name"})]
    found += ["sysctls"] * bool(context.get("sysctls"))
    found += ["hostProcess"] * bool(context.get("windowsOptions"))
    found += ["appArmor"] * any("apparmor" in key for key in pod["metadata"].get("annotations", {}))
    for container in [*spec.get("initContainers", []), *spec["containers"], *spec.get("ephemeralContainers", [])]:
        own = {**context, **container.get("securityContext", {})}
        rules = {
            "privileged": not own.get("privileged"),
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is False,
            "runAsNonRoot": own.get("runAsNonRoot") is True,
            "runAsUser": own.get("runAsUser") != 0,
            "seccomp": own.get("seccompProfile", {}).get("type") in ("RuntimeDefault", "Localhost"),
            "drop": own.get("capabilities", {}).get("drop") == ["ALL"],
            "add": set(own.get("capabilities", {}).get("add", [])) <= {"NET_BIND_SERVICE"},
            "procMount": own.get("procMount", "Default") == "Default",
            "seLinux": "seLinuxOptions" not in own,
            "hostPort": not any(port.get("hostPort") for port in container.get("ports", [])),
            "probeHost": '"host"'
            not in json.dumps(
                {key: value for key, value in container.items() if key.endswith("Probe") or key == "lifecycle"}
            ),
        }
        found += [f"{container['name']}: {rule}" for rule, is_kept in rules.items() if not is_kept]
    return found


@pytest.mark.parametrize("values", VARIANTS)
@pytest.mark.parametrize("role", ["Launcher", "Worker"])
def test_every_pod_meets_the_restricted_profile(tmp_path: Path, values: Mapping[str, Any], role: str) -> None:
    pod = operator_pod(render(tmp_path, values), role)
    assert breaches(pod) == []
    for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["runAsUser"] == 1000
    assert pod["spec"]["automountServiceAccountToken"] is False


def test_the_rules_above_find_each_violation(tmp_path: Path) -> None:
    pod = operator_pod(render(tmp_path, {}), "Launcher")
    pod["spec"] |= {"hostPID": True, "securityContext": {"sysctls": [{"name": "a", "value": "b"}]}}
    pod["spec"]["volumes"].append({"name": "node", "hostPath": {"path": "/"}})
    pod["spec"]["initContainers"][0]["securityContext"] = {"capabilities": {"add": ["SYS_ADMIN"]}, "privileged": True}
    pod["spec"]["containers"][0]["ports"] = [{"containerPort": 1, "hostPort": 1}]
    found = breaches(pod)
    init = [
        f"wait-for-workers: {rule}" for rule in ("privileged", "allowPrivilegeEscalation", "runAsNonRoot", "seccomp")
    ]
    assert {"hostPID", "sysctls", "volume node", "launcher: hostPort", "wait-for-workers: add", *init} <= set(found)


@pytest.mark.slow
def test_checkov_finds_nothing_but_skips_with_a_reason(tmp_path: Path) -> None:
    folder = tmp_path / "objects"
    folder.mkdir()
    for number, values in enumerate(VARIANTS):
        objects = render(tmp_path, values)
        pods = [operator_pod(objects, role) for role in ("Launcher", "Worker")]
        for item in [*(part for part in objects if part["kind"] != "MPIJob"), *pods]:
            (folder / f"{number}-{item['kind']}-{item['metadata']['name']}.json").write_text(json.dumps(item))
    options = ["--framework", "kubernetes", "--skip-download", "--download-external-modules", "false"]
    options += ["--output", "json", "--quiet", "--compact"]
    report = json.loads(try_tool("checkov", "--directory", folder, *options).stdout)
    assert report["summary"]["passed"] > 300
    failed = {check["check_id"] for check in report["results"]["failed_checks"]}
    assert failed == set(SKIPPED)
    readiness = [c["resource"] for c in report["results"]["failed_checks"] if c["check_id"] == "CKV_K8S_9"]
    assert readiness
    assert all("launcher" in resource for resource in readiness)


def test_no_secret_and_no_shell_is_in_any_object(tmp_path: Path) -> None:
    objects = render(tmp_path, {})
    assert {item["kind"] for item in objects}.isdisjoint({"Secret", "Role", "RoleBinding", "ClusterRole", "Service"})
    for role in ("Launcher", "Worker"):
        commands = [
            main_container(objects, role)["command"],
            main_container(objects, role)["lifecycle"]["preStop"]["exec"]["command"],
        ]
        for command in commands:
            assert not {"sh", "bash", "/bin/sh", "/bin/bash", "-c"} & set(command)


def test_sshd_accepts_the_charts_configuration_and_only_the_key(tmp_path: Path) -> None:
    files = one(render(tmp_path, {}), "ConfigMap", "r50-files")["data"]
    key = tmp_path / "key"
    run_tool("ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-f", key)
    configuration = tmp_path / "sshd_config"
    configuration.write_text(files["sshd_config"].replace("/home/fleet/.ssh/id_rsa", str(key)))
    said = try_tool("/usr/sbin/sshd", "-T", "-f", configuration)
    if "Missing privilege separation directory" in said.stderr:
        pytest.skip("sshd -T as root needs /run/sshd")
    assert said.returncode == 0, said.stderr
    options = dict(line.split(" ", 1) for line in said.stdout.splitlines() if " " in line)
    expected = {
        "port": "2222", "allowusers": "fleet", "permitrootlogin": "no", "passwordauthentication": "no",
        "kbdinteractiveauthentication": "no", "pubkeyauthentication": "yes", "authenticationmethods": "publickey",
        "permittty": "no", "allowtcpforwarding": "no", "allowagentforwarding": "no", "x11forwarding": "no",
        "permittunnel": "no", "permituserenvironment": "no", "permituserrc": "no", "usepam": "no",
    }  # fmt: skip
    assert {name: options[name] for name in expected} == expected
    client = tmp_path / "ssh_config"
    client.write_text(files["ssh_config"])
    said = try_tool("ssh", "-G", "-F", client, "r50-worker-0.r50.kubeflow.svc")
    assert said.returncode == 0, said.stderr
    for line in ("stricthostkeychecking true", "batchmode yes", "port 2222", "user fleet", "identitiesonly yes"):
        assert line in said.stdout.splitlines()
