"""A state in S3, with the real S3 backend of terraform against moto."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from maskfleet.errors import InfraError
from maskfleet.infra import state_bucket
from maskfleet.infra.terraform.down import DownOptions, down
from maskfleet.infra.terraform.plan import plan
from maskfleet.infra.terraform.session import Options, read_session
from maskfleet.infra.terraform.status import outputs
from maskfleet.infra.terraform.up import up
from tools import moto_server, tool

pytestmark = pytest.mark.slow

boto3 = pytest.importorskip("boto3", reason="boto3 is not here: pip install 'maskfleet[aws]'")


BUCKET = "our-states"
KEY = "maskfleet/eks/fleet/aws.tfstate"


@pytest.fixture
def on_s3(stage: Any, tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """A stage for which moto is S3, and a client of it."""
    tool("moto_server")
    with moto_server(tmp_path / "moto.log") as url:
        aws = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
        client = boto3.client("s3", endpoint_url=url, region_name="us-west-2", **keys)
        client.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
        yield replace(stage, env={**stage.env, **aws, "AWS_ENDPOINT_URL": url}), client
        client.close()


def state_in(client: Any) -> Any:
    return json.loads(client.get_object(Bucket=BUCKET, Key=KEY)["Body"].read())


def test_another_machine_uses_a_state_in_s3_unless_it_is_locked(on_s3: tuple[Any, Any], tmp_path: Path) -> None:
    stage, client = on_s3
    up(stage.open(state_bucket=BUCKET))
    assert state_in(client)["version"] == 4
    assert client.head_object(Bucket=BUCKET, Key=KEY)["ServerSideEncryption"] == "AES256"
    assert not list((stage.workdir / "state").glob("*"))
    elsewhere = replace(stage, workdir=tmp_path / "elsewhere")
    given = ("region=us-west-2", "cluster_name=fleet")
    session = read_session(Options(elsewhere.workdir, given, state_bucket=BUCKET), stage.stack, stage.view(), stage.env)
    assert outputs(session)["storage"] == "fleet"
    lock = json.dumps({"ID": "1f1f1f1f-0000-1111-2222-333333333333", "Operation": "apply", "Who": "ann@host"})
    client.put_object(Bucket=BUCKET, Key=f"{KEY}.tflock", Body=lock.encode())
    with pytest.raises(InfraError, match="state lock") as caught:
        up(stage.open("password=other"))
    assert "force-unlock 1f1f1f1f-0000-1111-2222-333333333333" in caught.value.remedy
    client.delete_object(Bucket=BUCKET, Key=f"{KEY}.tflock")
    down(elsewhere.read(), DownOptions(skip_cluster=True, delete_data=True))
    assert state_in(client)["resources"] == []


def test_a_missing_bucket_is_created_if_asked_and_left_alone_later(
    on_s3: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, client = on_s3
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.setenv(name, stage.env[name])
    stage.open(state_bucket="new-states", create_state_bucket=True)
    assert client.get_bucket_versioning(Bucket="new-states")["Status"] == "Enabled"
    assert all(client.get_public_access_block(Bucket="new-states")["PublicAccessBlockConfiguration"].values())
    assert client.get_bucket_encryption(Bucket="new-states")["ServerSideEncryptionConfiguration"]["Rules"]
    policy = json.loads(client.get_bucket_policy(Bucket="new-states")["Policy"])
    assert policy["Statement"][0]["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}
    assert client.get_bucket_location(Bucket="new-states")["LocationConstraint"] == "us-west-2"
    assert "created the state bucket new-states" in stage.shown()
    client.put_bucket_versioning(Bucket="new-states", VersioningConfiguration={"Status": "Suspended"})
    stage.open(state_bucket="new-states", create_state_bucket=True)
    assert "it was not changed" in stage.shown()
    assert client.get_bucket_versioning(Bucket="new-states")["Status"] == "Suspended"
    with pytest.raises(InfraError, match="needs the name of the bucket"):
        replace(stage, workdir=stage.workdir.parent / "other").open(create_state_bucket=True)


def test_a_bucket_that_cannot_be_protected_is_not_left_behind(
    on_s3: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, client = on_s3
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.setenv(name, stage.env[name])
    monkeypatch.setattr(state_bucket, "_protect", lambda client, bucket: client.get_bucket_policy(Bucket=bucket))
    with pytest.raises(InfraError, match="create the bucket new-states"):
        stage.open(state_bucket="new-states", create_state_bucket=True)
    assert [one["Name"] for one in client.list_buckets()["Buckets"]] == [BUCKET]


def test_a_missing_bucket_is_named(on_s3: tuple[Any, Any]) -> None:
    with pytest.raises(InfraError, match="does not exist") as caught:
        plan(on_s3[0].open(state_bucket="not-there"))
    assert "--create-state-bucket creates the state bucket" in caught.value.remedy
