"""The template for SageMaker: its resources by parameters, what its roles may do, cfn-lint, checkov and moto."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from cfn_template import Stack, read_template
from cluster_charts import checkov_findings
from iam_documents import allowed
from pydantic import ValidationError

from maskfleet.infra.cloudformation.kinds.sagemaker import PARAMETERS, SAGEMAKER, SageMakerStack
from maskfleet.infra.images.ecr import REPOSITORY
from maskfleet.launch.sagemaker import stack as launch_stack
from maskfleet.system.deploy_files import deploy_path
from tools import moto_server, run_tool, tool

FILE = deploy_path("cloudformation") / "sagemaker.yaml"
TEMPLATE = read_template(FILE)
REGIONS = ("ap-northeast-1", "ap-south-1", "ap-southeast-2", "eu-central-1", "eu-west-1", "us-east-1", "us-west-2")
BUCKET = "arn:aws:s3:::my-bucket"
ACCOUNT = "us-west-2:111122223333"
EXISTING = {"VpcId": "vpc-01234567", **{f"PrivateSubnet{n}Id": f"subnet-0123456{n}" for n in (1, 2, 3)}}
SECRET = "arn:aws:secretsmanager:us-west-2:111122223333:secret:git"


def stack(**parameters: Any) -> Stack:
    made = Stack(TEMPLATE, **{"S3Bucket": "my-bucket", "S3Prefix": "teams/vision", **parameters})
    assert made.refusals() == []
    return made


def may(policy: str, action: str, resource: str, context: dict[str, str] | None = None, **parameters: Any) -> bool:
    document = json.dumps(stack(**parameters).properties(policy)["PolicyDocument"])
    return allowed(document, action, resource, context or {})


def kinds(made: Stack) -> list[str]:
    return [one["Type"] for one in made.resources.values()]


def test_a_new_network_has_three_private_subnets_in_three_zones() -> None:
    made = stack()
    zones = {json.dumps(made.properties(f"PrivateSubnet{n}")["AvailabilityZone"]) for n in (1, 2, 3)}
    assert len(zones) == 3
    assert kinds(made).count("AWS::EC2::Subnet") == 4
    assert kinds(made).count("AWS::EFS::MountTarget") == 3
    assert made.properties("Efs")["Encrypted"] is True
    assert "AWS::FSx::FileSystem" not in kinds(made)


def test_an_existing_network_gets_no_part_of_its_own() -> None:
    made = stack(**EXISTING)
    assert not {"AWS::EC2::VPC", "AWS::EC2::Subnet", "AWS::EC2::VPCEndpoint", "AWS::EC2::NatGateway"} & {*kinds(made)}
    assert made.outputs["Subnets"] == "subnet-01234561,subnet-01234562,subnet-01234563"


@pytest.mark.parametrize(
    "parameters",
    [
        {"VpcId": "vpc-01234567"},
        {"PrivateSubnet1Id": "subnet-01234567"},
        {"UseEfs": "false", "EfsId": "fs-01234567"},
        {"GitSecretArn": SECRET},
    ],
)
def test_parameters_that_contradict_each_other_are_refused(parameters: dict[str, str]) -> None:
    assert Stack(TEMPLATE, S3Bucket="my-bucket", **parameters).refusals()


def test_every_combination_refers_only_to_what_exists() -> None:
    choices = {
        "VpcId": ("", "vpc-01234567"),
        "UseEfs": ("true", "false"),
        "LustreStorageGiB": (0, 1200),
        "NotebookInstanceType": ("none", "ml.t3.xlarge"),
        "GitUrl": ("", "https://git.example/a"),
        "InterfaceEndpoints": ("true", "false"),
    }
    for values in product(*choices.values()):
        given: dict[str, Any] = dict(zip(choices, values, strict=True))
        made = stack(**{**given, **(EXISTING if given["VpcId"] else {})})
        for name in made.resources:
            assert made.needs(name) <= made.resources.keys(), (name, given)
        assert made.outputs


def test_launch_reads_outputs_that_the_template_has() -> None:
    always = {
        launch_stack.ROLE,
        launch_stack.SUBNETS,
        launch_stack.GROUPS,
        launch_stack.DATA,
        launch_stack.HOSTING_ROLE,
    }
    assert always == set(SAGEMAKER.outputs)
    assert always <= stack(UseEfs="false", NotebookInstanceType="none").outputs.keys()
    wanted = always | {*launch_stack.FILE_SYSTEMS.values(), launch_stack.FSX_MOUNT_NAME}
    assert wanted <= stack(LustreStorageGiB=1200).outputs.keys()


def test_jobs_use_their_prefix_and_nothing_else() -> None:
    for action in ("s3:GetObject", "s3:PutObject"):
        assert may("DataPolicy", action, f"{BUCKET}/teams/vision/coco/a.jpg")
        for other in ("my-bucket/payroll.csv", "my-bucket/teams/vision-2/a", "my-bucket-2/teams/vision/a"):
            assert not may("DataPolicy", action, f"arn:aws:s3:::{other}")
    assert not may("DataPolicy", "s3:DeleteObject", f"{BUCKET}/teams/vision/coco/a.jpg")
    assert may("DataPolicy", "s3:ListBucket", BUCKET, {"s3:prefix": "teams/vision/coco/"})
    assert not may("DataPolicy", "s3:ListBucket", BUCKET, {"s3:prefix": "teams/"})
    assert may("DataPolicy", "ecr:BatchGetImage", f"arn:aws:ecr:{ACCOUNT}:repository/maskfleet")
    assert not may("DataPolicy", "ecr:BatchGetImage", f"arn:aws:ecr:{ACCOUNT}:repository/other")
    assert not may("DataPolicy", "ecr:PutImage", f"arn:aws:ecr:{ACCOUNT}:repository/maskfleet")


def test_endpoints_read_models_and_write_only_answers() -> None:
    data = f"{BUCKET}/teams/vision"
    assert may("HostingPolicy", "s3:GetObject", f"{data}/endpoints/shapes/0123/model.tar.gz")
    assert not may("HostingPolicy", "s3:GetObject", f"{BUCKET}/payroll.csv")
    for place in ("output", "failure"):
        assert may("HostingPolicy", "s3:PutObject", f"{data}/async/shapes/{place}/1")
    for place in (
        "endpoints/shapes/0123/model.tar.gz",
        "output/r50/output/model.tar.gz",
        "coco/a.jpg",
        "async/shapes/input/1",
    ):
        assert not may("HostingPolicy", "s3:PutObject", f"{data}/{place}")
    assert not may("HostingPolicy", "s3:DeleteObject", f"{data}/async/shapes/output/1")
    stream = "log-stream:AllTraffic/i-1"
    assert may(
        "HostingPolicy", "logs:PutLogEvents", f"arn:aws:logs:{ACCOUNT}:log-group:/aws/sagemaker/Endpoints/a:{stream}"
    )
    jobs = f"arn:aws:logs:{ACCOUNT}:log-group:/aws/sagemaker/TrainingJobs:log-stream:r50/algo-1"
    assert not may("HostingPolicy", "logs:PutLogEvents", jobs)
    assert may("HostingPolicy", "ecr:BatchGetImage", f"arn:aws:ecr:{ACCOUNT}:repository/maskfleet")
    assert not may("HostingPolicy", "ecr:BatchGetImage", f"arn:aws:ecr:{ACCOUNT}:repository/other")
    roles = stack().properties("HostingPolicy")["Roles"]
    assert len(roles) == 1
    assert roles[0] in stack().properties("NetworkPolicy")["Roles"]
    assert roles[0] not in stack().properties("DataPolicy")["Roles"], "endpoints must not write where jobs do"


def test_a_bucket_with_a_customer_key_can_be_used_and_the_key_only_through_s3() -> None:
    key = "arn:aws:kms:us-west-2:111122223333:key/1234"
    through = {"kms:ViaService": "s3.us-west-2.amazonaws.com"}
    for action in ("kms:Decrypt", "kms:GenerateDataKey"):
        assert may("BucketKeyPolicy", action, key, through, S3KmsKeyArn=key)
        assert not may("BucketKeyPolicy", action, key, S3KmsKeyArn=key)
        assert not may("BucketKeyPolicy", action, f"{key}2", through, S3KmsKeyArn=key)
    roles = stack(S3KmsKeyArn=key).properties("BucketKeyPolicy")["Roles"]
    assert roles == ["<TrainingRole>", "<HostingRole>", "<NotebookRole>"]
    bare = stack(S3KmsKeyArn=key, NotebookInstanceType="none")
    assert bare.properties("BucketKeyPolicy")["Roles"] == roles[:2]
    assert "BucketKeyPolicy" not in stack().resources


def test_the_notebook_passes_only_the_role_of_the_jobs() -> None:
    document = stack().properties("NotebookPolicy")["PolicyDocument"]
    [passing] = [one for one in document["Statement"] if one["Action"] == "iam:PassRole"]
    assert passing["Resource"] == stack().outputs["TrainingRoleArn"]
    assert passing["Condition"] == {"StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}}
    job = f"arn:aws:sagemaker:{ACCOUNT}:training-job/r50"
    assert may("NotebookPolicy", "sagemaker:CreateTrainingJob", job)
    for action in ("sagemaker:DeleteEndpoint", "iam:CreateRole", "iam:AttachRolePolicy", "cloudformation:DeleteStack"):
        assert not may("NotebookPolicy", action, "*")
    assert may("GitSecretPolicy", "secretsmanager:GetSecretValue", SECRET, GitUrl="https://a/b", GitSecretArn=SECRET)
    assert not may(
        "GitSecretPolicy", "secretsmanager:GetSecretValue", f"{SECRET}2", GitUrl="https://a/b", GitSecretArn=SECRET
    )


def test_the_notebook_reads_its_own_stack_by_name() -> None:
    # The kernel has the name of the stack alone. IAM sees a call with it as one on `stack/NAME/*`.
    stacks = f"arn:aws:cloudformation:{ACCOUNT}:stack"
    assert may("NotebookPolicy", "cloudformation:DescribeStacks", f"{stacks}/fleet/*")
    for other in ("fleet-2/*", "other/*", "fleet"):
        assert not may("NotebookPolicy", "cloudformation:DescribeStacks", f"{stacks}/{other}"), other


def test_the_notebook_has_no_root_and_no_direct_way_to_the_internet() -> None:
    notebook = stack().properties("Notebook")
    assert (notebook["RootAccess"], notebook["DirectInternetAccess"]) == ("Disabled", "Disabled")
    assert "Notebook" not in stack(NotebookInstanceType="none").resources


def test_the_settings_are_the_parameters() -> None:
    assert set(PARAMETERS) == set(TEMPLATE["Parameters"])
    settings = SageMakerStack(name="sm", s3_bucket="my-bucket", interface_endpoints=True, lustre_storage_gib=1200)
    given = settings.parameters()
    assert (given["InterfaceEndpoints"], given["UseEfs"], given["LustreStorageGiB"]) == ("true", "true", "1200")
    numbers = {name: int(given[name]) for name in ("LustreStorageGiB", "NotebookVolumeGiB")}
    assert Stack(TEMPLATE, **{**given, **numbers}).refusals() == []
    assert [one.price for one in settings.billed()][-1] == "gib_month/fsx_scratch_2"
    for wrong in ({"vpc_id": "vpc-01234567"}, {"efs_id": "fs-01234567", "use_efs": False}, {"git_secret_arn": SECRET}):
        with pytest.raises(ValidationError):
            SageMakerStack.model_validate({"name": "sm", "s3_bucket": "my-bucket", **wrong})


def test_the_stack_and_launch_use_the_same_repository() -> None:
    assert SageMakerStack(name="sm", s3_bucket="my-bucket").ecr_repository == REPOSITORY
    assert TEMPLATE["Parameters"]["EcrRepository"]["Default"] == REPOSITORY
    # What `newest_image` asks for in the notebook.
    assert may("DataPolicy", "ecr:DescribeImages", f"arn:aws:ecr:{ACCOUNT}:repository/{REPOSITORY}")
    assert may("NotebookPolicy", "ecr:DescribeRepositories", f"arn:aws:ecr:{ACCOUNT}:repository/{REPOSITORY}")


def test_the_notebook_creates_trials_and_deletes_none() -> None:
    for kind in ("experiment", "experiment-trial"):
        assert may("NotebookPolicy", "sagemaker:CreateTrial", f"arn:aws:sagemaker:{ACCOUNT}:{kind}/e")
        assert not may("NotebookPolicy", "sagemaker:DeleteTrial", f"arn:aws:sagemaker:{ACCOUNT}:{kind}/e")


def test_the_notebook_starts_after_what_it_mounts_and_downloads_from() -> None:
    key = "arn:aws:kms:us-west-2:111122223333:key/1234"
    made = stack(LustreStorageGiB=1200, GitUrl="https://a/b", GitSecretArn=SECRET, S3KmsKeyArn=key)
    network = {"PrivateDefaultRoute", "PrivateSubnet1Routes", "S3Endpoint"}
    assert network | {"EfsMountTarget1", "Lustre", "GitSecretPolicy", "BucketKeyPolicy"} <= made.needs("Notebook")
    assert "EfsMountTarget1" in stack(**EXISTING).needs("Notebook")


PROGRAM = """#!/bin/sh
echo "$(basename "$0") $*" >> {log}
case "$*" in
create*) mkdir -p {prefix}/bin; cp "$0" {prefix}/bin/python ;;
-c*) exec {python} "$@" ;;
esac
"""


def start_script(**parameters: Any) -> str:
    return str(stack(**parameters).properties("MountFileSystems")["OnStart"][0]["Content"])


def test_the_notebook_gets_a_kernel_and_the_notebooks(tmp_path: Path) -> None:
    """The part of the script that installs the kernel, with conda, pip and the AWS CLI replaced by a recorder."""
    text = start_script(NotebookWheel="wheels/m-1-py3-none-any.whl")
    assert 'wheel="wheels/m-1-py3-none-any.whl"' in text
    assert '"s3://my-bucket/teams/vision/$wheel" "' in text
    inner = text.partition("<<'SCRIPT'\n")[2].partition("\nSCRIPT\n")[0]
    home, log = tmp_path / "home", tmp_path / "log"
    script = tmp_path / "kernel.sh"
    script.write_text(inner.replace("/home/ec2-user", str(home)), encoding="utf-8")
    prefix = home / "SageMaker/.maskfleet/python"
    for program in (home / "anaconda3/bin/conda", tmp_path / "bin/aws"):
        program.parent.mkdir(parents=True)
        program.write_text(PROGRAM.format(log=log, prefix=prefix, python=sys.executable))
        program.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    wheel = "s3://my-bucket/teams/vision/wheels/m-1-py3-none-any.whl"
    notebook = home / "SageMaker/maskfleet/compare_trials.ipynb"
    for _ in range(2):
        subprocess.run(["bash", script, wheel, "sm", "us-west-2"], env=env, check=True, capture_output=True)
        assert notebook.exists()
        notebook.write_text("mine")
    assert (home / "SageMaker/maskfleet-setup.log").read_text() == "the kernel maskfleet is ready\n"
    assert notebook.read_text() == "mine", "a second start keeps what the user changed"
    calls = log.read_text().splitlines()
    file = home / "SageMaker/.maskfleet/m-1-py3-none-any.whl"
    assert [call for call in calls if "conda" in call.split()[0]] == calls[:1], "the environment is kept"
    assert calls[1] == f"aws s3 cp --only-show-errors {wheel} {file}"
    assert calls[2] == f"python -m pip install {file}[aws] ipykernel"
    assert f"python -m pip install --no-deps --force-reinstall {file}" in calls
    kernel = "python -m ipykernel install --user --name maskfleet --display-name maskfleet"
    assert f"{kernel} --env {launch_stack.STACK_VARIABLE} sm --env AWS_REGION us-west-2" in calls


def test_the_notebook_runs_amazon_linux_2023() -> None:
    platform = stack().properties("Notebook")["PlatformIdentifier"]
    assert platform == "notebook-al2023-v1"  # from July 2026 on, SageMaker neither creates nor starts older ones
    session = pytest.importorskip("botocore.session").get_session()
    known = session.get_service_model("sagemaker").shape_for("PlatformIdentifier").metadata["pattern"]
    assert platform in known.strip("()").split("|")
    document = json.dumps(stack().properties("S3Endpoint")["PolicyDocument"])
    packages = "arn:aws:s3:::al2023-repos-us-west-2-de612dc2/core/mirrors/latest/x86_64/mirror.list"
    assert allowed(document, "s3:GetObject", packages, {})


def test_the_notebook_mounts_both_file_systems_with_packages_of_amazon_linux_2023(tmp_path: Path) -> None:
    """The script that runs at each start, with every program that needs root replaced by a recorder."""
    programs, log, home = tmp_path / "bin", tmp_path / "log", tmp_path / "home"
    programs.mkdir()
    for name in ("cat", "chmod", "mkdir"):
        (programs / name).symlink_to(tool(name))
    for name in ("chown", "dnf", "mount", "sudo"):
        program = programs / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> {log}\n', encoding="utf-8")
        program.chmod(0o755)
    text = start_script(LustreStorageGiB=1200)
    text = text.replace("/home/ec2-user", str(home)).replace("/usr/local/bin", str(tmp_path))
    subprocess.run(["/bin/bash", "-c", text], env={"PATH": str(programs)}, check=True, capture_output=True)
    calls = [line for line in log.read_text().splitlines() if not line.startswith("chown")]
    lustre = "<Lustre>.fsx.us-west-2.amazonaws.com@tcp:/<Lustre.LustreMountName>"
    assert calls[0] == "dnf install -y nfs-utils"
    assert calls[1].startswith("mount -t nfs4 ")
    assert calls[1].endswith(f" <Efs>.efs.us-west-2.amazonaws.com:/ {home}/efs")
    assert calls[2:] == ["dnf install -y lustre-client", f"mount -t lustre -o noatime,flock {lustre} {home}/fsx"]


def test_the_background_installation_does_not_keep_the_output_of_the_start_script_open(tmp_path: Path) -> None:
    """Whoever reads that output to its end would wait for the installation, beyond the 5 minutes of SageMaker."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("cat", "chmod"):
        (programs / name).symlink_to(tool(name))
    (programs / "sudo").write_text("#!/bin/sh\necho of the installation\n", encoding="utf-8")
    (programs / "sudo").chmod(0o755)
    text = start_script(UseEfs="false", NotebookWheel="m.whl").replace("/usr/local/bin", str(tmp_path))
    ended = subprocess.run(["/bin/bash", "-c", text], env={"PATH": str(programs)}, check=True, capture_output=True)
    assert (ended.stdout, ended.stderr) == (b"", b"")


