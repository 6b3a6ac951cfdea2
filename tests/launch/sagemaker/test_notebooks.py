"""The notebooks for SageMaker, executed by nbclient against moto and real training in the place of its jobs."""

from __future__ import annotations

import ast
import base64
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from training_service import MOUNT_NAME, TrainingService, served

from maskfleet.config.recipes import recipe
from maskfleet.data.stage.stage import stage
from maskfleet.launch.sagemaker.logs import GROUP
from maskfleet.launch.sagemaker.services import Services
from maskfleet.launch.sagemaker.stack import STACK_VARIABLE
from maskfleet.system.deploy_files import deploy_path, notebooks_path
from maskfleet.training.output.metrics import read_metrics
from micro_run import MICRO
from tools import ROOT, moto_server

REGION = "us-west-2"
FOLDER = notebooks_path() / "sagemaker"
NAMES = ("compare_trials", "train_s3_or_efs", "train_s3_or_fsx")
SETTINGS = {
    **MICRO,
    "model.backbone.weights": None,
    "model.backbone.norm": "GN",
    "model.backbone.freeze_at": 0,
    "train.images_per_gpu": 2,
    "train.epoch_schedule": ((1, None),),
    "data.train": ("train",),
    "data.val": ("val",),
    "eval.every_epochs": 1,
}
PYTHON = ROOT / ".tools" / "notebook" / "bin" / "python"
Json = dict[str, Any]


def cells(name: str) -> list[Json]:
    found: list[Json] = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_has_no_outputs_and_only_calls_the_package(name: str) -> None:
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells(name))
    code = "\n".join("".join(cell["source"]) for cell in cells(name) if cell["cell_type"] == "code")
    tree = ast.parse(code)
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    imported += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert imported == ["maskfleet", "maskfleet.launch.sagemaker.stack"]
    logic = (ast.FunctionDef, ast.ClassDef, ast.While, ast.For, ast.Try, ast.With)
    assert not [node for node in ast.walk(tree) if isinstance(node, logic)]
    text = json.dumps(cells(name))
    ids = r"\b(subnet|sg|vpc|fs|vpce)-[0-9a-f]{4,}|\d{12}|arn:aws|AKIA|SECRET|[Pp]assword"
    assert not re.search(ids, text), "ids and credentials come from the stack and the role"


def test_there_are_no_other_notebooks() -> None:
    assert sorted(path.stem for path in FOLDER.iterdir()) == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_recipes_of_a_notebook_exist(name: str) -> None:
    [parameters] = [cell for cell in cells(name) if "parameters" in cell["metadata"].get("tags", [])]
    values: Json = {}
    exec("".join(parameters["source"]), values)
    for one in values["recipes"].values() if "recipes" in values else [values["recipe"]]:
        assert recipe(one).data.train


@dataclass
class World:
    """An account with the stacks `sm` and `lustre`, whose jobs are run here, and the home folder of a notebook."""

    service: TrainingService
    home: Path
    env: dict[str, str]

    def execute(self, name: str, stack: str, **parameters: object) -> list[Json]:
        """All outputs of the notebook, executed with other parameters on the notebook instance of a stack."""
        given = {"settings": SETTINGS, "instance": "ml.g5.xlarge", **parameters}
        code = "\n".join(f"{key} = {value!r}" for key, value in given.items())
        command = [str(PYTHON), ROOT / "tests/inference/run_notebook.py", FOLDER / f"{name}.ipynb", sys.executable]
        shutil.rmtree(self.home / "jupyter", ignore_errors=True)
        done = subprocess.run(
            [*command, self.home, code],
            env={**self.env, STACK_VARIABLE: stack},
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-6000:]
        return [output for cell in json.loads(done.stdout)["cells"] for output in cell.get("outputs", [])]


def text_of(outputs: list[Json]) -> str:
    """What the cells printed or returned."""
    return "\n".join(
        str("".join(output.get("text") or output.get("data", {}).get("text/plain", ""))) for output in outputs
    )


