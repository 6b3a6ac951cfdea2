"""The notebook chart: what it renders from valid values."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from notebook_release import CHART, GOOD, HASH, IMAGE, container, one, pod_of, render
from ruamel.yaml import YAML

from maskfleet.system.deploy_files import deploy_path
from maskfleet.system.kube.fake import FakeKube
from pairwise import pairwise
from tools import run_tool, try_tool

LOGINS: tuple[dict[str, Any], ...] = ({"htpasswd": HASH}, {"existing_secret": "our-login"})
CERTIFICATES: tuple[dict[str, Any], ...] = (
    {},
    {"tls": {"existing_secret": "our-tls"}},
    {"tls": {"issuer": "letters", "issuer_kind": "ClusterIssuer", "hosts": ["nb.example.org", "10.0.0.9"]}},
)
REACHED: tuple[dict[str, Any], ...] = (
    {},
    {"source_cidr": "203.0.113.7/32"},
    {"source_cidr": ["10.0.0.0/8", "2001:db8::/32"], "load_balancer_scheme": "internal"},
)
NODES_AND_VOLUMES: tuple[dict[str, Any], ...] = (
    {},
    {"gpu_instance_type": "g5.xlarge", "tolerations": [{"key": "team", "operator": "Exists"}]},
    {"work_dir": "notebooks/ann", "shared_fs": "efs", "shared_pvc": "pv-efs", "node_selector": {"disk": "fast"}},
    {"data_fs": "data", "data_pvc": "pv-data", "allow_egress": True, "log_dir": "logs/r50-1x"},
)
COMBINATIONS = [
    {"image": IMAGE, **login, **certificate, **reached, **nodes}
    for login, certificate, reached, nodes in pairwise(LOGINS, CERTIFICATES, REACHED, NODES_AND_VOLUMES)
]


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    folder = tmp_path_factory.mktemp("combinations")
    return [(values, render(folder, values)) for values in COMBINATIONS]


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return render(tmp_path_factory.mktemp("default"), GOOD)


def test_helm_lint_passes(tmp_path: Path) -> None:
    done = run_tool("helm", "lint", CHART, "--strict", "--set", f"image={IMAGE}", "--set", f"htpasswd={HASH}")
    assert "0 chart(s) failed" in done


def test_every_two_choices_together_render_valid_objects(rendered: Any, tmp_path: Path) -> None:
    files = []
    for number, (_, objects) in enumerate(rendered):
        file = tmp_path / f"{number}.yaml"
        with file.open("w") as stream:
            YAML(typ="safe").dump_all([item for item in objects if item["kind"] != "Certificate"], stream)
        files.append(file)
    run_tool("kubernetes-validate", "--strict", "--quiet", "--kubernetes-version", "1.35", *files)


def test_every_pod_is_restricted(rendered: Any) -> None:
    for _, objects in rendered:
        pod = pod_of(objects)
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 1000
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert all(
            volume.keys() <= {"name", "configMap", "secret", "emptyDir", "persistentVolumeClaim"}
            for volume in pod["volumes"]
        )
        for part in [*pod["initContainers"], *pod["containers"]]:
            assert part["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "runAsNonRoot": True,
                "capabilities": {"drop": ["ALL"]},
                "seccompProfile": {"type": "RuntimeDefault"},
            }
            assert part["resources"]["requests"].keys() >= {"cpu", "memory"}
            assert part["resources"]["limits"].keys() >= {"cpu", "memory"}
        for part in pod["containers"]:
            assert {"readinessProbe", "livenessProbe"} <= part.keys()


def test_every_object_and_selector_belongs_to_its_release_alone(rendered: Any, tmp_path: Path) -> None:
    for _, objects in rendered:
        for item in objects:
            assert item["metadata"]["name"].startswith("r50-notebook")
            assert item["metadata"]["namespace"] == "kubeflow"
            assert item["metadata"]["labels"]["app.kubernetes.io/instance"] == "r50-notebook"
            assert item["metadata"]["labels"]["app.kubernetes.io/part-of"] == "maskfleet"
    other = render(tmp_path, GOOD, name="r101-notebook")
    theirs = {(item["kind"], item["metadata"]["name"]) for item in other}
    ours = {(item["kind"], item["metadata"]["name"]) for item in rendered[0][1]}
    assert not ours & theirs
    pod_labels = one(other, "Deployment")["spec"]["template"]["metadata"]["labels"]
    wanted = one(rendered[0][1], "Service")["spec"]["selector"]
    assert any(pod_labels[key] != value for key, value in wanted.items())


def test_by_default_nothing_is_public(default: list[dict[str, Any]]) -> None:
    service = one(default, "Service")
    assert service["spec"]["type"] == "ClusterIP"
    assert "annotations" not in service["metadata"]
    text = json.dumps(default)
    assert "LoadBalancer" not in text
    assert "0.0.0.0" not in text
    assert "::/0" not in text
    policy = one(default, "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["ingress"] == [{"ports": [{"port": 8443, "protocol": "TCP"}]}]
    assert "egress" not in policy
    assert [port for part in pod_of(default)["containers"] for port in part.get("ports", [])] == [
        {"name": "https", "containerPort": 8443, "protocol": "TCP"}
    ]


def test_a_load_balancer_needs_a_source_and_accepts_only_that(tmp_path: Path) -> None:
    service = one(render(tmp_path, {**GOOD, "source_cidr": "203.0.113.7/32"}), "Service")
    assert service["spec"]["type"] == "LoadBalancer"
    assert service["spec"]["loadBalancerSourceRanges"] == ["203.0.113.7/32"]
    notes = service["metadata"]["annotations"]
    prefix = "service.beta.kubernetes.io/aws-load-balancer-"
    assert notes[f"{prefix}type"] == "external"
    assert notes[f"{prefix}nlb-target-type"] == "ip"
    # Behind such a load balancer nginx sees no client's address (W-C14), so it must not filter by one.
    config = one(render(tmp_path, {**GOOD, "source_cidr": "203.0.113.7/32"}), "ConfigMap", "r50-notebook-proxy")
    assert not re.search(r"^\s*(allow|deny)\b", config["data"]["nginx.conf"], re.MULTILINE)


def test_the_hash_is_in_a_secret_and_nowhere_else(default: list[dict[str, Any]]) -> None:
    secret = one(default, "Secret", "r50-notebook-login")
    assert base64.b64decode(secret["data"]["htpasswd"]).decode() == f"fleet:{HASH}\n"
    rest = [item for item in default if item is not secret]
    assert HASH not in json.dumps(rest)
    assert HASH not in base64.b64encode(json.dumps(rest).encode()).decode()


def test_the_key_is_in_a_secret_that_only_the_proxy_mounts(default: list[dict[str, Any]]) -> None:
    assert "PRIVATE KEY" in base64.b64decode(one(default, "Secret", "r50-notebook-tls")["data"]["tls.key"]).decode()
    for part in pod_of(default)["containers"]:
        mounted = {mount["name"] for mount in part["volumeMounts"]}
        assert ({"tls", "login"} <= mounted) == (part["name"] == "proxy")
        assert (not {"tls", "login"} & mounted) == (part["name"] != "proxy")


def test_with_a_certificate_of_the_user_none_is_generated(tmp_path: Path) -> None:
    objects = render(tmp_path, {**GOOD, "tls": {"existing_secret": "our-tls"}})
    assert [item["metadata"]["name"] for item in objects if item["kind"] == "Secret"] == ["r50-notebook-login"]
    [volume] = [item for item in pod_of(objects)["volumes"] if item["name"] == "tls"]
    assert volume["secret"]["secretName"] == "our-tls"
    assert "Strict-Transport-Security" in one(objects, "ConfigMap", "r50-notebook-proxy")["data"]["nginx.conf"]


def test_an_issuer_gets_only_the_names_in_the_values(tmp_path: Path) -> None:
    tls = {"issuer": "letters", "hosts": ["nb.example.org", "10.0.0.9"]}
    spec = one(render(tmp_path, {**GOOD, "tls": tls}), "Certificate")["spec"]
    assert spec["secretName"] == "r50-notebook-tls"
    assert spec["issuerRef"] == {"name": "letters", "kind": "Issuer", "group": "cert-manager.io"}
    assert (spec["dnsNames"], spec["ipAddresses"]) == (["nb.example.org"], ["10.0.0.9"])


def test_jupyter_needs_no_password_but_is_reachable_only_by_the_proxy(default: list[dict[str, Any]]) -> None:
    config = json.loads(one(default, "ConfigMap", "r50-notebook-jupyter")["data"]["jupyter_server_config.json"])
    assert config["IdentityProvider"]["token"] == ""
    assert config["ServerApp"]["sock"] == "/run/maskfleet/jupyter/jupyter.sock"
    assert config["ServerApp"]["sock_mode"] == "0600"
    assert not {"ip", "port", "disable_check_xsrf", "allow_origin"} & config["ServerApp"].keys()
    command = container(default, "tensorboard")["command"]
    assert command[command.index("--host") + 1] == "127.0.0.1"


def test_the_volume_is_read_only_but_for_the_work_folder(tmp_path: Path) -> None:
    def mounts(values: dict[str, Any], part: str) -> dict[str, dict[str, Any]]:
        return {mount["mountPath"]: mount for mount in container(render(tmp_path, values), part)["volumeMounts"]}

    plain = mounts({**GOOD}, "jupyter")
    assert plain["/fsx"]["readOnly"] is True
    assert plain["/work"]["name"] == "work"
    kept = mounts({**GOOD, "work_dir": "notebooks/ann"}, "jupyter")
    assert kept["/fsx"]["readOnly"] is True
    assert kept["/work"] == {"name": "shared", "mountPath": "/work", "subPath": "notebooks/ann"}
    assert mounts({**GOOD, "work_dir": "notebooks/ann"}, "tensorboard")["/fsx"]["readOnly"] is True


def test_a_gpu_is_requested_only_with_an_instance_type(tmp_path: Path, default: list[dict[str, Any]]) -> None:
    assert "nvidia" not in json.dumps(default)
    assert "nodeSelector" not in pod_of(default)
    objects = render(tmp_path, {**GOOD, "gpu_instance_type": "g5.xlarge"})
    assert pod_of(objects)["nodeSelector"] == {"node.kubernetes.io/instance-type": "g5.xlarge"}
    assert container(objects, "jupyter")["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert pod_of(objects)["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]


def test_another_password_restarts_the_pod(tmp_path: Path, default: list[dict[str, Any]]) -> None:
    other = render(tmp_path, {**GOOD, "htpasswd": HASH[:-1] + "e"})
    same = render(tmp_path, GOOD)
    pods = [one(objects, "Deployment")["spec"]["template"] for objects in (default, same, other)]
    assert pods[0] == pods[1]
    assert pods[0] != pods[2]


def test_every_value_is_in_the_schema_and_in_the_docs() -> None:
    values = YAML(typ="safe").load(CHART / "values.yaml")
    schema = json.loads((CHART / "values.schema.json").read_text())
    page = (CHART.parents[2] / "docs" / "run-anywhere" / "eks" / "notebook.md").read_text()

    def walk(values: dict[str, Any], schema: dict[str, Any], prefix: str = "") -> None:
        assert values.keys() == schema["properties"].keys() - {"global"}
        for key, value in values.items():
            if isinstance(value, dict) and value:
                walk(value, schema["properties"][key], f"{prefix}{key}.")
            else:
                assert f"`{prefix}{key}`" in page, f"{prefix}{key} is not in docs/run-anywhere/eks/notebook.md"

    walk(values, schema)


CHECKOV_SKIPS = {
    "CKV_K8S_40": "uid 1000 is the owner of the run folders on the shared volume",
}


@pytest.mark.slow
def test_checkov_finds_nothing_but_skips_with_a_reason(default: list[dict[str, Any]], tmp_path: Path) -> None:
    with (tmp_path / "chart.yaml").open("w") as stream:
        YAML(typ="safe").dump_all(default, stream)
    done = try_tool(
        "checkov",
        *("--framework", "kubernetes", "--file", str(tmp_path / "chart.yaml"), "--output", "json"),
        *("--skip-download", "--compact", "--quiet", "--skip-check", ",".join(CHECKOV_SKIPS)),
    )
    report = json.loads(done.stdout)
    failed = [
        f"{item['check_id']} {item['check_name']} {item['resource']}" for item in report["results"]["failed_checks"]
    ]
    assert not failed
    assert report["summary"]["passed"] > 50


def test_scripts_pass_shellcheck() -> None:
    run_tool("shellcheck", *sorted((CHART / "files").glob("*.sh")))


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKube]:
    """An API with as much as helm asks before it renders."""
    with FakeKube(tmp_path) as api:
        api.objects["/api"] = {"kind": "APIVersions", "versions": ["v1"]}
        api.objects["/apis"] = {"kind": "APIGroupList", "apiVersion": "v1", "groups": []}
        secrets = {"name": "secrets", "singularName": "secret", "namespaced": True, "kind": "Secret", "verbs": ["get"]}
        api.objects["/api/v1"] = {"kind": "APIResourceList", "groupVersion": "v1", "resources": [secrets]}
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig))
        yield api


def test_an_upgrade_keeps_the_certificate_until_its_names_change_or_it_is_old(
    tmp_path: Path, cluster: FakeKube
) -> None:
    def secret(**values: Any) -> dict[str, Any]:
        return one(render(tmp_path, {**GOOD, **values}, "--dry-run=server"), "Secret", "r50-notebook-tls")

    first = secret()
    assert secret()["data"] != first["data"]
    cluster.objects["/api/v1/namespaces/kubeflow/secrets/r50-notebook-tls"] = first
    assert secret() == first
    assert secret(log_dir="logs/other") == first
    assert secret(tls={"hosts": ["nb.example.org"]})["data"] != first["data"]
    notes = first["metadata"]["annotations"]
    notes["maskfleet/made-at"] = str(int(notes["maskfleet/made-at"]) - 301 * 86400)
    renewed = secret()
    assert renewed["data"] != first["data"]
    assert int(renewed["metadata"]["annotations"]["maskfleet/made-at"]) > int(notes["maskfleet/made-at"])


def test_the_self_signed_certificate_is_for_loopback_the_service_and_the_hosts(tmp_path: Path) -> None:
    data = one(
        render(tmp_path, {**GOOD, "tls": {"hosts": ["nb.example.org", "10.0.0.9"]}}), "Secret", "r50-notebook-tls"
    )
    (tmp_path / "crt").write_bytes(base64.b64decode(data["data"]["tls.crt"]))
    (tmp_path / "ca").write_bytes(base64.b64decode(data["data"]["ca.crt"]))
    shown = run_tool("openssl", "x509", "-in", tmp_path / "crt", "-noout", "-ext", "subjectAltName")
    named = set(re.findall(r"(?:DNS|IP Address):(\S+?)(?:,|$)", shown.splitlines()[-1].strip()))
    service = {"r50-notebook", "r50-notebook.kubeflow.svc"}
    assert named == {"localhost", "127.0.0.1", "nb.example.org", "10.0.0.9"} | service
    run_tool("openssl", "verify", "-CAfile", tmp_path / "ca", tmp_path / "crt")


DOCKERFILE = deploy_path("docker", "notebook", "Dockerfile")


@pytest.mark.slow
def test_the_dockerfile_passes_hadolint_and_checkov() -> None:
    run_tool("hadolint", DOCKERFILE)
    options = ("--framework", "dockerfile", "--output", "json", "--skip-download", "--compact")
    report = json.loads(run_tool("checkov", *options, "--file", DOCKERFILE))
    assert report["summary"]["failed"] == 0
    assert {item["check_id"] for item in report["results"]["skipped_checks"]} == {"CKV_DOCKER_2", "CKV_DOCKER_7"}


def test_the_image_has_the_notebooks_where_the_pod_looks_for_them() -> None:
    assert "COPY notebooks/*.ipynb /opt/maskfleet/notebooks/" in DOCKERFILE.read_text()
    assert "/opt/maskfleet/notebooks/*.ipynb" in (CHART / "files" / "prepare.sh").read_text()