@pytest.mark.slow
def test_cfn_lint_and_checkov_find_nothing() -> None:
    assert run_tool("cfn-lint", FILE, "--regions", *REGIONS).strip() == ""
    assert checkov_findings(FILE, "cloudformation", ()) == []


@pytest.mark.slow
def test_shellcheck_finds_nothing_in_the_notebooks_script(tmp_path: Path) -> None:
    tool("shellcheck")
    script = tmp_path / "start.sh"
    script.write_text(start_script(LustreStorageGiB=1200, NotebookWheel="m.whl"), encoding="utf-8")
    assert "mount -t lustre" in script.read_text(encoding="utf-8")
    run_tool("shellcheck", script)
    inner = script.read_text(encoding="utf-8").partition("<<'SCRIPT'\n")[2].partition("\nSCRIPT\n")[0]
    script.write_text(f"{inner}\n", encoding="utf-8")
    run_tool("shellcheck", script)


@pytest.mark.slow
def test_moto_creates_the_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boto3 = pytest.importorskip("boto3")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with moto_server(tmp_path / "log") as url:
        account = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
        client = boto3.client("cloudformation", endpoint_url=url, region_name="us-east-1", **account)
        rows = [{"ParameterKey": "S3Bucket", "ParameterValue": "my-bucket"}]
        body = FILE.read_text(encoding="utf-8")
        client.create_stack(StackName="sm", TemplateBody=body, Parameters=rows, Capabilities=["CAPABILITY_IAM"])
        [found] = client.describe_stacks(StackName="sm")["Stacks"]
        assert found["StackStatus"] == "CREATE_COMPLETE"
        assert {one["OutputKey"] for one in found["Outputs"]} == stack().outputs.keys()