def html_of(outputs: list[Json]) -> str:
    [found] = ["".join(output["data"]["text/html"]) for output in outputs if "text/html" in output.get("data", {})]
    return found


def pictures_of(html: str) -> dict[str, ElementTree.Element]:
    found = re.findall(r'<img src="data:image/svg\+xml;base64,([^"]+)" alt="([^"]+)"', html)
    return {title: ElementTree.fromstring(base64.b64decode(data)) for data, title in found}


def lines_of(picture: ElementTree.Element) -> int:
    return sum(group.get("class") == "line" for group in picture.iter("{http://www.w3.org/2000/svg}g"))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    if not PYTHON.exists():
        pytest.skip("nbclient is not here: make test-tools installs it into .tools/notebook")
    folder = tmp_path_factory.mktemp("aws")
    home = folder / "home"
    (home / "efs").mkdir(parents=True)
    account = {"ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test", "EC2_METADATA_DISABLED": "true", "REGION": REGION}
    with pytest.MonkeyPatch.context() as patched, moto_server(folder / "log") as moto:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patched.delenv(name)
        for name, value in {**account, "ENDPOINT_URL": moto}.items():
            patched.setenv(f"AWS_{name}", value)
        clients = Services(REGION).client
        clients("s3").create_bucket(Bucket="lab", CreateBucketConfiguration={"LocationConstraint": REGION})
        clients("logs").create_log_group(logGroupName=GROUP)
        push_image(clients("ecr"))
        ids = create_stacks(clients)
        mounted = {ids[source]: home / source for source in ids}
        service = TrainingService(moto, clients, folder / "jobs", mounted)
        with served(service) as url:
            env = {**os.environ, "HOME": str(home), "OMP_NUM_THREADS": "1"}
            env |= {f"AWS_ENDPOINT_URL_{name}": url for name in ("SAGEMAKER", "IAM", "SERVICE_QUOTAS", "FSX")}
            yield World(service, home, env)


def push_image(ecr: Any) -> None:
    ecr.create_repository(repositoryName="maskfleet")
    kind = "application/vnd.docker.distribution.manifest.v2+json"
    config = {"mediaType": "application/vnd.docker.container.image.v1+json", "size": 7, "digest": "sha256:1"}
    manifest = json.dumps({"schemaVersion": 2, "mediaType": kind, "config": config, "layers": []})
    ecr.put_image(repositoryName="maskfleet", imageManifest=manifest, imageManifestMediaType=kind, imageTag="1.0")


def create_stacks(clients: Any) -> dict[str, str]:
    """The stack `sm` from the template, and `lustre` with its outputs and a Lustre file system; returns their ids.

    moto's CloudFormation creates neither Lustre nor the associations of subnets and route tables.
    """
    cloudformation, ec2 = clients("cloudformation"), clients("ec2")
    body = (deploy_path("cloudformation") / "sagemaker.yaml").read_text(encoding="utf-8")
    rows = [{"ParameterKey": "S3Bucket", "ParameterValue": "lab"}]
    cloudformation.create_stack(StackName="sm", TemplateBody=body, Parameters=rows, Capabilities=["CAPABILITY_IAM"])
    [made] = cloudformation.describe_stacks(StackName="sm")["Stacks"]
    outputs = {one["OutputKey"]: one["OutputValue"] for one in made["Outputs"]}
    table = next(
        table["RouteTableId"]
        for table in ec2.describe_route_tables()["RouteTables"]
        if any("NatGatewayId" in route for route in table["Routes"])
    )
    subnets = outputs["Subnets"].split(",")
    for subnet in subnets:
        ec2.associate_route_table(RouteTableId=table, SubnetId=subnet)
    lustre = clients("fsx").create_file_system(FileSystemType="LUSTRE", StorageCapacity=1200, SubnetIds=subnets[:1])
    fsx, efs = str(lustre["FileSystem"]["FileSystemId"]), str(outputs.pop("EfsFileSystemId"))
    template = {
        "Resources": {"Topic": {"Type": "AWS::SNS::Topic"}},
        "Outputs": {
            key: {"Value": value}
            for key, value in {**outputs, "FsxFileSystemId": fsx, "FsxMountName": MOUNT_NAME}.items()
        },
    }
    cloudformation.create_stack(StackName="lustre", TemplateBody=json.dumps(template))
    return {"efs": efs, "fsx": fsx}


