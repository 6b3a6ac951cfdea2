"""The roots that we ship: what `infra` assumes of them and, where the AWS provider is, a plan and a down on moto."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from terraform_aws import provider_mirror

from maskfleet.infra.kubernetes.access import NEEDED, access_of
from maskfleet.infra.stacks import BUCKETS, DATA, GUARDS, eks
from maskfleet.infra.terraform.down import DownOptions, down
from maskfleet.infra.terraform.plan import plan
from maskfleet.infra.terraform.state import Resource, State, split_kept
from maskfleet.infra.terraform.variables import declared, outputs_declared, required
from maskfleet.system.deploy_files import deploy_path
from tools import moto_server, tool

AWS, ADDONS = deploy_path("terraform", "eks", "aws"), deploy_path("terraform", "eks", "addons")


def test_the_first_root_has_an_output_for_every_variable_that_the_second_requires() -> None:
    assert required(ADDONS) <= outputs_declared(AWS)


def test_the_outputs_contain_what_a_kubeconfig_needs() -> None:
    assert set(NEEDED) <= outputs_declared(AWS)


def test_the_variables_that_maskfleet_reads_are_declared() -> None:
    assert {"region", "cluster_name", "profile"} <= declared(AWS)
    assert required(AWS) <= {"region", "cluster_name", "azs"}


def test_every_resource_type_of_the_roots_that_holds_data_is_kept() -> None:
    text = "".join(file.read_text() for file in AWS.glob("*.tf"))
    types = {line.split('"')[1] for line in text.splitlines() if line.startswith('resource "')}
    holds = {one for one in types if one.split("_")[1] in ("efs", "fsx", "s3", "backup", "dynamodb", "db", "ebs")}
    # Mount targets hold no data; the next cluster creates new ones.
    assert holds - DATA - GUARDS == {"aws_efs_mount_target"}
    assert {"aws_efs_file_system", "aws_fsx_lustre_file_system"} <= types


def test_lustre_keeps_its_network_and_efs_needs_none() -> None:
    def resource(address: str, *needs: str, **more: Any) -> Resource:
        type_ = address.split(".")[0]
        return Resource(address, type_, needs=needs, **more)

    network = [resource("aws_vpc.this"), resource('aws_subnet.private["a"]', "aws_vpc.this")]
    efs = [
        resource("aws_efs_file_system.this[0]"),
        resource("aws_efs_file_system_policy.this[0]", "aws_efs_file_system.this"),
        resource('aws_efs_mount_target.this["a"]', "aws_efs_file_system.this", "aws_subnet.private"),
    ]
    cluster = [resource("aws_eks_cluster.this", "aws_subnet.private", "aws_vpc.this")]
    kept, gone = split_kept(State(resources=(*network, *efs, *cluster)), DATA, GUARDS)
    assert [one.address for one in kept] == ["aws_efs_file_system.this[0]", "aws_efs_file_system_policy.this[0]"]
    lustre = resource("aws_fsx_lustre_file_system.this[0]", "aws_subnet.private")
    kept, gone = split_kept(State(resources=(*network, *efs, *cluster, lustre)), DATA, GUARDS)
    assert {one.address for one in gone} == {'aws_efs_mount_target.this["a"]', "aws_eks_cluster.this"}
    assert "aws_vpc.this" in {one.address for one in kept}


def test_delete_data_keeps_buckets_with_their_protection() -> None:
    bucket = Resource("aws_s3_bucket.data[0]", "aws_s3_bucket")
    kinds = ("aws_s3_bucket_policy", "aws_s3_bucket_public_access_block", "aws_s3_bucket_versioning")
    guards = [Resource(f"{kind}.data[0]", kind, needs=("aws_s3_bucket.data",)) for kind in kinds]
    efs = Resource("aws_efs_file_system.this[0]", "aws_efs_file_system")
    kept, gone = split_kept(State(resources=(bucket, *guards, efs)), BUCKETS, GUARDS)
    assert kept == [bucket, *guards]
    assert gone == [efs]


def test_a_partly_created_cluster_is_reached_without_outputs() -> None:
    entry = {
        "name": "fleet",
        "endpoint": "https://api",
        "certificate_authority": [{"data": "Y2E="}],
        "arn": "arn:aws:eks:eu-west-1:123456789012:cluster/fleet",
    }
    whole = Resource("aws_eks_cluster.this", "aws_eks_cluster", tainted=True, attributes=entry)
    assert access_of(State(resources=(whole,))) == {
        "cluster_id": "fleet",
        "cluster_endpoint": "https://api",
        "cluster_ca": "Y2E=",
        "region": "eu-west-1",
    }
    empty = replace(whole, attributes={"name": "fleet", "endpoint": None, "certificate_authority": []})
    assert access_of(State(resources=(empty,))) is None


@pytest.fixture
def on_moto(stage: Any, tmp_path: Path) -> Iterator[Any]:
    """A stage with the shipped roots, for which moto is AWS."""
    plugins = provider_mirror()
    tool("moto_server")
    config = tmp_path / "terraformrc"
    config.write_text(f'provider_installation {{\n  filesystem_mirror {{\n    path = "{plugins}"\n  }}\n}}\n')
    with moto_server(tmp_path / "moto.log") as url:
        credentials = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
        settings = {"AWS_ENDPOINT_URL": url, "AWS_EC2_METADATA_DISABLED": "true", "TF_CLI_CONFIG_FILE": str(config)}
        env = {**stage.env, **credentials, **settings, "CHECKPOINT_DISABLE": "1"}
        yield replace(stage, stack=eks(), env=env)


@pytest.mark.slow
def test_the_plan_of_the_shipped_root_lists_what_is_billed(on_moto: Any) -> None:
    zones = 'azs=["us-west-2a", "us-west-2b"]'
    planned = plan(on_moto.open(zones, "import_path=s3://data/ml-platform"))
    shown = on_moto.shown()
    assert len(planned[0].work) > 80
    assert planned[1] is None
    assert "aws_eks_cluster.this: to create" in shown
    for billed in ("NAT gateway", "EKS control plane", "EC2 nodes (", "FSx for Lustre (1200 GiB", "EFS ("):
        assert f"× {billed}" in shown
    assert "test" not in [word for command in on_moto.commands() for word in command]


@pytest.mark.slow
def test_down_of_the_shipped_root_keeps_efs_and_removes_its_network(on_moto: Any) -> None:
    session = on_moto.open('azs=["us-west-2a", "us-west-2b"]', "fsx_enabled=false")
    session.write_settings()
    session.base.init()
    targets = ["aws_efs_file_system_policy.this", "aws_efs_access_point.fleet", "aws_efs_mount_target.this"]
    session.base.plan(targets=[*targets, "aws_nat_gateway.this"])
    session.base.apply()
    assert "aws_nat_gateway" in {resource.type for resource in session.base.state().resources}
    down(on_moto.read(), DownOptions())
    kept = {resource.address for resource in on_moto.read().base.state().resources}
    needed = {"aws_efs_file_system.this[0]", "aws_efs_file_system_policy.this[0]", "aws_efs_access_point.fleet[0]"}
    assert kept == needed
    # Deleting these too is not tried: moto cannot delete the policy of a file system.
