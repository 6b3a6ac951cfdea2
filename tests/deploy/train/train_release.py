"""The train chart as helm renders it, and the pods that mpi-operator 0.8 creates from its MPIJob."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
from ruamel.yaml import YAML

from maskfleet.system.deploy_files import deploy_path
from tools import tool, try_tool

CHART = deploy_path("helm", "train")
IMAGE = "registry.example/maskfleet-train@sha256:" + "ab" * 32
NAMESPACE = "kubeflow"


def try_render(folder: Path, values: Mapping[str, Any], *, name: str = "r50") -> subprocess.CompletedProcess[str]:
    """`helm template` with `values`, however it ends."""
    file = folder / "values.json"
    file.write_text(json.dumps({"image": IMAGE, **values}), encoding="utf-8")
    return try_tool("helm", "template", name, CHART, "--namespace", NAMESPACE, "--values", file)


def parsed(text: str) -> list[dict[str, Any]]:
    return [item for item in YAML(typ="safe", pure=True).load_all(text) if item]


def render(folder: Path, values: Mapping[str, Any], *, name: str = "r50") -> list[dict[str, Any]]:
    """The objects that helm makes of good `values`."""
    done = try_render(folder, values, name=name)
    assert done.returncode == 0, done.stderr
    return parsed(done.stdout)


def one(objects: Sequence[dict[str, Any]], kind: str, name: str | None = None) -> dict[str, Any]:
    """The only object of that kind, and name where it is given."""
    [found] = [item for item in objects if item["kind"] == kind and name in (None, item["metadata"]["name"])]
    return found


def replica(objects: Sequence[dict[str, Any]], role: str) -> dict[str, Any]:
    """The replica spec `Launcher` or `Worker` of the MPIJob."""
    found: dict[str, Any] = one(objects, "MPIJob")["spec"]["mpiReplicaSpecs"][role]
    return found


def main_container(objects: Sequence[dict[str, Any]], role: str) -> dict[str, Any]:
    found: dict[str, Any] = replica(objects, role)["template"]["spec"]["containers"][0]
    return found


def operator_pod(objects: Sequence[dict[str, Any]], role: str) -> dict[str, Any]:
    """The pod that the operator creates from a replica spec: with the job's SSH secret, hostfile and environment."""
    job = one(objects, "MPIJob")
    name = job["metadata"]["name"]
    template = copy.deepcopy(replica(objects, role)["template"])
    spec, labels = template["spec"], template["metadata"]["labels"]
    labels |= {
        "training.kubeflow.org/operator-name": "mpi-operator",
        "training.kubeflow.org/job-name": name,
        "training.kubeflow.org/job-role": role.lower(),
    }
    pod_name = f"{name}-launcher" if role == "Launcher" else f"{name}-worker-0"
    spec |= {"hostname": pod_name, "subdomain": name, "restartPolicy": replica(objects, role)["restartPolicy"]}
    container = spec["containers"][0]
    container.setdefault("env", []).append({"name": "K_MPI_JOB_ROLE", "value": role.lower()})
    keys = [("ssh-privatekey", "id_rsa"), ("ssh-publickey", "id_rsa.pub"), ("ssh-publickey", "authorized_keys")]
    secret = {"secretName": f"{name}-ssh", "items": [{"key": key, "path": path} for key, path in keys]}
    spec["volumes"].append({"name": "ssh-auth", "secret": secret})
    container["volumeMounts"].append({"name": "ssh-auth", "mountPath": job["spec"]["sshAuthMountPath"]})
    if role == "Launcher":
        container["env"] += [{"name": key, "value": value} for key, value in operator_env(job).items()]
        items = [{"key": "hostfile", "path": "hostfile", "mode": 0o444}]
        spec["volumes"].append({"name": "mpi-job-config", "configMap": {"name": f"{name}-config", "items": items}})
        container["volumeMounts"].append({"name": "mpi-job-config", "mountPath": "/etc/mpi"})
    metadata = {**template["metadata"], "name": pod_name, "namespace": job["metadata"]["namespace"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def operator_env(job: Mapping[str, Any]) -> dict[str, str]:
    """Variables that the operator appends to the launcher's environment, so they override ours."""
    return {
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
        "OMPI_MCA_orte_set_default_slots": str(job["spec"]["slotsPerWorker"]),
        "NVIDIA_VISIBLE_DEVICES": "",
        "NVIDIA_DRIVER_CAPABILITIES": "",
    }


def hostfile(job: Mapping[str, Any]) -> str:
    """As the operator writes it."""
    name, spec = job["metadata"]["name"], job["spec"]
    workers = range(spec["mpiReplicaSpecs"]["Worker"]["replicas"])
    suffix = f"{name}.{job['metadata']['namespace']}.svc slots={spec['slotsPerWorker']}\n"
    return "".join(f"{name}-worker-{index}.{suffix}" for index in workers)


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """`text` after the kubelet: $(NAME) is the variable, if there is one, and $$ is $."""

    def replacement(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replacement, text)


def environment(container: Mapping[str, Any]) -> dict[str, str]:
    """The container's variables as its process sees them; of two with one name the last counts."""
    found: dict[str, str] = {}
    for variable in container.get("env", []):
        found[variable["name"]] = expanded(variable.get("value", ""), found)
    return found


def argv(container: Mapping[str, Any]) -> list[str]:
    """The container's command as its process sees it."""
    return [expanded(text, environment(container)) for text in container["command"]]


def rank_argv(objects: Sequence[dict[str, Any]]) -> list[str]:
    """The trainer's command at the end of mpirun's."""
    command = argv(main_container(objects, "Launcher"))
    return command[command.index("rank") + 1 :]


def settings(objects: Sequence[dict[str, Any]]) -> list[str]:
    """All values of --set, in order."""
    command = rank_argv(objects)
    return [value for option, value in itertools.pairwise(command) if option == "--set"]


def render_all(folder: Path, all_values: Sequence[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
    """`render` for many values, with several helm processes at a time and a fast parser."""

    def text(numbered: tuple[int, Mapping[str, Any]]) -> str:
        index, values = numbered
        file = folder / f"{index}.json"
        file.write_text(json.dumps({"image": IMAGE, **values}), encoding="utf-8")
        done = try_tool("helm", "template", "r50", CHART, "--namespace", NAMESPACE, "--values", file)
        assert done.returncode == 0, f"{values}\n{done.stderr}"
        return done.stdout

    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(text, enumerate(all_values)))
    python = str(Path(tool("kubernetes-validate")).with_name("python"))  # has libyaml, which is many times faster
    program = (
        "import json, sys, yaml\n"
        "json.dump([[one for one in yaml.load_all(text, yaml.CSafeLoader) if one] for text in json.load(sys.stdin)],"
        " sys.stdout)"
    )
    done = subprocess.run(
        [python, "-I", "-c", program], input=json.dumps(texts), capture_output=True, text=True, check=True, timeout=300
    )
    found: list[list[dict[str, Any]]] = json.loads(done.stdout)
    return found


def crd_problems(job: Mapping[str, Any]) -> list[str]:
    """Errors of an MPIJob against the schema of mpi-operator 0.8.2; unknown fields are errors too."""
    return [f"{error.json_path}: {error.message}" for error in _crd().iter_errors(job)]


@functools.cache
def _crd() -> jsonschema.Draft202012Validator:
    file = Path(__file__).parents[1] / "crds" / "mpijob-v2beta1.schema.json"
    return jsonschema.Draft202012Validator(_closed(json.loads(file.read_text(encoding="utf-8"))))


def _closed(schema: Any) -> Any:
    """An OpenAPI schema as JSON Schema that rejects fields the API server would silently drop."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    result = {}
    for key, value in schema.items():
        result[key] = {name: _closed(one) for name, one in value.items()} if key == "properties" else _closed(value)
    if schema.get("properties") and "additionalProperties" not in schema:
        result["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    if result.get("type") == "object" and "properties" not in result and "additionalProperties" not in result:
        result["additionalProperties"] = True
    return result