@pytest.mark.slow
def test_training_from_efs(world: World, shapes: Path) -> None:
    outputs = world.execute("train_s3_or_efs", "sm", data=str(shapes), job_name="efs-1")
    text = text_of(outputs)
    assert f"stack sm in {REGION}: the job reads from efs; its results go to s3://lab/maskfleet" in text
    assert '"FileSystemType": "EFS"' in text
    assert f"LaunchedJob('sagemaker://{REGION}/efs-1')" in text
    assert re.search(r"step: 6\b", text), "the log of the job"
    assert "JobState.DONE" in text
    fetched = read_metrics(world.home / "runs" / "efs-1")
    assert fetched == read_metrics(world.home / "efs" / "logs" / "efs-1"), "the job wrote to its log channel"
    assert fetched[-1]["step"] == 6
    html = html_of(outputs)
    assert pictures_of(html).keys() == {"total loss", "box AP", "mask AP"}
    assert "<td>efs-1</td><td>6</td>" in html


@pytest.mark.slow
def test_training_from_fsx(world: World, shapes: Path) -> None:
    mount = world.home / "fsx"
    stage(str(shapes), str(mount / "data"), progress=lambda _: None)  # what FSx imports from S3 by itself
    (mount / MOUNT_NAME).symlink_to(mount)  # a job names the mount name first; the notebook mounts what is below it
    outputs = world.execute("train_s3_or_fsx", "lustre", data=str(shapes), job_name="fsx-1")
    text = text_of(outputs)
    assert "the job reads from fsx" in text
    assert "state='complete'" in text
    assert f'"DirectoryPath": "/{MOUNT_NAME}/data"' in text
    assert read_metrics(mount / "logs" / "fsx-1") == read_metrics(world.home / "runs" / "fsx-1") != []


@pytest.mark.slow
def test_comparing_two_trials(world: World, shapes: Path) -> None:
    outputs = world.execute("compare_trials", "lustre", data=str(shapes))
    text, html = text_of(outputs), html_of(outputs)
    assert "the jobs read from s3" in text, "the stack has no EFS"
    for backbone in ("resnet50", "resnet101"):
        name = f"maskfleet-backbones-1-{backbone}"
        records = read_metrics(world.home / "runs" / name)
        assert f"LaunchedJob('sagemaker://{REGION}/{name}')" in text
        assert f"<td>{backbone}</td><td>6</td>" in html
        best = max(one["mAP(bbox)/IoU=0.5:0.95"] for one in records if "mAP(bbox)/IoU=0.5:0.95" in one)
        loss = [one["total_cost"] for one in records if "total_cost" in one][-1]
        assert re.search(rf"<td>{backbone}</td><td>6</td><td>{100 * best:.1f}</td>.*?<td>{loss:.4g}</td>", html)
        described = Services(REGION).client("sagemaker").describe_training_job(TrainingJobName=name)
        assert described["ExperimentConfig"]["TrialName"] == name
    pictures = pictures_of(html)
    assert {title: lines_of(picture) for title, picture in pictures.items()} == {
        "total loss": 2, "box AP": 2, "mask AP": 2,
    }  # fmt: skip
    depths = [
        world.service.hosts[f"maskfleet-backbones-1-{one}"].root / "model/run.yaml" for one in ("resnet50", "resnet101")
    ]
    assert ["[3, 4, 6, 3]" in path.read_text() for path in depths] == [True, False]
